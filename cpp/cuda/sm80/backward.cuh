// Backward pass: probabilities are computed again from the statistics of the forward pass
// (arXiv 2205.14135, Algorithm 4; 2307.08691).
//
// A block owns a tile of keys of one key head and takes it past the rows of all query heads (and
// all batches, where keys are shared) that see any of it. Cotangents of key and value stay in
// registers; that of the query is added up in global memory, in f32. Five products a tile of
// logits, each dealt to the warps by a grid of its own.
//
// Probabilities and gradients of logits go between products in shared memory, [row][key]. Where a
// warp has all rows of its keys (kOwnsKeys), it takes both to its sums of those keys in registers,
// and shared memory holds only the gradients, for the query.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "cuda/common/rules.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/sm80/element.cuh"
#include "cuda/sm80/forward.cuh"
#include "cuda/sm80/params.h"
#include "cuda/sm80/schedule.cuh"
#include "cuda/sm80/tile.cuh"
#include "cuda/sm80/tiles.h"

namespace jaxflash::cuda::sm80 {

// Calls `visit(strip, block, element)` for all of a thread's accumulators.
template <int kStrips, int kBlocks, class Visitor>
__device__ __forceinline__ void for_each_element(const Visitor& visit) {
#pragma unroll
  for (int i = 0; i < kStrips * kBlocks * 4; ++i) visit(i / (4 * kBlocks), i / 4 % kBlocks, i % 4);
}

template <int kStrips, int kBlocks>
__device__ __forceinline__ void clear(float (&d)[kStrips][kBlocks][4]) {
  for_each_element<kStrips, kBlocks>(
      [&](int strip, int block, int i) { d[strip][block][i] = 0.f; });
}

// d += a b over kSteps k-steps. `a_of(strip, step)` and `b_of(pair of blocks, step)` load operands:
// those of 16-bit types a step ahead of their use; floats, which take twice the registers, at once,
// and not with the addresses of all steps kept.
template <class T, int kSteps, int kStrips, int kBlocks, class AOf, class BOf>
__device__ __forceinline__ void multiply(const AOf& a_of, const BOf& b_of, bool precise,
                                         float (&d)[kStrips][kBlocks][4]) {
  constexpr int kAhead = kIsFloat<T> ? 0 : 1;
  OperandA<T> a[kAhead + 1][kStrips];
  OperandB<T> b[kAhead + 1][kBlocks / 2];
  const auto load = [&](int step) {
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) a[step & kAhead][strip] = a_of(strip, step);
#pragma unroll
    for (int pair = 0; pair < kBlocks / 2; ++pair) b[step & kAhead][pair] = b_of(pair, step);
  };
  if (kAhead == 1) load(0);
#pragma unroll(kAhead == 1 ? kSteps : 1)
  for (int step = 0; step < kSteps; ++step) {
    if (step + kAhead < kSteps) load(step + kAhead);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
        multiply_add(d[strip][block], a[step & kAhead][strip], b[step & kAhead][block / 2],
                     block % 2, precise);
      }
    }
  }
}

// One warp's place in a grid of warps over [rows][columns].
struct WarpPlace {
  int row;
  int column;
};
__device__ __forceinline__ WarpPlace warp_place(WarpGrid grid, int rows, int columns) {
  const int warp = threadIdx.x >> 5;
  return {warp / grid.columns * (rows / grid.rows), warp % grid.columns * (columns / grid.columns)};
}

// A head as the backward kernel sees it.
struct BackwardView {
  HeadView head;
  // Its arrays, at row 0.
  const void* query;
  const void* cotangent;
  const float* logit_max;
  const float* log_sum;
  const float* delta;
  float* query_sums;
  uint32_t* turns;
  float start_factor;  // from a row's maximum to what its products start from
  // Tiles of rows: those that see any of the block's keys, and those whose existing rows see all.
  int begin, end;
  int whole_begin, whole_end;
};

// What a block visits, one after the other: the tiles of rows of each head of each batch.
struct Item {
  int head;  // of all repeats and the group of query heads; past the block's at the end
  int tile;
  int checks;  // kHidden: nothing to compute, at most a turn to take
  int view;    // which of the two
};

// Accumulators [16 * strip ..][8 * block ..] of 16-bit types to operands A of their transpose:
// strips of two blocks' columns, k-steps of a strip's rows each.
//
// A thread holds rows lane / 4 and the one 8 below of a strip, columns 2 * (lane % 4) and the next
// of a block; packed, each half of rows is a fragment of an 8x8 matrix. Transposed, a thread holds
// of each the row lane / 4, which was a column.
template <class T, int kStrips, int kBlocks>
__device__ __forceinline__ void transpose(const float (&d)[kStrips][kBlocks][4],
                                          OperandA<T> (&a)[kBlocks / 2][kStrips]) {
#pragma unroll
  for (int i = 0; i < kStrips * kBlocks * 2; ++i) {
    const int strip = i / (2 * kBlocks), block = i / 2 % kBlocks, half = i % 2;
    a[block / 2][strip].word[2 * half + block % 2] =
        ptx::transpose_8x8(pack(T(), d[strip][block][2 * half], d[strip][block][2 * half + 1]));
  }
}

template <class T, int D, class Policy>
struct Backward {
  static constexpr BackwardTile kTile =
      backward_tile(kIsFloat<T>, D, Policy::kEverything, JAXFLASH_ARCH);
  static constexpr int kRows = kTile.rows, kKeys = kTile.keys, kThreads = kTile.threads();
  static constexpr int kStages = kTile.stages, kPairStages = kTile.pair_stages;
  static constexpr bool kOwnsKeys = kTile.owns_keys();
  // Rows that logits are computed for at a time.
  static constexpr int kChunkRows = kTile.chunk_rows();
  // Warp tiles of the three kinds of product, in strips of 16 rows and blocks of 8 columns.
  static constexpr int kStrips = kChunkRows / kTile.logits.rows / 16;
  static constexpr int kBlocks = kKeys / kTile.logits.columns / 8;
  static constexpr int kKeyStrips = kKeys / kTile.key_sums.rows / 16;
  static constexpr int kKeyBlocks = D / kTile.key_sums.columns / 8;
  static constexpr int kQueryStrips = kRows / kTile.query_sums.rows / 16;
  // Where registers are short, 32 columns at a time.
  static constexpr int kQueryParts =
      D < 256 || !Policy::kEverything ? 1 : D / kTile.query_sums.columns / 32;
  static constexpr int kQueryBlocks = D / kTile.query_sums.columns / 8 / kQueryParts;
  static_assert(kStrips > 0 && kKeyStrips > 0 && kQueryStrips > 0);
  static_assert(kBlocks % 2 == 0 && kKeyBlocks % 2 == 0 && kQueryBlocks % 2 == 0);
  static_assert(kTile.key_sums.rows * kTile.key_sums.columns == kTile.warps());
  static_assert(kTile.query_sums.rows * kTile.query_sums.columns == kTile.warps());
  static_assert(kRows <= kThreads && kRows % kChunkRows == 0);

  using Layout = TileLayout<T, D>;          // key, value, query, cotangent
  using PairLayout = TileLayout<T, kKeys>;  // probabilities and gradients of logits
  static constexpr int kKeyBytes = kKeys * Layout::kRowBytes;
  static constexpr int kRowBytes = kRows * Layout::kRowBytes;
  static constexpr int kPairBytes = kRows * PairLayout::kRowBytes;
  // Shared memory, from the base on.
  static constexpr int kValueAt = kKeyBytes;
  static constexpr int kQueryAt = kValueAt + kKeyBytes;
  static constexpr int kCotangentAt = kQueryAt + kStages * kRowBytes;
  static constexpr int kGradientAt = kCotangentAt + kStages * kRowBytes;
  static constexpr int kProbabilityAt = kGradientAt + kPairStages * kPairBytes;
  static constexpr int kStatisticsAt =  // [stage][3][row]
      kProbabilityAt + (kOwnsKeys ? 0 : kPairStages * kPairBytes);
  static constexpr int kArraysAt = kStatisticsAt + 3 * kStages * kRows * 4;  // as staged
  static_assert(kArraysAt == kTile.shared_bytes(D, kSize<T>));

  using Logits = float[kStrips][kBlocks][4];
  using KeySums = float[kKeyStrips][kKeyBlocks][4];

  // What the threads share beside the tiles.
  struct Shared {
    Work work;
    int end_head;  // of those that the block takes its keys past
    BackwardView views[2];
    // Every thread arrives when its copies of a stage's rows are there; all wait before they read
    // it.
    uint64_t rows_arrived[kStages];
    // Where the batches that share these keys differ: in length, what is past it must not be read;
    // in scale, key_sum is kept in units of the scale of the last.
    int loaded_keys;
    float key_sum_scale;
  };

  const BackwardParams& params;
  const Problem& problem;
  Shared& shared;
  const float* row_statistics;  // [stage][3][row], in shared memory
  uint32_t base;                // of the tiles there

  WarpPlace logits_place = warp_place(kTile.logits, kRows, kKeys);
  WarpPlace key_place = warp_place(kTile.key_sums, kKeys, D);
  WarpPlace query_place = warp_place(kTile.query_sums, kRows, D);

  // The current item, and where it lies.
  Item item = {0, -1, kHidden, 0};
  int computed = 0;  // items, which take turns with the stages
  TileScan scan;     // of the item's head

  KeySums key_sum, value_sum;

  __device__ __forceinline__ bool wants_query() const { return params.query_sums != nullptr; }
  __device__ __forceinline__ bool wants_bias() const {
    return Policy::kEverything && params.bias_cotangent.data != nullptr;
  }
  __device__ __forceinline__ bool takes_turns() const { return params.turns != nullptr; }
  __device__ __forceinline__ bool drops() const {
    return Policy::kEverything && problem.dropout_threshold != 0;
  }

  __device__ __forceinline__ bool computes() const { return item.checks != kHidden; }
  __device__ __forceinline__ int stage() const { return computed % kStages; }
  __device__ __forceinline__ int pair_stage() const { return computed % kPairStages; }
  // The view of the item's head.
  __device__ __forceinline__ const BackwardView& current() const { return shared.views[item.view]; }
  // A head whose scale is 0 brings the keys nothing and, where batches share them, no unit for
  // their sums: see change_batch.
  __device__ __forceinline__ bool adds_to_keys() const {
    return params.repeats == 1 || current().head.scale != 0.f;
  }

  __device__ __forceinline__ uint32_t query_tile() const {
    return base + kQueryAt + stage() * kRowBytes;
  }
  __device__ __forceinline__ uint32_t cotangent_tile() const {
    return base + kCotangentAt + stage() * kRowBytes;
  }
  __device__ __forceinline__ uint32_t gradient_tile() const {
    return base + kGradientAt + pair_stage() * kPairBytes;
  }
  __device__ __forceinline__ uint32_t probability_tile() const {
    return base + kProbabilityAt + pair_stage() * kPairBytes;
  }
  __device__ __forceinline__ ArrayTiles arrays_of(int of_stage) const {
    return array_tiles(params.staging, base + kArraysAt, of_stage);
  }
  __device__ __forceinline__ uint32_t rows_arrived(int of_stage) const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared.rows_arrived)) + 8 * of_stage;
  }

  __device__ __forceinline__ int first_key() const { return shared.work.tile * kKeys; }
  __device__ __forceinline__ int64_t key_head() const {
    return shared.work.head % static_cast<uint32_t>(problem.key_heads);
  }

  // The batch of a repeat of the block's batch unit.
  __device__ __forceinline__ int64_t batch_of(int64_t repeat) const {
    return sm80::batch_of(params, shared.work.head / static_cast<uint32_t>(problem.key_heads),
                          repeat);
  }

  // Thread 0 fills in the view of a head, numbered as an item's.
  __device__ __forceinline__ void look_at_head(int number, BackwardView& view) const {
    const int64_t batch = batch_of(number / params.group);
    const int64_t head = key_head() * params.group + number % params.group;
    look_at<Policy>(problem, params.maps, batch, head, view.head);
    const auto at = [&](const Tensor& tensor, int size) {
      return static_cast<const char*>(tensor.data) +
             (batch_offset(tensor, view.head.index) + head * tensor.head) * size;
    };
    view.query = at(problem.query, kSize<T>);
    view.cotangent = at(params.output_cotangent, kSize<T>);
    view.logit_max = reinterpret_cast<const float*>(at(params.statistics.logit_max, 4));
    view.log_sum = reinterpret_cast<const float*>(at(params.statistics.log_sum, 4));
    view.delta = reinterpret_cast<const float*>(at(params.delta, 4));
    const bool normal = fabsf(view.head.scale) >= FLT_MIN;  // else 1 / scale may be infinite
    view.start_factor = normal ? -1.f / view.head.scale : 0.f;
    const int64_t index = batch * problem.query_heads + head;
    view.query_sums = params.query_sums + index * params.strips * (16 * D);
    view.turns = params.turns + index * params.maps.row_tiles;

    const Extent& extent = view.head.extent;
    const Range keys = {first_key(), int64_t{first_key()} + kKeys};
    const Range any = rows_of_any_key(extent, keys);
    const Range every = rows_of_every_key(extent, keys);
    view.begin = static_cast<int>(any.begin / kRows);
    view.end = any.end > any.begin ? static_cast<int>((any.end + kRows - 1) / kRows) : 0;
    const int64_t first = blockIdx.y * params.split_tiles - number * params.row_tiles;
    view.begin = static_cast<int>(max_of(view.begin, first));
    view.end = static_cast<int>(min_of(view.end, first + params.split_tiles));
    view.whole_begin = static_cast<int>((every.begin + kRows - 1) / kRows);
    // Rows past the query length need no checks: their probabilities are 0.
    const bool to_the_end = every.end == extent.query_length;
    view.whole_end = static_cast<int>((every.end + (to_the_end ? kRows - 1 : 0)) / kRows);
  }

  // The first visible tile of a view from `tile` on, or its end.
  __device__ __forceinline__ Visit visible_from(const BackwardView& view, int tile) {
    const bool mapped = params.maps.query_segments != nullptr || params.maps.mask.data != nullptr;
    if (Policy::kEverything && mapped) {
      const auto checks_of = [&](int t) {
        return tile_checks<Policy, kRows, kKeys>(problem, params.maps, view.head, t,
                                                 shared.work.tile);
      };
      // Where turns are taken, hidden tiles have theirs.
      if (takes_turns()) return {tile, tile < view.end ? checks_of(tile) : kHidden};
      return scan.next(tile, view.end, checks_of);
    }
    return {tile, tile >= view.whole_begin && tile < view.whole_end ? 0 : kCheckRanges};
  }

  // The item after the current one. All threads call it.
  __device__ __forceinline__ Item next_item() {
    Visit visit = {0, kHidden};
    int end = 0;
    if (item.tile >= 0) {
      visit = visible_from(current(), item.tile + 1);
      end = current().end;
    }
    Item next = item;
    while (visit.tile >= end) {
      if (++next.head >= shared.end_head) break;
      next.view = 1 - item.view;
      BackwardView& view = shared.views[next.view];
      __syncthreads();  // all have done with the view, before thread 0 overwrites it
      if (threadIdx.x == 0) look_at_head(next.head, view);
      __syncthreads();  // all wait for thread 0's view
      scan.count = 0;   // what it knows is of another head
      visit = visible_from(view, view.begin);
      end = view.end;
    }
    return {next.head, visit.tile, visit.checks, next.view};
  }

  // Keys of this tile that exist for a view.
  __device__ __forceinline__ int keys_in(const BackwardView& view) const {
    return static_cast<int>(clamp_to(view.head.extent.key_length - first_key(), 0, kKeys));
  }

  __device__ __forceinline__ void load_keys(const HeadView& head) const {
    load_tiles<Layout, kKeys, kThreads>(base,
                                        rows_of(problem.key, head.index, key_head(),
                                                problem.head_dim, kSize<T>, params.vectors.key),
                                        base + kValueAt,
                                        rows_of(problem.value, head.index, key_head(),
                                                problem.value_dim, kSize<T>, params.vectors.value),
                                        first_key(), static_cast<int>(head.extent.key_length));
  }

  // Starts to load the rows of an item, their statistics, and what apply_rules will read; a thread
  // arrives when what it loads is there.
  __device__ __forceinline__ void load_rows(const Item& to_load, int to_stage) const {
    if (to_load.checks == kHidden) return;
    const BackwardView& view = shared.views[to_load.view];
    const int first = to_load.tile * kRows;
    const int end = static_cast<int>(view.head.extent.query_length);
    load_tiles<Layout, kRows, kThreads>(
        base + kQueryAt + to_stage * kRowBytes,
        {view.query, problem.query.row, static_cast<int>(problem.head_dim), params.vectors.query},
        base + kCotangentAt + to_stage * kRowBytes,
        {view.cotangent, params.output_cotangent.row, static_cast<int>(problem.value_dim),
         params.vectors.output},
        first, end);
    if (threadIdx.x < kRows) {
      const int row = first + static_cast<int>(threadIdx.x);
      const uint32_t to = base + kStatisticsAt + (3 * to_stage * kRows + threadIdx.x) * 4;
      const bool exists = row < end;
      ptx::cp_async_4(to, view.logit_max + row * params.statistics.logit_max.row, exists);
      ptx::cp_async_4(to + 4 * kRows, view.log_sum + row * params.statistics.log_sum.row, exists);
      ptx::cp_async_4(to + 8 * kRows, view.delta + row * params.delta.row, exists);
    }
    if constexpr (Policy::kEverything) {
      load_arrays<kRows, kKeys, kThreads>(problem, view.head, arrays_of(to_stage), to_load.checks,
                                          to_load.tile * kRows, first_key());
      prefetch_rules<kRows, kKeys, kThreads>(problem, view.head, params.staging, to_load.checks,
                                             first, first_key());
    }
    const Vectors& vectors = params.vectors;
    if (vectors.query && vectors.output && vectors.key && vectors.value) {
      ptx::cp_async_mbarrier_arrive(rows_arrived(to_stage));
    } else {  // ordinary stores among them, which only an ordinary arrival releases
      ptx::cp_async_wait_all();
      ptx::mbarrier_arrive(rows_arrived(to_stage));
    }
  }

  // Finds the first item and starts to load it, with the keys.
  __device__ __forceinline__ void start() {
    clear(key_sum);
    clear(value_sum);
    const int64_t first_tile = blockIdx.y * params.split_tiles;
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(rows_arrived(i), kThreads);
      shared.work = work_of(params.schedule, blockIdx.x);
      shared.end_head = static_cast<int>(
          min_of(params.heads, 1 + (first_tile + params.split_tiles - 1) / params.row_tiles));
      shared.key_sum_scale = 0.f;  // for finish, where there is no item
    }
    __syncthreads();  // all wait for what thread 0 wrote
    item.head = static_cast<int>(first_tile / params.row_tiles) - 1;
    item = next_item();
    if (item.head >= shared.end_head) return;
    if (threadIdx.x == 0) {
      shared.loaded_keys = keys_in(current());
      shared.key_sum_scale = current().head.scale;
    }
    load_keys(current().head);
    load_rows(item, stage());
    if (!computes()) ptx::cp_async_wait_all();  // with no rows to arrive with
    __syncthreads();                            // all wait for what thread 0 wrote
  }

  // What a row that sees nothing brings must not count, even if it is NaN. All threads call it.
  __device__ __forceinline__ void clear_dead_rows() const {
    const float* const logit_max = row_statistics + 3 * stage() * kRows;
    const bool dead = threadIdx.x < kRows && logit_max[threadIdx.x] == minus_infinity();
    if (!__syncthreads_or(dead)) return;
#pragma unroll 1  // rare: not worth the registers of more
    for (int i = threadIdx.x; i < kRows * Layout::kChunks; i += kThreads) {
      const int row = i / Layout::kChunks;
      if (logit_max[row] == minus_infinity()) {
        ptx::store_shared_4(query_tile() + Layout::offset(row, i % Layout::kChunks), {});
        ptx::store_shared_4(cotangent_tile() + Layout::offset(row, i % Layout::kChunks), {});
      }
    }
    __syncthreads();  // all wait for all zeros
  }

  // Where batches share these keys: takes over the keys that exist and the scale of the item's.
  __device__ __forceinline__ void change_batch() {
    const int keys = keys_in(current());
    const bool reloads = keys != shared.loaded_keys;
    const float old_scale = shared.key_sum_scale;
    const float scale = current().head.scale == 0.f ? old_scale : current().head.scale;
    __syncthreads();  // all have done with the keys, and read what thread 0 overwrites
    if (threadIdx.x == 0) {
      shared.loaded_keys = keys;
      shared.key_sum_scale = scale;
    }
    if (reloads) {
      load_keys(current().head);
      ptx::cp_async_wait_all();
    }
    __syncthreads();  // all wait for all copies
    if (scale == old_scale) return;
    const float change = old_scale / scale;
    for_each_element<kKeyStrips, kKeyBlocks>(
        [&](int strip, int block, int i) { key_sum[strip][block][i] *= change; });
  }

  // Waits until the item's rows are there, and makes them and the keys fit to be read. All threads
  // call it.
  __device__ __forceinline__ void wait_for_rows() {
    if (params.repeats > 1) change_batch();
    ptx::mbarrier_wait(rows_arrived(stage()), computed / kStages % 2);
    if (params.dead_rows) clear_dead_rows();
  }

  // d += rows of one tile times rows of another, at this warp's logits of rows `row` on.
  __device__ __forceinline__ void multiply_rows(uint32_t row_tile, int row, uint32_t column_tile,
                                                Logits& d) const {
    const RowsA<Layout> a(row_tile, row);
    const RowsB<Layout> b(column_tile, logits_place.column);
    multiply<T, D / kStep<T>>([&](int strip, int step) { return a.load(16 * strip, step); },
                              [&](int pair, int step) { return b.load(16 * pair, step); },
                              params.precise, d);
  }

  // What a thread's rows bring to their logits, by strip and half.
  //
  // Logits are taken relative to their maximum before they are rounded to exponents: both may be
  // huge. Where no rules come between, products start from it, in their own unit.
  struct RowTerms {
    float reference[kStrips][2];
    float log_sum[kStrips][2];  // as an exponent of 2
    float delta[kStrips][2];
  };
  // Of the rows from `row` of the tile on.
  __device__ __forceinline__ RowTerms row_terms(int row) const {
    const BackwardView& view = current();
    RowTerms terms;
#pragma unroll
    for (int i = 0; i < 2 * kStrips; ++i) {
      const int in_strips = 16 * (i / 2) + 8 * (i % 2) + lane_id() / 4;
      const float* const of_row = row_statistics + 3 * stage() * kRows + row + in_strips;
      const float logit_max = of_row[0];
      const bool exists = item.tile * kRows + row + in_strips < view.head.extent.query_length;
      const bool sees = exists && logit_max != minus_infinity();
      float& start = terms.reference[i / 2][i % 2];
      start = sees ? logit_max * (Policy::kEverything ? -1.f : view.start_factor) : 0.f;
      const float rounding = Policy::kEverything ? 0.f : fmaf(start, view.head.scale, logit_max);
      terms.log_sum[i / 2][i % 2] = sees ? (of_row[kRows] + rounding) * kLog2E : -minus_infinity();
      terms.delta[i / 2][i % 2] = sees ? of_row[2 * kRows] : 0.f;
    }
    return terms;
  }

  // Where this warp's logits of rows `row` of the tile on lie.
  __device__ __forceinline__ TilePlace place_of(int row) const {
    return {item.tile * kRows, first_key(), row, logits_place.column, lane_id()};
  }

  // Probabilities s, after dropout, and gradients g of the logits, for rows `row` of the tile on.
  __device__ __forceinline__ void logit_gradients(int row, Logits& s, Logits& g) const {
    const HeadView& head = current().head;
    const int first_row = item.tile * kRows + row;
    const int key = first_key() + logits_place.column;
    // Read from shared memory ahead of the products.
    const RowTerms terms = row_terms(row);
    float unit = head.scale;  // of s, in nats
    for_each_element<kStrips, kBlocks>([&](int strip, int block, int i) {
      s[strip][block][i] = Policy::kEverything ? 0.f : terms.reference[strip][i / 2];
    });
    multiply_rows(query_tile(), row, base, s);
    // Dropout acts on the products alone.
    for_each_element<kStrips, kBlocks>([&](int strip, int block, int i) {
      g[strip][block][i] = drops() ? 0.f : -terms.delta[strip][i / 2];
    });
    multiply_rows(cotangent_tile(), row, base + kValueAt, g);

    KeptBits<kStrips, kBlocks> kept;
    const float keep_scale =
        drops() ? static_cast<float>(dropout_keep_scale(problem.dropout_threshold)) : 1.f;
    const auto drop = [&](int strip, int block, int i, float x) {
      return kept.kept(strip, block, i) ? x * keep_scale : 0.f;
    };
    if (drops()) {
      kept.draw(problem, head, first_row, key);
      for_each_element<kStrips, kBlocks>([&](int strip, int block, int i) {
        float& x = g[strip][block][i];
        x = drop(strip, block, i, x) - terms.delta[strip][i / 2];
      });
    }
    if constexpr (Policy::kEverything) {
      apply_rules<T, Policy, RowTiles<kKeys>>(
          problem, head, item.checks, arrays_of(stage()), place_of(row),
          [&](int strip, int block, int i, float slope) {
            if (!wants_bias()) g[strip][block][i] *= slope;
          },
          s);
      unit = logit_unit<T, Policy>(problem, head).nats;
    }
    for_each_element<kStrips, kBlocks>([&](int strip, int block, int i) {
      float& x = s[strip][block][i];
      const float exponent = Policy::kEverything
                                 ? fmaf(x, unit, terms.reference[strip][i / 2]) * kLog2E
                                 : x * (unit * kLog2E);
      x = ptx::ex2(exponent - terms.log_sum[strip][i / 2]);
      g[strip][block][i] *= x;
    });
    if (item.checks & kCheckRanges) {
      for_each_outside<kStrips, kBlocks>(head.extent, first_row, key,
                                         [&](int strip, int block, int i) {
                                           s[strip][block][i] = 0.f;
                                           g[strip][block][i] = 0.f;
                                         });
    }
    if (drops()) {
      for_each_element<kStrips, kBlocks>([&](int strip, int block, int i) {
        float& x = s[strip][block][i];
        x = drop(strip, block, i, x);
      });
    }
  }

  // The bias's share of the gradients g; then they are those of the capped logits. Overwrites s.
  __device__ __forceinline__ void take_bias_cotangent(int row, Logits& s, Logits& g) const {
    const HeadView& head = current().head;
    const TilePlace place = place_of(row);
    if (params.bias_sums) {
      add_bias_cotangent(problem, params.bias_cotangent, head, place, g);
    } else if (!params.bias_by_tiles) {
      store_bias_cotangent(problem, params.bias_cotangent, head, place, g);
    }
    if (problem.soft_cap == 0) return;
    // The slope, which is none of the bias's business, from the products once more.
    clear(s);
    multiply_rows(query_tile(), row, base, s);
    for_each_element<kStrips, kBlocks>([&](int strip, int block, int i) {
      g[strip][block][i] *= soft_cap_slope(problem, head, s[strip][block][i]);
    });
  }
  // The same where it is stored by tiles, once all of the item's gradients are there.
  __device__ __forceinline__ void store_bias_tile() const {
    const HeadView& head = current().head;
    const Rows all = rows_of(params.bias_cotangent, head.index, head.head, 0, kSize<T>, true);
    const Rows rows = {static_cast<const char*>(all.data) + first_key() * kSize<T>, all.stride,
                       static_cast<int>(problem.key_length) - first_key(), true};
    store_tile<PairLayout, kRows, kThreads>(gradient_tile(), rows, int64_t{item.tile} * kRows,
                                            head.extent.query_length, threadIdx.x);
  }

  __device__ __forceinline__ void write_pairs(uint32_t tile, int row, const Logits& d) const {
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      write_strip<PairLayout>(tile, row + 16 * strip, logits_place.column / 8, d[strip]);
    }
  }

  // sum += a rows of `tile`, over kSteps k-steps from row `row` on.
  template <int kSteps, class AOf>
  __device__ __forceinline__ void add_rows(const AOf& a_of, uint32_t tile, int row,
                                           KeySums& sum) const {
    const ColumnsB<Layout, kKeyBlocks / 2> b(tile, key_place.column);
    const int first_step = row / kStep<T>;
    multiply<T, kSteps>(
        a_of, [&](int pair, int step) { return b.load(first_step + step, pair); }, params.precise,
        sum);
  }
  // With the tile `pairs` of probabilities or gradients, over all rows.
  __device__ __forceinline__ void add_rows_by_pairs(uint32_t pairs, uint32_t tile,
                                                    KeySums& sum) const {
    const ColumnsA<PairLayout, kKeyStrips> a(pairs, key_place.row);
    add_rows<kRows / kStep<T>>([&](int strip, int step) { return a.load(step, strip); }, tile, 0,
                               sum);
  }

  // The item's probabilities and gradients, into shared memory for the products that follow, or
  // where the warp owns its keys at once into their sums.
  __device__ __forceinline__ void compute_pairs() {
#pragma unroll 1
    for (int row = logits_place.row; row < kRows; row += kChunkRows) {
      Logits s, g;
      logit_gradients(row, s, g);
      if constexpr (kOwnsKeys) {
        // [row][key] accumulators to [key][row] operands, a k-step for each strip.
        OperandA<T> a[kKeyStrips][kStrips];
        transpose(s, a);
        const auto a_of = [&](int strip, int step) { return a[strip][step]; };
        add_rows<kStrips>(a_of, cotangent_tile(), row, value_sum);
        if (wants_bias()) take_bias_cotangent(row, s, g);
        write_pairs(gradient_tile(), row, g);
        transpose(g, a);
        if (adds_to_keys()) add_rows<kStrips>(a_of, query_tile(), row, key_sum);
      } else {
        write_pairs(probability_tile(), row, s);
        if (wants_bias()) take_bias_cotangent(row, s, g);
        write_pairs(gradient_tile(), row, g);
      }
    }
  }

  // What the keys get of the item's rows, where compute_pairs has left it to do.
  __device__ __forceinline__ void add_to_keys() {
    if constexpr (!kOwnsKeys) {
      add_rows_by_pairs(probability_tile(), cotangent_tile(), value_sum);
      if (adds_to_keys()) add_rows_by_pairs(gradient_tile(), query_tile(), key_sum);
    }
  }

  // Waits until the key tiles before this one have added to the item's rows: they do in descending
  // order. All threads call it.
  __device__ __forceinline__ void wait_for_turn() const {
    const int64_t first_row = int64_t{item.tile} * kRows;
    const Range rows = {first_row, min_of(first_row + kRows, problem.query_length)};
    const Range seen = keys_of_any_row(current().head.extent, rows);
    const auto turn = static_cast<uint32_t>((seen.end - 1) / kKeys - shared.work.tile);
    if (threadIdx.x == 0) {
      while (ptx::load_acquire(current().turns + item.tile) != turn) {
      }
    }
    __syncthreads();  // all wait until thread 0 has seen this block's turn come
  }
  __device__ __forceinline__ void end_turn() const {
    __threadfence();
    __syncthreads();  // thread 0 waits until all have added, and each made it visible
    if (threadIdx.x == 0) ptx::add_release(current().turns + item.tile, 1);
  }

  // What the item's rows get of the keys, in global memory.
  __device__ __forceinline__ void add_to_query() const {
    const RowsAPermuted<PairLayout> a(gradient_tile(), query_place.row);
    const int first_strip = (item.tile * kRows + query_place.row) / 16;
#pragma unroll 1
    for (int part = 0; part < kQueryParts; ++part) {
      const int column = query_place.column + part * kQueryBlocks * 8;
      const ColumnsB<Layout, kQueryBlocks / 2> b(base, column);
      float q[kQueryStrips][kQueryBlocks][4];
      clear(q);
      multiply<T, kKeys / kStep<T>>([&](int strip, int step) { return a.load(16 * strip, step); },
                                    [&](int pair, int step) { return b.load(step, pair); },
                                    params.precise, q);
      float* const to =
          current().query_sums + int64_t{first_strip} * (16 * D) + column * 16 + lane_id() * 4;
#pragma unroll
      for (int strip = 0; strip < kQueryStrips; ++strip) {
        if (first_strip + strip >= params.strips) continue;
#pragma unroll
        for (int block = 0; block < kQueryBlocks; ++block) {
          ptx::add_global_4(to + strip * (16 * D) + block * 128, q[strip][block]);
        }
      }
    }
  }

  // The stage for the next item's rows: hidden tiles have none.
  __device__ __forceinline__ int next_stage() const { return (computed + computes()) % kStages; }
  __device__ __forceinline__ void go_on_to(const Item& next) {
    computed += computes();
    item = next;
  }

  // Stores the block's share of sums.
  __device__ __forceinline__ void store_split(const KeySums& sum, float* to) const {
    if (to == nullptr) return;
    const int64_t unit = int64_t{blockIdx.y} * params.schedule.heads + shared.work.head;
    for_each_element<kKeyStrips, kKeyBlocks>([&](int strip, int block, int i) {
      const int row = first_key() + key_place.row + 16 * strip + 8 * (i / 2) + lane_id() / 4;
      const int column = key_place.column + 8 * block + 2 * (lane_id() % 4) + i % 2;
      if (row < problem.key_length) {
        to[(unit * problem.key_length + row) * D + column] = sum[strip][block][i];
      }
    });
  }

  // Stores the sums. Through shared memory, for 16-byte stores: key and value tiles are not needed
  // any more.
  __device__ __forceinline__ void finish() {
    __syncthreads();  // all have done with the tiles
    const float scale = shared.key_sum_scale;
    for_each_element<kKeyStrips, kKeyBlocks>([&](int strip, int block, int i) {
      float& x = key_sum[strip][block][i];
      if (x != 0.f) x *= scale;  // padding stays 0 whatever the scale
    });
    if (params.splits > 1) {
      store_split(key_sum, params.split_key);
      store_split(value_sum, params.split_value);
      return;
    }
#pragma unroll
    for (int strip = 0; strip < kKeyStrips; ++strip) {
      write_strip<Layout>(base, key_place.row + 16 * strip, key_place.column / 8, key_sum[strip]);
      write_strip<Layout>(base + kValueAt, key_place.row + 16 * strip, key_place.column / 8,
                          value_sum[strip]);
    }
    __syncthreads();  // all wait for all of both
    const BatchIndex index = batch_index(problem, batch_of(0));
    if (params.key_cotangent.data != nullptr) {
      store_tile<Layout, kKeys, kThreads>(
          base,
          rows_of(params.key_cotangent, index, key_head(), problem.head_dim, kSize<T>,
                  params.vector_key_cotangent),
          first_key(), problem.key_length, threadIdx.x);
    }
    if (params.value_cotangent.data != nullptr) {
      store_tile<Layout, kKeys, kThreads>(
          base + kValueAt,
          rows_of(params.value_cotangent, index, key_head(), problem.value_dim, kSize<T>,
                  params.vector_value_cotangent),
          first_key(), problem.key_length, threadIdx.x);
    }
  }
};

template <class T, int D, class Policy>
__global__ void __launch_bounds__(Backward<T, D, Policy>::kThreads,
                                  Backward<T, D, Policy>::kTile.blocks)
    backward_kernel(const __grid_constant__ BackwardParams params) {
  using B = Backward<T, D, Policy>;
  extern __shared__ __align__(128) uint8_t tiles[];
  __shared__ typename B::Shared shared;
  B b = {params, params.problem, shared, reinterpret_cast<const float*>(tiles + B::kStatisticsAt),
         static_cast<uint32_t>(__cvta_generic_to_shared(tiles))};

  b.start();
  while (b.item.head < shared.end_head) {
    // All have done with the last item's probabilities and gradients.
    if (B::kPairStages == 1 && B::kStages > 1) __syncthreads();
    if (b.computes()) {
      b.wait_for_rows();
      b.compute_pairs();
    }
    // All wait for all of the item's probabilities and gradients, and have done with the last item,
    // whose stage may be overwritten.
    __syncthreads();
    const Item next = b.next_item();
    const bool goes_on = next.head < shared.end_head;
    if (b.computes()) {
      if (b.wants_bias() && params.bias_by_tiles) b.store_bias_tile();
      b.add_to_keys();
    }
    // Into a stage that is free since the barrier above, behind products whose operands were there:
    // starting the copies takes time.
    if (B::kStages > 1 && goes_on) b.load_rows(next, b.next_stage());
    if (b.takes_turns()) b.wait_for_turn();
    if (b.computes() && b.wants_query()) b.add_to_query();
    if (b.takes_turns()) b.end_turn();
    if (B::kStages == 1 && goes_on) {
      __syncthreads();  // all have done with the one stage there is, before it is overwritten
      b.load_rows(next, 0);
    }
    b.go_on_to(next);
  }
  b.finish();
}

}  // namespace jaxflash::cuda::sm80
