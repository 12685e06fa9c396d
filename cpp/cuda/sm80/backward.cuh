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
#include <type_traits>

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/sm80/element.cuh"
#include "cuda/sm80/forward.cuh"
#include "cuda/sm80/params.h"
#include "cuda/sm80/rules.cuh"
#include "cuda/sm80/schedule.cuh"
#include "cuda/sm80/tile.cuh"
#include "cuda/sm80/tiles.h"

namespace jaxflash::cuda::sm80 {

template <int kStrips, int kBlocks>
__device__ __forceinline__ void clear(float (&d)[kStrips][kBlocks][4]) {
#pragma unroll
  for (int i = 0; i < kStrips * kBlocks * 4; ++i)
    d[i / (4 * kBlocks)][i / 4 % kBlocks][i % 4] = 0.f;
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
};

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

template <class T, int D, class Policy>
__device__ __forceinline__ void look_at(const BackwardParams& params, int64_t batch, int64_t head,
                                        int64_t first_key, BackwardView& view) {
  using K = Backward<T, D, Policy>;
  const Problem& problem = params.problem;
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
  const Range keys = {first_key, first_key + K::kKeys};
  const Range any = rows_of_any_key(extent, keys);
  const Range every = rows_of_every_key(extent, keys);
  view.begin = static_cast<int>(any.begin / K::kRows);
  view.end = any.end > any.begin ? static_cast<int>((any.end + K::kRows - 1) / K::kRows) : 0;
  view.whole_begin = static_cast<int>((every.begin + K::kRows - 1) / K::kRows);
  // Rows past the query length need no checks: their probabilities are 0.
  const bool to_the_end = every.end == extent.query_length;
  view.whole_end = static_cast<int>((every.end + (to_the_end ? K::kRows - 1 : 0)) / K::kRows);
}

// Waits until `turn` blocks have added to a tile of rows. All threads call it.
__device__ __forceinline__ void wait_for_turn(const uint32_t* turns, uint32_t turn) {
  if (threadIdx.x == 0) {
    while (ptx::load_acquire(turns) != turn) {
    }
  }
  __syncthreads();  // all wait until thread 0 has seen this block's turn come
}
__device__ __forceinline__ void end_turn(uint32_t* turns) {
  __threadfence();
  __syncthreads();  // thread 0 waits until all have added, and each made it visible
  if (threadIdx.x == 0) ptx::add_release(turns, 1);
}

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

// What a block visits, one after the other: the tiles of rows of each head of each batch.
struct Item {
  int head;  // of all repeats and the group of query heads; the number of them at the end
  int tile;
  int checks;  // kHidden: nothing to compute, at most a turn to take
  int view;    // which of the two
};

template <class T, int D, class Policy>
__global__ void __launch_bounds__(Backward<T, D, Policy>::kThreads,
                                  Backward<T, D, Policy>::kTile.blocks)
    backward_kernel(const __grid_constant__ BackwardParams params) {
  using K = Backward<T, D, Policy>;
  using Layout = typename K::Layout;
  using PairLayout = typename K::PairLayout;
  constexpr int kRows = K::kRows, kKeys = K::kKeys, kThreads = K::kThreads;
  constexpr int kStages = K::kStages, kPairStages = K::kPairStages;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ BackwardView views[2];
  // Every thread arrives when its copies of a stage's rows are there; all wait before they read it.
  __shared__ uint64_t rows_arrived[kStages];
  // Where the batches that share these keys differ: in length, what is past it must not be read; in
  // scale, key_sum is kept in units of the scale of the last.
  __shared__ int loaded_keys;
  __shared__ float key_sum_scale;
  const Problem& problem = params.problem;
  const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const auto* const row_statistics = reinterpret_cast<const float*>(shared + K::kStatisticsAt);
  const int lane = lane_id();

  const Work work = work_of(params.schedule, blockIdx.x);
  const auto key_head_of = [&] { return work.head % static_cast<uint32_t>(problem.key_heads); };
  const int first_key = static_cast<int>(work.tile) * kKeys;
  const bool mapped = params.maps.query_segments != nullptr || params.maps.mask.data != nullptr;

  // The batch of a repeat: the index of the block's batch unit in the dims that are kept, the
  // repeat's in the others.
  const auto batch_of = [&](int64_t repeat) {
    int64_t batch = 0, step = 1;
    int64_t kept = work.head / static_cast<uint32_t>(problem.key_heads);
    for (int dim = problem.batch_rank - 1; dim >= 0; --dim) {
      const int64_t size = problem.batch_size[dim];
      const bool summed = params.summed[dim];
      const int64_t index = summed ? repeat : kept;
      batch += index % size * step;
      repeat = summed ? index / size : repeat;
      kept = summed ? kept : index / size;
      step *= size;
    }
    return batch;
  };
  // The first visible tile of a view from `tile` on, or its end.
  TileScan scan;
  const auto visible_from = [&](const BackwardView& view, int tile) -> Visit {
    if (Policy::kEverything && mapped) {
      const auto checks_of = [&](int t) {
        return tile_checks<Policy, kRows, kKeys>(problem, params.maps, view.head, t, work.tile);
      };
      // Where turns are taken, hidden tiles have theirs.
      if (params.turns != nullptr) return {tile, tile < view.end ? checks_of(tile) : kHidden};
      return scan.next(tile, view.end, checks_of);
    }
    return {tile, tile >= view.whole_begin && tile < view.whole_end ? 0 : kCheckRanges};
  };
  // The item after `item`. All threads call it.
  const auto item_after = [&](Item item) {
    Visit visit = {0, kHidden};
    int end = 0;
    if (item.head >= 0) {
      visit = visible_from(views[item.view], item.tile + 1);
      end = views[item.view].end;
    }
    const int current_view = item.view;
    while (visit.tile >= end) {
      if (++item.head >= params.heads) break;
      item.view = 1 - current_view;
      BackwardView& view = views[item.view];
      __syncthreads();  // all have done with the view, before thread 0 overwrites it
      if (threadIdx.x == 0) {
        const int group = params.group;
        look_at<T, D, Policy>(params, batch_of(item.head / group),
                              int64_t{key_head_of()} * group + item.head % group, first_key, view);
      }
      __syncthreads();  // all wait for thread 0's view
      scan.count = 0;   // what it knows is of another head
      visit = visible_from(view, view.begin);
      end = view.end;
    }
    return Item{item.head, visit.tile, visit.checks, item.view};
  };

  // Keys of this tile that exist for a view.
  const auto keys_in = [&](const BackwardView& view) {
    return static_cast<int>(clamp_to(view.head.extent.key_length - first_key, 0, kKeys));
  };
  const auto load_keys = [&](const BackwardView& view) {
    const HeadView& head = view.head;
    const int64_t key_head = key_head_of();
    load_tile<Layout, kKeys, kThreads>(
        base,
        rows_of(problem.key, head.index, key_head, problem.head_dim, kSize<T>, params.vectors.key),
        first_key, head.extent.key_length);
    load_tile<Layout, kKeys, kThreads>(base + K::kValueAt,
                                       rows_of(problem.value, head.index, key_head,
                                               problem.value_dim, kSize<T>, params.vectors.value),
                                       first_key, head.extent.key_length);
  };
  const uint32_t first_barrier = static_cast<uint32_t>(__cvta_generic_to_shared(rows_arrived));
  const bool only_async_copies =
      params.vectors.query && params.vectors.output && params.vectors.key && params.vectors.value;
  const auto arrays_of = [&](int stage) {
    return array_tiles(params.staging, base + K::kArraysAt, stage);
  };
  const auto load_rows = [&](const Item& item, int stage) {
    if (item.checks == kHidden) return;
    const BackwardView& view = views[item.view];
    const int64_t first = int64_t{item.tile} * kRows;
    const int64_t end = view.head.extent.query_length;
    load_tile<Layout, kRows, kThreads>(
        base + K::kQueryAt + stage * K::kRowBytes,
        {view.query, problem.query.row, static_cast<int>(problem.head_dim), params.vectors.query},
        first, end);
    load_tile<Layout, kRows, kThreads>(base + K::kCotangentAt + stage * K::kRowBytes,
                                       {view.cotangent, params.output_cotangent.row,
                                        static_cast<int>(problem.value_dim), params.vectors.output},
                                       first, end);
    if (threadIdx.x < kRows) {
      const int64_t row = first + threadIdx.x;
      const uint32_t to = base + K::kStatisticsAt + (3 * stage * kRows + threadIdx.x) * 4;
      const bool exists = row < end;
      ptx::cp_async_4(to, view.logit_max + row * params.statistics.logit_max.row, exists);
      ptx::cp_async_4(to + 4 * kRows, view.log_sum + row * params.statistics.log_sum.row, exists);
      ptx::cp_async_4(to + 8 * kRows, view.delta + row * params.delta.row, exists);
    }
    if constexpr (Policy::kEverything) {
      load_arrays<kRows, kKeys, kThreads>(problem, view.head, arrays_of(stage), item.checks,
                                          item.tile * kRows, first_key);
      prefetch_rules<kRows, kKeys, kThreads>(problem, view.head, params.staging, item.checks, first,
                                             first_key);
    }
    if (only_async_copies) {
      ptx::cp_async_mbarrier_arrive(first_barrier + 8 * stage);
    } else {  // ordinary stores among them, which only an ordinary arrival releases
      ptx::cp_async_wait_all();
      ptx::mbarrier_arrive(first_barrier + 8 * stage);
    }
  };

  const bool wants_query = params.query_sums != nullptr;
  const bool wants_bias = Policy::kEverything && params.bias_cotangent.data != nullptr;
  float key_sum[K::kKeyStrips][K::kKeyBlocks][4];
  float value_sum[K::kKeyStrips][K::kKeyBlocks][4];
  clear(key_sum);
  clear(value_sum);

  const WarpPlace logits = warp_place(K::kTile.logits, kRows, kKeys);
  const WarpPlace keys_place = warp_place(K::kTile.key_sums, kKeys, D);
  const WarpPlace query_place = warp_place(K::kTile.query_sums, kRows, D);

  // What a row that sees nothing brings must not count, even if it is NaN. All threads call it.
  const auto clear_dead_rows = [&](const float* logit_max, uint32_t query, uint32_t cotangent) {
    const bool dead = threadIdx.x < kRows && logit_max[threadIdx.x] == minus_infinity();
    if (!__syncthreads_or(dead)) return;
    for (int i = threadIdx.x; i < kRows * Layout::kChunks; i += kThreads) {
      const int row = i / Layout::kChunks;
      if (logit_max[row] == minus_infinity()) {
        ptx::store_shared_4(query + Layout::offset(row, i % Layout::kChunks), {});
        ptx::store_shared_4(cotangent + Layout::offset(row, i % Layout::kChunks), {});
      }
    }
    __syncthreads();  // all wait for all zeros
  };
  // Where batches share these keys: takes over the keys that exist and the scale of an item's.
  const auto change_batch = [&](const BackwardView& view) {
    const bool reloads = keys_in(view) != loaded_keys;
    const float old_scale = key_sum_scale;
    const float scale = view.head.scale == 0.f ? old_scale : view.head.scale;
    __syncthreads();  // all have done with the keys, and read what thread 0 overwrites
    if (threadIdx.x == 0) {
      loaded_keys = keys_in(view);
      key_sum_scale = scale;
    }
    if (reloads) {
      load_keys(view);
      ptx::cp_async_wait_all();
    }
    __syncthreads();  // all wait for all copies
    if (scale == old_scale) return;
    const float change = old_scale / scale;
#pragma unroll
    for (int i = 0; i < K::kKeyStrips * K::kKeyBlocks * 4; ++i) {
      key_sum[i / (4 * K::kKeyBlocks)][i / 4 % K::kKeyBlocks][i % 4] *= change;
    }
  };

  // Where the current item lies.
  Item item = {-1, 0, kHidden, 0};
  int stage = 0, parity = 0, pair_stage = 0;
  const auto query_tile = [&] { return base + K::kQueryAt + stage * K::kRowBytes; };
  const auto cotangent_tile = [&] { return base + K::kCotangentAt + stage * K::kRowBytes; };
  const auto gradient_tile = [&] { return base + K::kGradientAt + pair_stage * K::kPairBytes; };
  const auto probability_tile = [&] {
    return base + K::kProbabilityAt + pair_stage * K::kPairBytes;
  };
  const bool drops = Policy::kEverything && problem.dropout_threshold != 0;

  using Logits = float[K::kStrips][K::kBlocks][4];
  // d += rows of one tile times rows of another, at this warp's logits of rows `row` on.
  const auto multiply_rows = [&](uint32_t row_tile, int row, uint32_t column_tile, Logits& d) {
    const RowsA<Layout> a(row_tile, row);
    const RowsB<Layout> b(column_tile, logits.column);
    multiply<T, D / kStep<T>>([&](int strip, int step) { return a.load(16 * strip, step); },
                              [&](int pair, int step) { return b.load(16 * pair, step); },
                              params.precise, d);
  };
  // Probabilities s, after dropout, and gradients g of the logits, for rows `row` of the tile on.
  const auto logit_gradients = [&](const BackwardView& view, int row, Logits& s, Logits& g) {
    const int first_row = item.tile * kRows + row;
    const int key = first_key + logits.column;
    // Logits are taken relative to their maximum before they are rounded to exponents: both may be
    // huge. Where no rules come between, products start from it, in their own unit.
    const float scale = view.head.scale;
    float reference[K::kStrips][2], log_sum[K::kStrips][2], delta[K::kStrips][2];
#pragma unroll
    for (int i = 0; i < 2 * K::kStrips; ++i) {
      const int in_strips = 16 * (i / 2) + 8 * (i % 2) + lane / 4;
      const float* const of_row = row_statistics + 3 * stage * kRows + row + in_strips;
      const float logit_max = of_row[0];
      const bool sees =
          first_row + in_strips < view.head.extent.query_length && logit_max != minus_infinity();
      float& start = reference[i / 2][i % 2];
      start = sees ? logit_max * (Policy::kEverything ? -1.f : view.start_factor) : 0.f;
      const float rounding = Policy::kEverything ? 0.f : fmaf(start, scale, logit_max);
      log_sum[i / 2][i % 2] = sees ? (of_row[kRows] + rounding) * kLog2E : -minus_infinity();
      delta[i / 2][i % 2] = sees ? of_row[2 * kRows] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < K::kStrips * K::kBlocks * 4; ++i) {
      const int strip = i / (4 * K::kBlocks);
      s[strip][i / 4 % K::kBlocks][i % 4] = Policy::kEverything ? 0.f : reference[strip][i / 2 % 2];
    }
    multiply_rows(query_tile(), row, base, s);
    // Dropout acts on the products alone.
#pragma unroll
    for (int i = 0; i < K::kStrips * K::kBlocks * 4; ++i) {
      const int strip = i / (4 * K::kBlocks);
      g[strip][i / 4 % K::kBlocks][i % 4] = drops ? 0.f : -delta[strip][i / 2 % 2];
    }
    multiply_rows(cotangent_tile(), row, base + K::kValueAt, g);

    KeptBits<K::kStrips, K::kBlocks> kept;
    const float keep_scale =
        drops ? static_cast<float>(dropout_keep_scale(problem.dropout_threshold)) : 1.f;
    if (drops) {
      kept.draw(problem, view.head, first_row, key);
#pragma unroll
      for (int i = 0; i < K::kStrips * K::kBlocks * 4; ++i) {
        const int strip = i / (4 * K::kBlocks), block = i / 4 % K::kBlocks;
        float& x = g[strip][block][i % 4];
        x = (kept.kept(strip, block, i % 4) ? x * keep_scale : 0.f) - delta[strip][i / 2 % 2];
      }
    }
    float unit = scale;  // of s, in nats
    if constexpr (Policy::kEverything) {
      const TilePlace place = {item.tile * kRows, first_key, row, logits.column};
      apply_rules<T, Policy, kKeys>(
          problem, view.head, item.checks, arrays_of(stage), place,
          [&](int strip, int block, int i, float slope) {
            if (!wants_bias) g[strip][block][i] *= slope;
          },
          s);
      unit = logit_unit<T, Policy>(problem, view.head).nats;
    }
#pragma unroll
    for (int i = 0; i < K::kStrips * K::kBlocks * 4; ++i) {
      const int strip = i / (4 * K::kBlocks), block = i / 4 % K::kBlocks, half = i / 2 % 2;
      float& x = s[strip][block][i % 4];
      const float exponent = Policy::kEverything ? fmaf(x, unit, reference[strip][half]) * kLog2E
                                                 : x * (unit * kLog2E);
      x = ptx::ex2(exponent - log_sum[strip][half]);
      g[strip][block][i % 4] *= x;
    }
    if (item.checks & kCheckRanges) {
      for_each_outside<K::kStrips, K::kBlocks>(view.head.extent, first_row, key,
                                               [&](int strip, int block, int i) {
                                                 s[strip][block][i] = 0.f;
                                                 g[strip][block][i] = 0.f;
                                               });
    }
    if (drops) {
#pragma unroll
      for (int i = 0; i < K::kStrips * K::kBlocks * 4; ++i) {
        const int strip = i / (4 * K::kBlocks), block = i / 4 % K::kBlocks;
        float& x = s[strip][block][i % 4];
        x = kept.kept(strip, block, i % 4) ? x * keep_scale : 0.f;
      }
    }
  };
  // The rows of the bias's cotangent, where it is stored by tiles, from the block's first key on.
  const auto bias_rows = [&](const HeadView& head) {
    const Tensor& bias = params.bias_cotangent;
    const Rows rows = rows_of(bias, head.index, head.head, 0, kSize<T>, true);
    return Rows{static_cast<const char*>(rows.data) + first_key * kSize<T>, rows.stride,
                static_cast<int>(problem.key_length) - first_key, true};
  };
  // The bias's share of the gradients g; then they are those of the capped logits. Overwrites s.
  const auto take_bias_cotangent = [&](const BackwardView& view, int row, Logits& s, Logits& g) {
    const int first_row = item.tile * kRows + row;
    const int key = first_key + logits.column;
    if (params.bias_sums) {
      add_bias_cotangent(problem, params.bias_cotangent, view.head, first_row, key, g);
    } else if (!params.bias_by_tiles) {
      store_bias_cotangent(problem, params.bias_cotangent, view.head, first_row, key, g);
    }
    if (problem.soft_cap == 0) return;
    // The slope, which is none of the bias's business, from the products once more.
    clear(s);
    multiply_rows(query_tile(), row, base, s);
#pragma unroll
    for (int i = 0; i < K::kStrips * K::kBlocks * 4; ++i) {
      const int strip = i / (4 * K::kBlocks), block = i / 4 % K::kBlocks;
      g[strip][block][i % 4] *= soft_cap_slope(problem, view.head, s[strip][block][i % 4]);
    }
  };
  const auto write_pairs = [&](uint32_t tile, int row, const Logits& d) {
#pragma unroll
    for (int strip = 0; strip < K::kStrips; ++strip) {
      write_strip<PairLayout>(tile, row + 16 * strip, logits.column / 8, d[strip]);
    }
  };
  // sum += a rows of `tile`, over kSteps k-steps from row `row` on.
  const auto add_rows = [&](auto steps, const auto& a_of, uint32_t tile, int row,
                            float (&sum)[K::kKeyStrips][K::kKeyBlocks][4]) {
    const ColumnsB<Layout, K::kKeyBlocks / 2> b(tile, keys_place.column);
    const int first_step = row / kStep<T>;
    multiply<T, decltype(steps)::value>(
        a_of, [&](int pair, int step) { return b.load(first_step + step, pair); }, params.precise,
        sum);
  };

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(first_barrier + 8 * i, kThreads);
  }
  item = item_after(item);
  if (item.head < params.heads) {
    if (threadIdx.x == 0) {
      loaded_keys = keys_in(views[item.view]);
      key_sum_scale = views[item.view].head.scale;
    }
    load_keys(views[item.view]);
    load_rows(item, stage);
    if (item.checks == kHidden) ptx::cp_async_wait_all();  // with no rows to arrive with
    __syncthreads();                                       // all wait for what thread 0 wrote
  }
  const bool visits = item.head < params.heads;
  while (item.head < params.heads) {
    const BackwardView& view = views[item.view];
    const bool computes = item.checks != kHidden;
    // All have done with the last item's probabilities and gradients.
    if (kPairStages == 1 && kStages > 1) __syncthreads();
    if (computes) {
      if (params.repeats > 1) change_batch(view);
      ptx::mbarrier_wait(first_barrier + 8 * stage, parity);
      if (params.dead_rows) {
        clear_dead_rows(row_statistics + 3 * stage * kRows, query_tile(), cotangent_tile());
      }
      // Where keys get nothing in units of another scale, see change_batch.
      const bool adds_to_keys = params.repeats == 1 || view.head.scale != 0.f;
#pragma unroll 1
      for (int row = logits.row; row < kRows; row += K::kChunkRows) {
        Logits s, g;
        logit_gradients(view, row, s, g);
        if constexpr (K::kOwnsKeys) {
          // [row][key] accumulators to [key][row] operands.
          OperandA<T> p[K::kKeyStrips][K::kStrips];
          transpose(s, p);
          add_rows(
              std::integral_constant<int, K::kStrips>(),
              [&](int strip, int step) { return p[strip][step]; }, cotangent_tile(), row,
              value_sum);
          if (wants_bias) take_bias_cotangent(view, row, s, g);
          write_pairs(gradient_tile(), row, g);
          transpose(g, p);
          if (adds_to_keys) {
            add_rows(
                std::integral_constant<int, K::kStrips>(),
                [&](int strip, int step) { return p[strip][step]; }, query_tile(), row, key_sum);
          }
        } else {
          write_pairs(probability_tile(), row, s);
          if (wants_bias) take_bias_cotangent(view, row, s, g);
          write_pairs(gradient_tile(), row, g);
        }
      }
    }
    // All wait for all of the probabilities and gradients, and have done with the last item, whose
    // stage may be overwritten.
    __syncthreads();
    const Item next = item_after(item);
    const bool goes_on = next.head < params.heads;
    const int next_stage = computes ? stage ^ (kStages - 1) : stage;
    if (kStages > 1 && goes_on) load_rows(next, next_stage);
    if (computes && wants_bias && params.bias_by_tiles) {
      store_tile<PairLayout, kRows, kThreads>(gradient_tile(), bias_rows(view.head),
                                              int64_t{item.tile} * kRows,
                                              view.head.extent.query_length, threadIdx.x);
    }
    if constexpr (!K::kOwnsKeys) {
      if (computes) {
        using Steps = std::integral_constant<int, kRows / kStep<T>>;
        const ColumnsA<PairLayout, K::kKeyStrips> p(probability_tile(), keys_place.row);
        add_rows(
            Steps(), [&](int strip, int step) { return p.load(step, strip); }, cotangent_tile(), 0,
            value_sum);
        if (params.repeats == 1 || view.head.scale != 0.f) {
          const ColumnsA<PairLayout, K::kKeyStrips> g(gradient_tile(), keys_place.row);
          add_rows(
              Steps(), [&](int strip, int step) { return g.load(step, strip); }, query_tile(), 0,
              key_sum);
        }
      }
    }
    if (params.turns != nullptr) {
      // Key tiles add to a tile of rows in descending order.
      const int64_t first_row = int64_t{item.tile} * kRows;
      const Range rows = {first_row, min_of(first_row + kRows, problem.query_length)};
      const Range seen = keys_of_any_row(view.head.extent, rows);
      wait_for_turn(view.turns + item.tile,
                    static_cast<uint32_t>((seen.end - 1) / kKeys - work.tile));
    }
    if (computes && wants_query) {
      const RowsAPermuted<PairLayout> a(gradient_tile(), query_place.row);
      const int first_strip = (item.tile * kRows + query_place.row) / 16;
#pragma unroll 1
      for (int part = 0; part < K::kQueryParts; ++part) {
        const int column = query_place.column + part * K::kQueryBlocks * 8;
        const ColumnsB<Layout, K::kQueryBlocks / 2> b(base, column);
        float q[K::kQueryStrips][K::kQueryBlocks][4];
        clear(q);
        multiply<T, kKeys / kStep<T>>([&](int strip, int step) { return a.load(16 * strip, step); },
                                      [&](int pair, int step) { return b.load(step, pair); },
                                      params.precise, q);
        float* const to =
            view.query_sums + int64_t{first_strip} * (16 * D) + column * 16 + lane * 4;
#pragma unroll
        for (int strip = 0; strip < K::kQueryStrips; ++strip) {
          if (first_strip + strip >= params.strips) continue;
#pragma unroll
          for (int block = 0; block < K::kQueryBlocks; ++block) {
            ptx::add_global_4(to + strip * (16 * D) + block * 128, q[strip][block]);
          }
        }
      }
    }
    if (params.turns != nullptr) end_turn(view.turns + item.tile);
    if (kStages == 1 && goes_on) {
      __syncthreads();  // all have done with the one stage there is, before it is overwritten
      load_rows(next, 0);
    }
    if (computes) {
      stage = next_stage;
      if (stage == 0) parity ^= 1;
      pair_stage ^= kPairStages - 1;
    }
    item = next;
  }

  // Through shared memory, for 16-byte stores: key and value tiles are not needed any more.
  __syncthreads();  // all have done with them
  const float scale = visits ? key_sum_scale : 0.f;
#pragma unroll
  for (int i = 0; i < K::kKeyStrips * K::kKeyBlocks * 4; ++i) {
    float& x = key_sum[i / (4 * K::kKeyBlocks)][i / 4 % K::kKeyBlocks][i % 4];
    if (x != 0.f) x *= scale;  // padding stays 0 whatever the scale
  }
#pragma unroll
  for (int strip = 0; strip < K::kKeyStrips; ++strip) {
    write_strip<Layout>(base, keys_place.row + 16 * strip, keys_place.column / 8, key_sum[strip]);
    write_strip<Layout>(base + K::kValueAt, keys_place.row + 16 * strip, keys_place.column / 8,
                        value_sum[strip]);
  }
  __syncthreads();  // all wait for all of both
  const BatchIndex index = batch_index(problem, batch_of(0));
  const int64_t key_head = key_head_of();
  if (params.key_cotangent.data != nullptr) {
    store_tile<Layout, kKeys, kThreads>(
        base,
        rows_of(params.key_cotangent, index, key_head, problem.head_dim, kSize<T>,
                params.vector_key_cotangent),
        first_key, problem.key_length, threadIdx.x);
  }
  if (params.value_cotangent.data != nullptr) {
    store_tile<Layout, kKeys, kThreads>(
        base + K::kValueAt,
        rows_of(params.value_cotangent, index, key_head, problem.value_dim, kSize<T>,
                params.vector_value_cotangent),
        first_key, problem.key_length, threadIdx.x);
  }
}

}  // namespace jaxflash::cuda::sm80
