// Forward pass: online softmax over tiles of keys (arXiv 1805.02867, 2307.08691).
//
// A block takes a tile of rows of one head through the keys that any of them sees. Each warp owns
// whole strips of 16 rows, so that nothing but the loading of tiles is shared between warps.
#pragma once

#include <cstdint>

#include "cuda/common/rules.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/sm80/element.cuh"
#include "cuda/sm80/params.h"
#include "cuda/sm80/schedule.cuh"
#include "cuda/sm80/tile.cuh"
#include "cuda/sm80/tiles.h"

namespace jaxflash::cuda::sm80 {

// The rows of `tensor` at one head of one batch.
__device__ __forceinline__ Rows rows_of(const Tensor& tensor, const BatchIndex& index, int64_t head,
                                        int64_t columns, int size, bool vectors) {
  const int64_t offset = batch_offset(tensor, index) + head * tensor.head;
  return {static_cast<const char*>(tensor.data) + offset * size, tensor.row,
          static_cast<int>(columns), vectors};
}

// Tiles of keys [begin, end).
struct KeyTiles {
  int begin, end;

  __device__ __forceinline__ bool contain(int tile) const { return tile >= begin && tile < end; }
};

// A block's tile of rows, and the tiles of keys that every row sees whole. In shared memory, as the
// view.
struct BlockTiles {
  int row_tile;
  int first_row;
  KeyTiles keys;
  KeyTiles whole_keys;
};

template <class T, int D, class Policy>
struct Forward {
  static constexpr ForwardTile kTile =
      forward_tile(kIsFloat<T>, D, Policy::kEverything, JAXFLASH_ARCH);
  static constexpr int kRows = kTile.rows(), kKeys = kTile.keys, kThreads = kTile.threads();
  static constexpr int kStrips = kTile.strips, kStages = kTile.stages;
  static constexpr int kKeyBlocks = kKeys / 8, kValueBlocks = D / 8, kSteps = D / kStep<T>;
  using Layout = TileLayout<T, D>;
  static constexpr int kKeyBytes = kKeys * Layout::kRowBytes;
  static constexpr int kQueryBytes = kRows * Layout::kRowBytes;

  const ForwardParams& params;
  const Problem& problem;
  const HeadView& view;
  const BlockTiles& tiles;
  // Shared memory; stages follow one another.
  uint32_t query_tile, key_tile, value_tile, arrays;

  float output[kStrips][kValueBlocks][4];
  float reference[kStrips][2];  // of each row, by half
  float sum[kStrips][2];        // this thread's share

  __device__ __forceinline__ int first_strip_row() const {
    return (threadIdx.x >> 5) * kStrips * 16;
  }

  __device__ __forceinline__ ArrayTiles array_tiles_of(int stage) const {
    return array_tiles(params.staging, arrays, stage);
  }

  // Keys and values of a tile, and what apply_rules will read for this block's rows.
  __device__ __forceinline__ void load_keys(const Visit& visit, int stage) const {
    const int first = visit.tile * kKeys;
    load_tiles<Layout, kKeys, kThreads>(
        key_tile + stage * kKeyBytes,
        {view.key, problem.key.row, static_cast<int>(problem.head_dim), params.vectors.key},
        value_tile + stage * kKeyBytes,
        {view.value, problem.value.row, static_cast<int>(problem.value_dim), params.vectors.value},
        first, static_cast<int>(view.extent.key_length));
    if constexpr (Policy::kEverything) {
      load_arrays<kRows, kKeys, kThreads>(problem, view, array_tiles_of(stage), visit.checks,
                                          tiles.first_row, first);
      prefetch_rules<kRows, kKeys, kThreads>(problem, view, params.staging, visit.checks,
                                             tiles.first_row, first);
    }
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void load_query(OperandA<T> (&a)[kStrips], int step) const {
    const RowsA<Layout> rows(query_tile, first_strip_row());
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) a[strip] = rows.load(16 * strip, step);
  }

  // s = query key^T for the warp's rows.
  template <class QueryOf>
  __device__ __forceinline__ void multiply_keys(int stage, const QueryOf& query_of,
                                                float (&s)[kStrips][kKeyBlocks][4]) const {
    const RowsB<Layout> keys(key_tile + stage * kKeyBytes, 0);
#pragma unroll
    for (int i = 0; i < kStrips * kKeyBlocks * 4; ++i) {
      s[i / (4 * kKeyBlocks)][i / 4 % kKeyBlocks][i % 4] = 0.f;
    }
    // No more loads ahead of their use than registers have room for.
    constexpr int kUnroll = kIsFloat<T> ? 1 : D == 128 ? 4 : kSteps;
#pragma unroll kUnroll
    for (int step = 0; step < kSteps; ++step) {
      OperandA<T> a[kStrips];
      query_of(a, step);
#pragma unroll
      for (int block = 0; block < kKeyBlocks; block += 2) {
        const OperandB<T> b = keys.load(8 * block, step);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int strip = 0; strip < kStrips; ++strip) {
            multiply_add(s[strip][block + i], a[strip], b, i, params.precise);
          }
        }
      }
    }
  }

  // Moves the references on to the maxima, and shrinks what was summed relative to the old ones.
  // None moves where none in the warp must.
  __device__ __forceinline__ void move_references(const float (&s)[kStrips][kKeyBlocks][4],
                                                  const Exponent<T>& exponent) {
    float peak[kStrips][2];
    bool moves = false;
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& x = peak[strip][half];
        x = fmaxf(s[strip][0][2 * half], s[strip][0][2 * half + 1]);
#pragma unroll
        for (int block = 1; block < kKeyBlocks; ++block) {
          x = fmaxf(x, fmaxf(s[strip][block][2 * half], s[strip][block][2 * half + 1]));
        }
        x = quad_max(x);
        moves |= exponent.of(x, reference[strip][half]) > Exponent<T>::kStays;
      }
    }
    if (!__any_sync(0xffffffffu, moves)) return;
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float old = reference[strip][half];
        const float now = fmaxf(old, exponent.reference(peak[strip][half]));
        const float shrink = ptx::ex2(exponent.difference(old, now));
        reference[strip][half] = now;
        sum[strip][half] *= shrink;
#pragma unroll
        for (int block = 0; block < kValueBlocks; ++block) {
          output[strip][block][2 * half] *= shrink;
          output[strip][block][2 * half + 1] *= shrink;
        }
      }
    }
  }

  // Logits to probabilities relative to the references, 16 keys at a time, and their products with
  // the values: the exponentials of one step run while the products of the last are under way.
  template <bool kDropout>
  __device__ __forceinline__ void add_values(int stage, const TilePlace& place,
                                             const Exponent<T>& exponent,
                                             float (&s)[kStrips][kKeyBlocks][4]) {
    const ColumnsB<Layout, D / 16> values(value_tile + stage * kKeyBytes, 0);
#pragma unroll
    for (int block = 0; block < kKeyBlocks; block += 2) {
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          float& x = s[strip][block + i / 4][i % 4];
          float& y = s[strip][block + i / 4][i % 4 + 1];
          x = ptx::ex2(exponent.of(x, reference[strip][i / 2 % 2]));
          y = ptx::ex2(exponent.of(y, reference[strip][i / 2 % 2]));
          sum[strip][i / 2 % 2] += x + y;
        }
        if (kDropout && (!kIsFloat<T> || problem.dropout_threshold != 0)) {
          for_each_draw(problem, view, place.first_row + place.row + 16 * strip,
                        place.first_key + 8 * block, [&](int i, bool kept) {
                          if (!kept) s[strip][block + i / 4][i % 4] = 0.f;
                        });
        }
      }
#pragma unroll
      for (int step = block * 8 / kStep<T>; step < (block + 2) * 8 / kStep<T>; ++step) {
        OperandA<T> p[kStrips];
#pragma unroll
        for (int strip = 0; strip < kStrips; ++strip) p[strip] = accumulator_a<T>(s[strip], step);
#pragma unroll
        for (int column = 0; column < kValueBlocks; column += 2) {
          // Floats: keeps loads from being moved further ahead than there are registers for.
          if (kIsFloat<T> && column % 8 == 0) __syncwarp();
          const OperandB<T> b = values.load(step, column / 2);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int strip = 0; strip < kStrips; ++strip) {
              multiply_add(output[strip][column + i], p[strip], b, i, params.precise);
            }
          }
        }
      }
    }
  }

  // Turns sums into results: the warp's rows of output, and their statistics.
  __device__ __forceinline__ void finish(int split) {
    const int lane = lane_id();
    const int64_t warp_row = tiles.first_row + first_strip_row();
    const bool whole = params.splits == 1;
    const int64_t split_rows =
        (split * int64_t{params.schedule.heads} + view.batch * problem.query_heads + view.head) *
        problem.query_length;
    const float kept = problem.dropout_threshold == 0
                           ? 1.f
                           : static_cast<float>(dropout_keep_scale(problem.dropout_threshold));
    const Statistics& statistics = params.statistics;
    float* const logit_max = whole ? static_cast<float*>(statistics.logit_max.data) +
                                         batch_offset(statistics.logit_max, view.index) +
                                         view.head * statistics.logit_max.head
                                   : params.split_logit_max + split_rows;
    float* const log_sum = whole ? static_cast<float*>(statistics.log_sum.data) +
                                       batch_offset(statistics.log_sum, view.index) +
                                       view.head * statistics.log_sum.head
                                 : params.split_log_sum + split_rows;
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = warp_row + 16 * strip + 8 * half + lane / 4;
        const float total = quad_sum(sum[strip][half]);
        const bool sees = total != 0.f && row < view.extent.query_length;
        const float normalise = sees ? kept / total : 0.f;
#pragma unroll
        for (int block = 0; block < kValueBlocks; ++block) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            output[strip][block][i] = sees ? output[strip][block][i] * normalise : 0.f;
          }
        }
        if (row >= problem.query_length) continue;
        if (lane % 4 == 0) {
          logit_max[row * (whole ? statistics.logit_max.row : 1)] =
              sees ? Exponent<T>::logit_max(reference[strip][half]) : minus_infinity();
          log_sum[row * (whole ? statistics.log_sum.row : 1)] =
              sees ? Exponent<T>::log_sum(reference[strip][half], total) : 0.f;
        }
        if (!whole) {
          float* const to = params.split_output + (split_rows + row) * D + 2 * (lane % 4);
#pragma unroll
          for (int block = 0; block < kValueBlocks; ++block) {
            *reinterpret_cast<float2*>(to + 8 * block) = {output[strip][block][2 * half],
                                                          output[strip][block][2 * half + 1]};
          }
        }
      }
    }
    if (!whole) return;
    // Through shared memory, for 16-byte stores: the query's rows of this warp, which only it
    // reads.
    __syncwarp();  // its lanes have read their parts of the query, before others overwrite them
    const uint32_t tile = query_tile + first_strip_row() * Layout::kRowBytes;
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      write_strip<Layout>(tile, 16 * strip, 0, output[strip]);
    }
    __syncwarp();  // all lanes wait for all of the warp's rows
    const Rows rows = rows_of(params.output, view.index, view.head, problem.value_dim, kSize<T>,
                              params.vectors.output);
    store_tile<Layout, 16 * kStrips, 32>(tile, rows, warp_row, problem.query_length, lane);
  }

  __device__ __forceinline__ void start_rows(float sink) {
    const SoftmaxStart<T> start = softmax_start<T>(sink);
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reference[strip][half] = start.reference;
        sum[strip][half] = start.sum;
      }
#pragma unroll
      for (int i = 0; i < kValueBlocks * 4; ++i) output[strip][i / 4][i % 4] = 0.f;
    }
  }
};

template <int kRows, int kKeys>
__device__ __forceinline__ KeyTiles key_tiles_of(const ForwardParams& params, const Extent& extent,
                                                 int64_t first_row, int split) {
  const Range any =
      keys_of_any_row(extent, {first_row, min_of(first_row + kRows, params.problem.query_length)});
  // Positions within an axis fit into 32 bits.
  KeyTiles tiles;
  tiles.begin = static_cast<uint32_t>(any.begin) / kKeys;
  tiles.end =
      any.end > any.begin ? (static_cast<uint32_t>(any.end) + kKeys - 1) / kKeys : tiles.begin;
  if (params.splits > 1) {
    const int share = (tiles.end - tiles.begin + params.splits - 1) / params.splits;
    tiles.begin = min(tiles.begin + split * share, tiles.end);
    tiles.end = min(tiles.begin + share, tiles.end);
  }
  return tiles;
}

template <int kRows, int kKeys>
__device__ __forceinline__ KeyTiles whole_key_tiles_of(const ForwardParams& params,
                                                       const Extent& extent, int64_t first_row) {
  const Range every = keys_of_every_row(
      extent, {first_row, min_of(first_row + kRows, params.problem.query_length)});
  return {static_cast<int>((static_cast<uint32_t>(every.begin) + kKeys - 1) / kKeys),
          static_cast<int>(static_cast<uint32_t>(every.end) / kKeys)};
}

template <class T, int D, class Policy>
__global__ void __launch_bounds__(Forward<T, D, Policy>::kThreads,
                                  Forward<T, D, Policy>::kTile.blocks)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  using F = Forward<T, D, Policy>;
  constexpr int kRows = F::kRows, kKeys = F::kKeys, kStages = F::kStages;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ HeadView view;
  __shared__ BlockTiles tiles;
  const Problem& problem = params.problem;

  const Work work = work_of(params.schedule, blockIdx.x);
  const uint32_t batch = work.head / static_cast<uint32_t>(problem.query_heads);
  const uint32_t head = work.head - batch * static_cast<uint32_t>(problem.query_heads);
  const int first_row = static_cast<int>(work.tile) * kRows;
  const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  F f = {params,
         problem,
         view,
         tiles,
         base,
         base + F::kQueryBytes,
         base + F::kQueryBytes + kStages * F::kKeyBytes,
         base + F::kQueryBytes + 2 * kStages * F::kKeyBytes};

  // Every thread finds what loading needs, so that it starts early; the view is for later.
  const BatchIndex index = batch_index(problem, batch);
  const Extent extent = extent_of(problem, index);
  const KeyTiles keys =
      key_tiles_of<kRows, kKeys>(params, extent, first_row, static_cast<int>(blockIdx.y));
  if (keys.begin < keys.end) {
    const Rows query =
        rows_of(problem.query, index, head, problem.head_dim, kSize<T>, params.vectors.query);
    load_tile<typename F::Layout, kRows, F::kThreads>(f.query_tile, query, first_row,
                                                      static_cast<int>(extent.query_length));
  }
  load_scalars<Policy>(problem, index, head, view);
  if (threadIdx.x == 0) {
    tiles = {static_cast<int>(work.tile), first_row, keys,
             whole_key_tiles_of<kRows, kKeys>(params, extent, first_row)};
    view.extent = extent;
    view.index = index;
    view.batch = batch;
    view.head = head;
    find_arrays<Policy>(problem, params.maps, view);
    const int64_t key_head = head / static_cast<uint32_t>(params.group);
    view.key = rows_of(problem.key, index, key_head, 0, kSize<T>, false).data;
    view.value = rows_of(problem.value, index, key_head, 0, kSize<T>, false).data;
  }
  __syncthreads();  // all wait for thread 0's view; its scalars come with the first tiles

  const bool mapped = Policy::kEverything &&
                      (params.maps.query_segments != nullptr || params.maps.mask.data != nullptr);
  TileScan scan;
  const auto range_checks = [&](int tile) {
    return tiles.whole_keys.contain(tile) ? 0 : kCheckRanges;
  };
  const auto next_visit = [&](int tile) -> Visit {
    if constexpr (Policy::kEverything) {
      if (!mapped) return {tile, range_checks(tile)};
      return scan.next(tile, tiles.keys.end, [&](int t) {
        return tile_checks<Policy, kRows, kKeys>(problem, params.maps, view, tiles.row_tile, t);
      });
    }
    return {tile, 0};  // what to check is found when it is needed: a register less meanwhile
  };

  Visit visit = next_visit(keys.begin);
  if (visit.tile < tiles.keys.end) {
    f.load_keys(visit, 0);
  } else {
    ptx::cp_async_wait_all();
    __syncthreads();  // all wait for the view's scalars, which finish reads
  }
  // Of several blocks that share the keys, the first counts the sink.
  f.start_rows(blockIdx.y == 0 ? sink_of<Policy>(problem, view.index, head) : minus_infinity());
  constexpr int kKept = F::kTile.query_in_registers ? F::kSteps : 1;
  OperandA<T> kept_query[kKept][F::kStrips];
  bool first = true;
  int stage = 0;
  while (visit.tile < tiles.keys.end) {
    ptx::cp_async_wait<0>();
    // Every thread arrives when its copies of this tile are there and it has done with the last
    // tile; all wait, so that all may read this tile and overwrite the last.
    __syncthreads();
    const Visit next = next_visit(visit.tile + 1);
    if (F::kTile.query_in_registers && first) {
#pragma unroll
      for (int step = 0; step < kKept; ++step) f.load_query(kept_query[step], step);
      first = false;
    }

    // Read from shared memory ahead of the products.
    const int checks = Policy::kEverything ? visit.checks : range_checks(visit.tile);
    const Exponent<T> exponent = exponent_of<T, Policy>(problem, view);
    float s[F::kStrips][F::kKeyBlocks][4];
    f.multiply_keys(
        stage,
        [&](OperandA<T>(&a)[F::kStrips], int step) {
          if constexpr (F::kTile.query_in_registers) {
#pragma unroll
            for (int strip = 0; strip < F::kStrips; ++strip) a[strip] = kept_query[step][strip];
          } else {
            f.load_query(a, step);
          }
        },
        s);
    // Behind the products, its addresses are computed while these are under way.
    if (kStages > 1 && next.tile < tiles.keys.end) f.load_keys(next, stage ^ 1);
    const TilePlace place = {tiles.first_row, visit.tile * kKeys, f.first_strip_row(), 0,
                             lane_id()};
    apply_rules<T, Policy, RowTiles<kKeys>>(
        problem, view, checks, f.array_tiles_of(stage), place, [](int, int, int, float) {}, s);
    f.move_references(s, exponent);
    // Branches around the draws alone would keep exponentials and products apart, whose overlap
    // counts where products are fast.
    if (Policy::kEverything && (kIsFloat<T> || problem.dropout_threshold != 0)) {
      f.template add_values<true>(stage, place, exponent, s);
    } else {
      f.template add_values<false>(stage, place, exponent, s);
    }

    if (kStages > 1) {
      stage ^= 1;
    } else if (next.tile < tiles.keys.end) {
      __syncthreads();  // all have done with the one stage there is, before it is overwritten
      f.load_keys(next, 0);
    }
    visit = next;
  }
  f.finish(blockIdx.y);
}

}  // namespace jaxflash::cuda::sm80
