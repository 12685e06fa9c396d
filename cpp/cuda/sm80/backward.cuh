// Backward pass: probabilities are computed again from the statistics of the forward pass
// (arXiv 2205.14135, Algorithm 4; 2307.08691).
//
// A block owns a tile of keys of one key head and takes it past the rows of all query heads (and
// all batches, where keys are shared) that see any of it. Cotangents of key and value stay in
// registers; that of the query is added up in global memory, in f32. Five products a tile of
// logits, each dealt to the warps by a grid of its own; probabilities and their gradients go
// between them in shared memory, [row][key].
#pragma once

#include <cstdint>

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

// d += a b over kSteps k-steps. `a_of(strip, step)` and `b_of(pair of blocks, step)` load operands,
// those of 16-bit types a step ahead of their use.
template <class T, int kSteps, int kStrips, int kBlocks, class AOf, class BOf>
__device__ __forceinline__ void multiply(const AOf& a_of, const BOf& b_of, bool precise,
                                         float (&d)[kStrips][kBlocks][4]) {
  constexpr int kPairs = kBlocks / 2;
  constexpr int kBuffers = kIsFloat<T> ? 1 : 2;
  OperandA<T> a[kBuffers][kStrips];
  OperandB<T> b[kBuffers][kPairs];
  const auto load = [&](int step) {
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) a[step % kBuffers][strip] = a_of(strip, step);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) b[step % kBuffers][pair] = b_of(pair, step);
  };
  if (kBuffers > 1) load(0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (kBuffers == 1) load(step);
    if (kBuffers > 1 && step + 1 < kSteps) load(step + 1);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int strip = 0; strip < kStrips; ++strip) {
          multiply_add(d[strip][2 * pair + i], a[step % kBuffers][strip], b[step % kBuffers][pair],
                       i, precise);
        }
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
  static constexpr int kStages = kTile.stages;
  // Warp tiles of the three kinds of product, in strips of 16 rows and blocks of 8 columns.
  static constexpr int kStrips = kRows / kTile.logits.rows / 16;
  static constexpr int kBlocks = kKeys / kTile.logits.columns / 8;
  static constexpr int kKeyStrips = kKeys / kTile.key_sums.rows / 16;
  static constexpr int kKeyBlocks = D / kTile.key_sums.columns / 8;
  static constexpr int kQueryStrips = kRows / kTile.query_sums.rows / 16;
  static constexpr int kQueryBlocks = D / kTile.query_sums.columns / 8;
  static_assert(kStrips > 0 && kKeyStrips > 0 && kQueryStrips > 0);
  static_assert(kBlocks % 2 == 0 && kKeyBlocks % 2 == 0 && kQueryBlocks % 2 == 0);
  static_assert(kTile.key_sums.rows * kTile.key_sums.columns == kTile.warps());
  static_assert(kTile.query_sums.rows * kTile.query_sums.columns == kTile.warps());
  static_assert(kRows <= kThreads);

  using Layout = TileLayout<T, D>;          // key, value, query, cotangent
  using PairLayout = TileLayout<T, kKeys>;  // probabilities and their gradients
  static constexpr int kKeyBytes = kKeys * Layout::kRowBytes;
  static constexpr int kRowBytes = kRows * Layout::kRowBytes;
  static constexpr int kPairBytes = kRows * PairLayout::kRowBytes;
  // Shared memory, from the base on.
  static constexpr int kValueAt = kKeyBytes;
  static constexpr int kQueryAt = kValueAt + kKeyBytes;
  static constexpr int kCotangentAt = kQueryAt + kStages * kRowBytes;
  static constexpr int kProbabilityAt = kCotangentAt + kStages * kRowBytes;
  static constexpr int kGradientAt = kProbabilityAt + kPairBytes;
  static constexpr int kStatisticsAt = kGradientAt + kPairBytes;  // [stage][3][row], then [3][row]
  static_assert(kStatisticsAt + (3 * kStages + 3) * kRows * 4 == kTile.shared_bytes(D, kSize<T>));
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
  constexpr int kRows = K::kRows, kKeys = K::kKeys, kThreads = K::kThreads, kStages = K::kStages;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ BackwardView views[2];
  // Where the batches that share these keys differ: in length, what is past it must not be read; in
  // scale, key_sum is kept in units of the scale of the last.
  __shared__ int loaded_keys;
  __shared__ float key_sum_scale;
  const Problem& problem = params.problem;
  const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  auto* const raw_statistics = reinterpret_cast<float*>(shared + K::kStatisticsAt);
  float* const row_statistics = raw_statistics + 3 * kStages * kRows;
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
    ptx::cp_async_commit();
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
    ptx::cp_async_commit();
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

  Item item = {-1, 0, kHidden, 0};  // before the first: nothing to compute, only to load the next
  int stage = kStages - 1;
  for (;;) {
    ptx::cp_async_wait<0>();
    const BackwardView& view = views[item.view];
    const int first_row = item.tile * kRows;
    const uint32_t query_tile = base + K::kQueryAt + stage * K::kRowBytes;
    const uint32_t cotangent_tile = base + K::kCotangentAt + stage * K::kRowBytes;
    const bool computes = item.checks != kHidden;
    bool dead = false;
    if (computes && threadIdx.x < kRows) {
      const float* const raw = raw_statistics + 3 * stage * kRows + threadIdx.x;
      const bool exists = first_row + int(threadIdx.x) < view.head.extent.query_length;
      const float logit_max = raw[0], log_sum = raw[kRows];
      const bool sees = exists && logit_max != minus_infinity();
      dead = exists && !sees;
      const float shift = kIsFloat<T> ? logit_max : (logit_max + log_sum) * kLog2E;
      row_statistics[threadIdx.x] = sees ? shift : -minus_infinity();
      row_statistics[kRows + threadIdx.x] = log_sum;
      row_statistics[2 * kRows + threadIdx.x] = sees ? raw[2 * kRows] : 0.f;
    }
    // Every thread arrives when its copies of this item are there and it has done with the last
    // item; all wait, so that all may read this item's tiles and statistics, and overwrite the last
    // one's stage, probabilities and gradients.
    const bool any_dead = __syncthreads_or(dead);
    const Item next = item_after(item);
    const bool goes_on = next.head < params.heads;
    if (item.head < 0 && goes_on) {
      if (threadIdx.x == 0) {
        loaded_keys = keys_in(views[next.view]);
        key_sum_scale = views[next.view].head.scale;
      }
      load_keys(views[next.view]);
    }
    if ((kStages > 1 || item.head < 0) && goes_on) load_rows(next, stage ^ (kStages - 1));
    if (Policy::kEverything && goes_on && next.checks != kHidden) {
      prefetch_rules<kRows, kKeys, kThreads>(problem, views[next.view].head, next.checks,
                                             int64_t{next.tile} * kRows, first_key);
    }

    if (any_dead) {
      // What a row that sees nothing brings must not count, even if it is NaN.
      for (int i = threadIdx.x; i < kRows * Layout::kChunks; i += kThreads) {
        const int row = i / Layout::kChunks;
        if (row_statistics[row] == -minus_infinity()) {
          ptx::store_shared_4(cotangent_tile + Layout::offset(row, i % Layout::kChunks), {});
        }
      }
      __syncthreads();  // all wait for all zeros
    }
    if (params.repeats > 1 && computes) {
      const bool reloads = keys_in(view) != loaded_keys;
      const float old_scale = key_sum_scale;
      const float scale = view.head.scale == 0.f ? old_scale : view.head.scale;
      __syncthreads();  // all have read what thread 0 overwrites
      if (threadIdx.x == 0) {
        loaded_keys = keys_in(view);
        key_sum_scale = scale;
      }
      if (reloads) {
        load_keys(view);
        ptx::cp_async_wait<0>();
        __syncthreads();  // all wait for all copies
      }
      if (scale != old_scale) {
        const float change = old_scale / scale;
#pragma unroll
        for (int i = 0; i < K::kKeyStrips * K::kKeyBlocks * 4; ++i) {
          key_sum[i / (4 * K::kKeyBlocks)][i / 4 % K::kKeyBlocks][i % 4] *= change;
        }
      }
    }

    if (computes) {
      const int row = first_row + logits.row;
      const int key = first_key + logits.column;
      const bool drops = Policy::kEverything && problem.dropout_threshold != 0;
      float s[K::kStrips][K::kBlocks][4];  // products, then probabilities
      float g[K::kStrips][K::kBlocks][4];  // cotangents of probabilities less delta, then of logits
      float shift[K::kStrips][2], log_sum[K::kStrips][2], delta[K::kStrips][2];
#pragma unroll
      for (int i = 0; i < 2 * K::kStrips; ++i) {
        const float* const of_row =
            row_statistics + logits.row + 16 * (i / 2) + 8 * (i % 2) + lane / 4;
        shift[i / 2][i % 2] = of_row[0];
        log_sum[i / 2][i % 2] = of_row[kRows];
        delta[i / 2][i % 2] = of_row[2 * kRows];
      }
      clear(s);
      {
        const RowsA<Layout> a(query_tile, logits.row);
        const RowsB<Layout> b(base, logits.column);
        multiply<T, D / kStep<T>>([&](int strip, int step) { return a.load(16 * strip, step); },
                                  [&](int pair, int step) { return b.load(16 * pair, step); },
                                  params.precise, s);
      }
      // Dropout acts on the products alone.
#pragma unroll
      for (int i = 0; i < K::kStrips * K::kBlocks * 4; ++i) {
        const int strip = i / (4 * K::kBlocks);
        g[strip][i / 4 % K::kBlocks][i % 4] = drops ? 0.f : -delta[strip][i / 2 % 2];
      }
      {
        const RowsA<Layout> a(cotangent_tile, logits.row);
        const RowsB<Layout> b(base + K::kValueAt, logits.column);
        multiply<T, D / kStep<T>>([&](int strip, int step) { return a.load(16 * strip, step); },
                                  [&](int pair, int step) { return b.load(16 * pair, step); },
                                  params.precise, g);
      }

      KeptBits<K::kStrips, K::kBlocks> kept;
      const float keep_scale =
          drops ? static_cast<float>(dropout_keep_scale(problem.dropout_threshold)) : 1.f;
      if (drops) {
        kept.draw(problem, view.head, row, key);
#pragma unroll
        for (int i = 0; i < K::kStrips * K::kBlocks * 4; ++i) {
          const int strip = i / (4 * K::kBlocks), block = i / 4 % K::kBlocks;
          float& x = g[strip][block][i % 4];
          x = (kept.kept(strip, block, i % 4) ? x * keep_scale : 0.f) - delta[strip][i / 2 % 2];
        }
      }

      float factor = kLog2E;
      if constexpr (Policy::kEverything) {
        apply_rules(
            problem, view.head, item.checks, row, key,
            [&](int strip, int block, int i, float slope) {
              if (!wants_bias) g[strip][block][i] *= slope;
            },
            s);
      } else {
        factor *= view.head.scale;
      }
#pragma unroll
      for (int i = 0; i < K::kStrips * K::kBlocks * 4; ++i) {
        const int strip = i / (4 * K::kBlocks), block = i / 4 % K::kBlocks, half = i / 2 % 2;
        float& x = s[strip][block][i % 4];
        x = ptx::ex2(kIsFloat<T> ? ((x - shift[strip][half]) - log_sum[strip][half]) * factor
                                 : fmaf(x, factor, -shift[strip][half]));
        g[strip][block][i % 4] *= x;
      }
      if (item.checks & kCheckRanges) {
        for_each_outside<K::kStrips, K::kBlocks>(view.head.extent, row, key,
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
#pragma unroll
      for (int strip = 0; strip < K::kStrips; ++strip) {
        write_strip<PairLayout>(base + K::kProbabilityAt, logits.row + 16 * strip,
                                logits.column / 8, s[strip]);
      }
      if (wants_bias) {
        if (params.bias_sums) {
          add_bias_cotangent(problem, params.bias_cotangent, view.head, row, key, g);
        } else {
          store_bias_cotangent(problem, params.bias_cotangent, view.head, row, key, g);
        }
        if (problem.soft_cap != 0) {
          // The slope, which is none of the bias's business, from the products once more.
          clear(s);
          const RowsA<Layout> a(query_tile, logits.row);
          const RowsB<Layout> b(base, logits.column);
          multiply<T, D / kStep<T>>([&](int strip, int step) { return a.load(16 * strip, step); },
                                    [&](int pair, int step) { return b.load(16 * pair, step); },
                                    params.precise, s);
#pragma unroll
          for (int i = 0; i < K::kStrips * K::kBlocks * 4; ++i) {
            const int strip = i / (4 * K::kBlocks), block = i / 4 % K::kBlocks;
            g[strip][block][i % 4] *= soft_cap_slope(problem, view.head, s[strip][block][i % 4]);
          }
        }
      }
#pragma unroll
      for (int strip = 0; strip < K::kStrips; ++strip) {
        write_strip<PairLayout>(base + K::kGradientAt, logits.row + 16 * strip, logits.column / 8,
                                g[strip]);
      }
    }
    __syncthreads();  // all wait for all of the probabilities and gradients
    const auto add_to_values = [&] {
      const ColumnsA<PairLayout, K::kKeyStrips> a(base + K::kProbabilityAt, keys_place.row);
      const ColumnsB<Layout, K::kKeyBlocks / 2> b(cotangent_tile, keys_place.column);
      multiply<T, kRows / kStep<T>>([&](int strip, int step) { return a.load(strip, step); },
                                    [&](int pair, int step) { return b.load(step, pair); },
                                    params.precise, value_sum);
    };
    const auto add_to_keys = [&] {
      const ColumnsA<PairLayout, K::kKeyStrips> a(base + K::kGradientAt, keys_place.row);
      const ColumnsB<Layout, K::kKeyBlocks / 2> b(query_tile, keys_place.column);
      multiply<T, kRows / kStep<T>>([&](int strip, int step) { return a.load(strip, step); },
                                    [&](int pair, int step) { return b.load(step, pair); },
                                    params.precise, key_sum);
    };
    if (computes && params.repeats > 1 && view.head.scale == 0.f) {
      add_to_values();  // keys get nothing, in units of another scale
    } else if (computes) {
      add_to_values();
      add_to_keys();
    }
    const bool takes_turn = params.turns != nullptr && item.head >= 0;
    if (takes_turn) {
      // Key tiles add to a tile of rows in descending order.
      const Range rows = {first_row, min_of(first_row + kRows, problem.query_length)};
      const Range seen = keys_of_any_row(view.head.extent, rows);
      const auto mine = static_cast<uint32_t>((seen.end - 1) / kKeys - work.tile);
      if (threadIdx.x == 0) {
        uint32_t now;
        do {
          asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                       : "=r"(now)
                       : "l"(view.turns + item.tile)
                       : "memory");
        } while (now != mine);
      }
      __syncthreads();  // all wait until thread 0 has seen this block's turn come
    }
    if (computes && wants_query) {
      float q[K::kQueryStrips][K::kQueryBlocks][4];
      clear(q);
      const RowsAPermuted<PairLayout> a(base + K::kGradientAt, query_place.row);
      const ColumnsB<Layout, K::kQueryBlocks / 2> b(base, query_place.column);
      multiply<T, kKeys / kStep<T>>([&](int strip, int step) { return a.load(16 * strip, step); },
                                    [&](int pair, int step) { return b.load(step, pair); },
                                    params.precise, q);
      const int first_strip = first_row / 16 + query_place.row / 16;
      float* const to =
          view.query_sums + int64_t{first_strip} * (16 * D) + query_place.column * 16 + lane * 4;
#pragma unroll
      for (int strip = 0; strip < K::kQueryStrips; ++strip) {
        if (first_strip + strip >= params.strips) continue;
#pragma unroll
        for (int block = 0; block < K::kQueryBlocks; ++block) {
          ptx::add_global_4(to + strip * (16 * D) + block * 128, q[strip][block]);
        }
      }
    }
    if (takes_turn) {
      __threadfence();
      __syncthreads();  // thread 0 waits until all have added, and each made it visible
      if (threadIdx.x == 0) {
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(view.turns + item.tile)
                     : "memory");
      }
    }
    if (!goes_on) break;
    if (kStages == 1 && item.head >= 0) {
      __syncthreads();  // all have done with the one stage there is, before it is overwritten
      load_rows(next, 0);
    }
    stage ^= kStages - 1;
    item = next;
  }

  // Through shared memory, for 16-byte stores: key and value tiles are not needed any more.
  __syncthreads();                                           // all have done with them
  const float scale = item.head >= 0 ? key_sum_scale : 0.f;  // not set where nothing was visited
#pragma unroll
  for (int i = 0; i < K::kKeyStrips * K::kKeyBlocks * 4; ++i) {
    key_sum[i / (4 * K::kKeyBlocks)][i / 4 % K::kKeyBlocks][i % 4] *= scale;
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
