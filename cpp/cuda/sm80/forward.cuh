// Forward pass: online softmax over tiles of keys (arXiv 1805.02867, 2307.08691).
//
// A block takes a tile of rows of one head through the keys that any of them sees. Each warp owns
// whole strips of 16 rows, so that nothing but the loading of tiles is shared between warps.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/sm80/element.cuh"
#include "cuda/sm80/params.h"
#include "cuda/sm80/rules.cuh"
#include "cuda/sm80/schedule.cuh"
#include "cuda/sm80/tile.cuh"
#include "cuda/sm80/tiles.h"

namespace jaxflash::cuda::sm80 {

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The rows of `tensor` at one head of one batch.
__device__ __forceinline__ Rows rows_of(const Tensor& tensor, const BatchIndex& index, int64_t head,
                                        int64_t columns, int size, bool vectors) {
  const int64_t offset = batch_offset(tensor, index) + head * tensor.head;
  return {static_cast<const char*>(tensor.data) + offset * size, tensor.row,
          static_cast<int>(columns), vectors};
}

// Where logits become exponents: logits in units of `unit` nats; in the exponent of 2 that is
// `factor` a unit. With 16-bit operands the exponent is one multiply-add, x * factor - reference,
// whose reference is the rounded maximum * factor; with floats (x - maximum) * factor, exact where
// logits are huge.
template <class T>
struct Exponent {
  float unit;
  float factor;

  __device__ __forceinline__ float reference(float maximum) const {
    if (maximum == minus_infinity()) return 0.f;  // nothing seen yet: every exponent is -inf
    return kIsFloat<T> ? maximum : maximum * factor;
  }
  __device__ __forceinline__ float of(float x, float reference) const {
    return kIsFloat<T> ? (x - reference) * factor : fmaf(x, factor, -reference);
  }
  __device__ __forceinline__ float difference(float reference, float from) const {
    return kIsFloat<T> ? (reference - from) * factor : reference - from;
  }
  // Log-sum-exp in two parts: the maximum in nats, and the log of the sum relative to it, which
  // makes good for the rounding of both maximum and reference.
  __device__ __forceinline__ float logit_max(float maximum) const { return maximum * unit; }
  __device__ __forceinline__ float log_sum(float maximum, float sum) const {
    const float roundings = kIsFloat<T> ? 0.f
                                        : fmaf(maximum, unit, -logit_max(maximum)) -
                                              kLn2 * fmaf(maximum, factor, -reference(maximum));
    return logf(sum) + roundings;
  }
};

// Logits leave apply_rules in nats. Ranges leave them as products, in units of the scale.
template <class T, class Policy>
__device__ __forceinline__ Exponent<T> exponent_of(const HeadView& view) {
  const float scale = fabsf(view.scale);
  const float unit = Policy::kEverything || scale == 0.f ? 1.f : scale;
  return {unit, unit * kLog2E};
}

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
  HeadView& view;
  uint32_t query_tile, key_tile, value_tile;  // shared memory; stages follow one another

  float output[kStrips][kValueBlocks][4];
  float maximum[kStrips][2];  // of each row so far, by half; in the exponent's unit
  float sum[kStrips][2];      // this thread's share

  __device__ __forceinline__ int first_strip_row() const {
    return (threadIdx.x >> 5) * kStrips * 16;
  }

  __device__ __forceinline__ void load_keys(int tile, int stage) const {
    const int64_t first = int64_t{tile} * kKeys;
    load_tile<Layout, kKeys, kThreads>(
        key_tile + stage * kKeyBytes,
        {view.key, problem.key.row, static_cast<int>(problem.head_dim), params.vectors.key}, first,
        view.extent.key_length);
    load_tile<Layout, kKeys, kThreads>(
        value_tile + stage * kKeyBytes,
        {view.value, problem.value.row, static_cast<int>(problem.value_dim), params.vectors.value},
        first, view.extent.key_length);
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
#pragma unroll
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

  // Moves the maxima on, shrinks what was summed relative to the old ones; the references.
  //
  // A maximum that would move by less than 2^8 in every row of the warp stays: numerator and
  // denominator share it, so the result is the same, and the sums are spared a multiplication.
  __device__ __forceinline__ void move_maxima(const float (&s)[kStrips][kKeyBlocks][4],
                                              const Exponent<T>& exponent,
                                              float (&reference)[kStrips][2]) {
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
        moves |= (x - maximum[strip][half]) * exponent.factor > 8.f;
      }
    }
    if (__any_sync(0xffffffffu, moves)) {
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float old = maximum[strip][half];
          const float now = fmaxf(old, peak[strip][half]);
          const float shrink =
              old == minus_infinity()
                  ? 0.f
                  : ptx::ex2(exponent.difference(exponent.reference(old), exponent.reference(now)));
          maximum[strip][half] = now;
          sum[strip][half] *= shrink;
#pragma unroll
          for (int block = 0; block < kValueBlocks; ++block) {
            output[strip][block][2 * half] *= shrink;
            output[strip][block][2 * half + 1] *= shrink;
          }
        }
      }
    }
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reference[strip][half] = exponent.reference(maximum[strip][half]);
      }
    }
  }

  // Logits to probabilities relative to the references, 16 keys at a time, and their products with
  // the values: the exponentials of one step run while the products of the last are under way.
  __device__ __forceinline__ void add_values(int stage, int64_t row, int64_t first_key,
                                             const Exponent<T>& exponent,
                                             const float (&reference)[kStrips][2],
                                             float (&s)[kStrips][kKeyBlocks][4]) {
    const bool drops = Policy::kEverything && problem.dropout_threshold != 0;
    KeptBits<kStrips, kKeyBlocks> kept;
    if (drops) kept.draw(problem, view, row, first_key);
    const ColumnsB<Layout, D / 16> values(value_tile + stage * kKeyBytes, 0);
#pragma unroll
    for (int block = 0; block < kKeyBlocks; block += 2) {
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& x = s[strip][block + i / 4][i % 4];
          x = ptx::ex2(exponent.of(x, reference[strip][i / 2 % 2]));
          sum[strip][i / 2 % 2] += x;
        }
        if (drops) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            if (!kept.kept(strip, block + i / 4, i % 4)) s[strip][block + i / 4][i % 4] = 0.f;
          }
        }
      }
#pragma unroll
      for (int step = block * 8 / kStep<T>; step < (block + 2) * 8 / kStep<T>; ++step) {
        OperandA<T> p[kStrips];
#pragma unroll
        for (int strip = 0; strip < kStrips; ++strip) p[strip] = accumulator_a<T>(s[strip], step);
#pragma unroll
        for (int column = 0; column < kValueBlocks; column += 2) {
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
  __device__ __forceinline__ void finish(int64_t first_row, int split,
                                         const Exponent<T>& exponent) {
    const int lane = lane_id();
    const int64_t warp_row = first_row + first_strip_row();
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
        const float peak = maximum[strip][half];
        const bool sees = peak != minus_infinity() && row < view.extent.query_length;
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
              sees ? exponent.logit_max(peak) : minus_infinity();
          log_sum[row * (whole ? statistics.log_sum.row : 1)] =
              sees ? exponent.log_sum(peak, total) : 0.f;
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

  __device__ __forceinline__ void start_rows(float first_maximum, float first_sum) {
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        maximum[strip][half] = first_maximum;
        sum[strip][half] = first_sum;
      }
#pragma unroll
      for (int i = 0; i < kValueBlocks * 4; ++i) output[strip][i / 4][i % 4] = 0.f;
    }
  }
};

// The tiles of keys that a block visits, and those that every row sees whole.
struct KeyTiles {
  int begin, end;
  int whole_begin, whole_end;
};

template <int kRows, int kKeys>
__device__ __forceinline__ KeyTiles key_tiles_of(const ForwardParams& params, const Extent& extent,
                                                 int64_t first_row, int split) {
  const Range rows = {first_row, min_of(first_row + kRows, params.problem.query_length)};
  const Range any = keys_of_any_row(extent, rows);
  const Range every = keys_of_every_row(extent, rows);
  KeyTiles tiles;
  tiles.begin = static_cast<int>(any.begin / kKeys);
  tiles.end = any.end > any.begin ? static_cast<int>((any.end + kKeys - 1) / kKeys) : tiles.begin;
  tiles.whole_begin = static_cast<int>((every.begin + kKeys - 1) / kKeys);
  tiles.whole_end = static_cast<int>(every.end / kKeys);
  if (params.splits > 1) {
    const int share = (tiles.end - tiles.begin + params.splits - 1) / params.splits;
    tiles.begin = min(tiles.begin + split * share, tiles.end);
    tiles.end = min(tiles.begin + share, tiles.end);
  }
  return tiles;
}

template <class T, int D, class Policy>
__global__ void __launch_bounds__(Forward<T, D, Policy>::kThreads,
                                  Forward<T, D, Policy>::kTile.blocks)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  using F = Forward<T, D, Policy>;
  constexpr int kRows = F::kRows, kKeys = F::kKeys, kStages = F::kStages;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ HeadView view;
  const Problem& problem = params.problem;

  const Work work = work_of(params.schedule, blockIdx.x);
  const int64_t batch = work.head / static_cast<uint32_t>(problem.query_heads);
  const int64_t head = work.head % static_cast<uint32_t>(problem.query_heads);
  if (threadIdx.x == 0) {
    look_at<Policy>(problem, params.maps, batch, head, view);
    const int64_t key_head = static_cast<uint32_t>(head) / static_cast<uint32_t>(params.group);
    view.key = rows_of(problem.key, view.index, key_head, 0, kSize<T>, false).data;
    view.value = rows_of(problem.value, view.index, key_head, 0, kSize<T>, false).data;
  }
  __syncthreads();  // all wait for thread 0's view

  const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  F f = {params,
         problem,
         view,
         base,
         base + F::kQueryBytes,
         base + F::kQueryBytes + kStages * F::kKeyBytes};

  const int first_row = static_cast<int>(work.tile) * kRows;
  const KeyTiles tiles =
      key_tiles_of<kRows, kKeys>(params, view.extent, first_row, static_cast<int>(blockIdx.y));
  const bool mapped = Policy::kEverything &&
                      (params.maps.query_segments != nullptr || params.maps.mask.data != nullptr);
  TileScan scan;
  const auto range_checks = [&](int tile) {
    return tile >= tiles.whole_begin && tile < tiles.whole_end ? 0 : kCheckRanges;
  };
  const auto next_visit = [&](int tile) -> Visit {
    if constexpr (Policy::kEverything) {
      if (!mapped) return {tile, range_checks(tile)};
      return scan.next(tile, tiles.end, [&](int t) {
        return tile_checks<Policy, kRows, kKeys>(problem, params.maps, view, work.tile, t);
      });
    }
    return {tile, 0};  // what to check is found when it is needed: a register less meanwhile
  };

  float sink = minus_infinity();
  if (Policy::kEverything && problem.sinks.data != nullptr && blockIdx.y == 0) {
    sink = static_cast<const float*>(
        problem.sinks.data)[batch_offset(problem.sinks, view.index) + head * problem.sinks.head];
  }
  // The sink is a logit that is there before any key; one thread of a quad counts it.
  f.start_rows(sink, sink != minus_infinity() && lane_id() % 4 == 0 ? 1.f : 0.f);

  Visit visit = next_visit(tiles.begin);
  if (visit.tile < tiles.end) {
    const Rows query =
        rows_of(problem.query, view.index, head, problem.head_dim, kSize<T>, params.vectors.query);
    load_tile<typename F::Layout, kRows, F::kThreads>(f.query_tile, query, first_row,
                                                      view.extent.query_length);
    f.load_keys(visit.tile, 0);
  }
  constexpr int kKept = F::kTile.query_in_registers ? F::kSteps : 1;
  OperandA<T> kept_query[kKept][F::kStrips];
  bool first = true;
  int stage = 0;
  while (visit.tile < tiles.end) {
    ptx::cp_async_wait<0>();
    // Every thread arrives when its copies of this tile are there and it has done with the last
    // tile; all wait, so that all may read this tile and overwrite the last.
    __syncthreads();
    const Visit next = next_visit(visit.tile + 1);
    if (kStages > 1 && next.tile < tiles.end) f.load_keys(next.tile, stage ^ 1);
    if (Policy::kEverything && next.tile < tiles.end) {
      prefetch_rules<kRows, kKeys, F::kThreads>(problem, view, next.checks, first_row,
                                                int64_t{next.tile} * kKeys);
    }
    if (F::kTile.query_in_registers && first) {
#pragma unroll
      for (int step = 0; step < kKept; ++step) f.load_query(kept_query[step], step);
      first = false;
    }

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
    const int row = first_row + f.first_strip_row();
    const int first_key = visit.tile * kKeys;
    if constexpr (Policy::kEverything) {
      apply_rules(problem, view, visit.checks, row, first_key, [](int, int, int, float) {}, s);
    } else {
      if (!(view.scale > 0.f)) {
        // Products take on the sign of the scale; one of 0 must not meet a hidden key's -inf.
        const float sign = view.scale == 0.f ? 0.f : -1.f;
#pragma unroll
        for (int i = 0; i < F::kStrips * F::kKeyBlocks * 4; ++i) {
          s[i / (4 * F::kKeyBlocks)][i / 4 % F::kKeyBlocks][i % 4] *= sign;
        }
      }
      if (range_checks(visit.tile) != 0) hide_outside(view.extent, row, first_key, s);
    }
    const Exponent<T> exponent = exponent_of<T, Policy>(view);
    float reference[F::kStrips][2];
    f.move_maxima(s, exponent, reference);
    f.add_values(stage, row, first_key, exponent, reference, s);

    if (kStages > 1) {
      stage ^= 1;
    } else if (next.tile < tiles.end) {
      __syncthreads();  // all have done with the one stage there is, before it is overwritten
      f.load_keys(next.tile, 0);
    }
    visit = next;
  }
  f.finish(first_row, blockIdx.y, exponent_of<T, Policy>(view));
}

}  // namespace jaxflash::cuda::sm80
