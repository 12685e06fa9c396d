// The rules of attention on tiles and on accumulators: which tiles to visit, and how the products
// of one become logits. What the rules are is said in cpp/attention.
//
// Accumulators s[strip][block][4] of a warp stand for 16-row strips and 8-column blocks; a thread
// holds rows 16 * strip + lane / 4 + {0, 0, 8, 8} and columns 8 * block + 2 * (lane % 4) +
// {0, 1, 0, 1} of it, from `row` and `key` on, which are multiples of 16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "attention/logits.h"
#include "attention/philox.h"
#include "attention/problem.h"
#include "attention/visibility.h"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/sm80/params.h"

namespace jaxflash::cuda::sm80 {

// What the inner loop must do. Ranges: lengths, causality, windows and offsets, which cost nothing
// in tiles that are seen whole. Everything: also bias, mask, segment ids, soft cap, dropout and
// sinks.
struct Ranges {
  static constexpr bool kEverything = false;
};
struct Everything {
  static constexpr bool kEverything = true;
};

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// One head of one batch. In shared memory, since it is read seldom and registers are short.
struct HeadView {
  Extent extent;
  BatchIndex index;
  int64_t head;  // of the query
  float scale;
  // Its keys and values, forward only.
  const void* key;
  const void* value;
  // Element offsets of the head, Everything only.
  int64_t bias;
  int64_t mask;
  int64_t mask_map;
  int64_t query_ids;
  int64_t key_ids;
  int64_t batch;
  uint32_t stream[4];
};

template <class Policy>
__device__ __forceinline__ void look_at(const Problem& problem, const TileMaps& maps, int64_t batch,
                                        int64_t head, HeadView& view) {
  view.index = batch_index(problem, batch);
  view.extent = extent_of(problem, view.index);
  view.head = head;
  view.batch = batch;
  view.scale = batch_value<float>(problem.scale, view.index, 1.f);
  if constexpr (Policy::kEverything) {
    view.bias = batch_offset(problem.bias, view.index) + head * problem.bias.head;
    view.mask = batch_offset(problem.mask, view.index) + head * problem.mask.head;
    view.mask_map = batch_offset(maps.mask, view.index) + head * maps.mask.head;
    view.query_ids = batch_offset(problem.query_segment_ids, view.index);
    view.key_ids = batch_offset(problem.key_value_segment_ids, view.index);
    if (problem.dropout_stream.data != nullptr) {
      const auto* words = static_cast<const uint32_t*>(problem.dropout_stream.data) +
                          batch_offset(problem.dropout_stream, view.index) +
                          head * problem.dropout_stream.head;
      for (int i = 0; i < 4; ++i) view.stream[i] = words[i];
    }
  }
}

// What must be checked key by key in a tile; kHidden: none of its keys is seen.
enum TileChecks : int { kHidden = -1, kCheckRanges = 1, kCheckSegments = 2, kCheckMask = 4 };

template <class Policy, int kRows, int kKeys>
__device__ __forceinline__ int tile_checks(const Problem& problem, const TileMaps& maps,
                                           const HeadView& view, int64_t row_tile,
                                           int64_t key_tile) {
  const Range rows = {row_tile * kRows, (row_tile + 1) * kRows};
  const Range keys = {key_tile * kKeys, (key_tile + 1) * kKeys};
  const TileVisibility ranges = tile_visibility(view.extent, rows, keys);
  if (ranges == TileVisibility::kNone) return kHidden;
  int checks = ranges == TileVisibility::kSome ? kCheckRanges : 0;
  if constexpr (Policy::kEverything) {
    if (maps.query_segments != nullptr) {
      const TileVisibility segments =
          segment_visibility(maps.query_segments[view.batch * maps.row_tiles + row_tile],
                             maps.key_segments[view.batch * maps.key_tiles + key_tile]);
      if (segments == TileVisibility::kNone) return kHidden;
      if (segments == TileVisibility::kSome) checks |= kCheckSegments;
    }
    if (maps.mask.data != nullptr) {
      const auto visibility = static_cast<const TileVisibility*>(
          maps.mask.data)[view.mask_map + row_tile * maps.mask.row + key_tile * maps.mask.column];
      if (visibility == TileVisibility::kNone) return kHidden;
      if (visibility == TileVisibility::kSome) checks |= kCheckMask;
    }
  }
  return checks;
}

// A tile to visit.
struct Visit {
  int tile;
  int checks;
};

// Finds the tiles that are not hidden. Every lane looks at a tile of its own, so that long runs of
// hidden tiles are passed quickly; what the lanes found is kept for the tiles that follow. Warps
// agree, since they read the same.
struct TileScan {
  int first = 0;
  unsigned visible = 0;  // of the 32 tiles from `first` on; valid for `count` of them
  int count = 0;
  int checks = kHidden;  // of this lane's tile

  // The first in [tile, end), or `end`.
  template <class ChecksOf>
  __device__ __forceinline__ Visit next(int tile, int end, const ChecksOf& checks_of) {
    while (tile < end) {
      if (tile < first || tile >= first + count) {
        first = tile;
        count = min(end - tile, 32);
        const int lane = threadIdx.x & 31;
        checks = lane < count ? checks_of(tile + lane) : kHidden;
        visible = __ballot_sync(0xffffffffu, checks != kHidden);
      }
      const unsigned rest = visible >> (tile - first);
      if (rest != 0) {
        const int found = tile + __ffs(rest) - 1;
        return {found, __shfl_sync(0xffffffffu, checks, found - first)};
      }
      tile = first + count;
    }
    return {end, kHidden};
  }
};

// Calls `hide(strip, block, element)` where a key is outside the row's range.
template <int kStrips, int kBlocks, class Hide>
__device__ __forceinline__ void for_each_outside(const Extent& extent, int64_t row, int64_t key,
                                                 const Hide& hide) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < 2 * kStrips; ++i) {
    const Range seen = keys_of_row(extent, row + 16 * (i / 2) + lane / 4 + 8 * (i % 2));
    // Relative to the thread's first column.
    const int first = 2 * (lane % 4);
    const int begin = static_cast<int>(clamp_to(seen.begin - key, 0, 8 * kBlocks)) - first;
    const int end = static_cast<int>(clamp_to(seen.end - key, 0, 8 * kBlocks)) - first;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int column = 8 * block + odd;
        if (column < begin || column >= end) hide(i / 2, block, 2 * (i % 2) + odd);
      }
    }
  }
}

// Minus infinity where a key is outside the row's range.
template <int kStrips, int kBlocks>
__device__ __forceinline__ void hide_outside(const Extent& extent, int64_t row, int64_t key,
                                             float (&s)[kStrips][kBlocks][4]) {
  for_each_outside<kStrips, kBlocks>(extent, row, key, [&](int strip, int block, int element) {
    s[strip][block][element] = minus_infinity();
  });
}

template <class E>
struct alignas(2 * sizeof(E)) PairOf {
  E x, y;
};

// Whether pairs of columns from an even one on are aligned words.
__device__ __forceinline__ bool has_pairs(const Problem& problem, const Tensor& tensor,
                                          int64_t offset, int size) {
  const bool even = ((offset | tensor.row | problem.key_length) & 1) == 0;
  return tensor.column == 1 && even && reinterpret_cast<uintptr_t>(tensor.data) % (2 * size) == 0;
}

// Calls `visit(strip, block, half, x, y)` with the elements of an array [T, S], which may be
// broadcast, at two neighbouring columns; `offset` is that of its head. Rows and columns past the
// end are clamped to the last: what they bring is hidden or discarded.
template <class E, int kStrips, int kBlocks, class Visitor>
__device__ __forceinline__ void for_each_pair(const Problem& problem, const Tensor& tensor,
                                              int64_t offset, int64_t row, int64_t key,
                                              const Visitor& visit) {
  const int lane = threadIdx.x & 31;
  const E* const data = static_cast<const E*>(tensor.data) + offset;
  const int64_t first_column = key + 2 * (lane % 4);
  const bool whole = key + 8 * kBlocks <= problem.key_length;
  const bool pairs = whole && has_pairs(problem, tensor, offset, sizeof(E));
#pragma unroll
  for (int i = 0; i < 2 * kStrips; ++i) {
    const E* const of_row =
        data +
        min_of(row + 16 * (i / 2) + lane / 4 + 8 * (i % 2), problem.query_length - 1) * tensor.row;
    if (pairs) {
      const auto* const from = reinterpret_cast<const PairOf<E>*>(of_row + first_column);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const PairOf<E> pair = from[4 * block];
        visit(i / 2, block, i % 2, pair.x, pair.y);
      }
    } else {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int64_t column = first_column + 8 * block, last = problem.key_length - 1;
        visit(i / 2, block, i % 2, of_row[min_of(column, last) * tensor.column],
              of_row[min_of(column + 1, last) * tensor.column]);
      }
    }
  }
}

__device__ __forceinline__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float as_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(double x) { return static_cast<float>(x); }

// A bias of minus infinity hides, whatever the logit.
__device__ __forceinline__ void add_bias(float bias, float& s) {
  s = bias == minus_infinity() ? bias : s + bias;
}

template <class E, int kStrips, int kBlocks>
__device__ __forceinline__ void add_bias_of(const Problem& problem, const HeadView& view,
                                            int64_t row, int64_t key,
                                            float (&s)[kStrips][kBlocks][4]) {
  for_each_pair<E, kStrips, kBlocks>(problem, problem.bias, view.bias, row, key,
                                     [&](int strip, int block, int half, E x, E y) {
                                       add_bias(as_float(x), s[strip][block][2 * half]);
                                       add_bias(as_float(y), s[strip][block][2 * half + 1]);
                                     });
}

template <int kStrips, int kBlocks>
__device__ __forceinline__ void add_bias(const Problem& problem, const HeadView& view, int64_t row,
                                         int64_t key, float (&s)[kStrips][kBlocks][4]) {
  switch (problem.bias.dtype) {
    case DType::kBF16:
      return add_bias_of<__nv_bfloat16>(problem, view, row, key, s);
    case DType::kF16:
      return add_bias_of<__half>(problem, view, row, key, s);
    case DType::kF32:
      return add_bias_of<float>(problem, view, row, key, s);
    default:
      return add_bias_of<double>(problem, view, row, key, s);
  }
}

// Adds the gradients of logits to those of the bias, f32 and broadcast as the bias is. Rows or
// columns that share an element are added up within the warp first.
template <int kStrips, int kBlocks>
__device__ __forceinline__ void add_bias_cotangent(const Problem& problem, const Tensor& cotangent,
                                                   const HeadView& view, int64_t row, int64_t key,
                                                   const float (&g)[kStrips][kBlocks][4]) {
  const int lane = threadIdx.x & 31;
  float* const to = static_cast<float*>(cotangent.data) + batch_offset(cotangent, view.index) +
                    view.head * cotangent.head;
  const auto warp_sum = [](float x, int from, int to) {
    for (int mask = from; mask < to; mask *= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
    return x;
  };
  const int64_t rows = view.extent.query_length, keys = view.extent.key_length;
  if (cotangent.row == 0) {
    float whole = 0.f;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 2 * kStrips; ++i) sum += g[i / 2][block][2 * (i % 2) + odd];
        sum = warp_sum(sum, 4, 32);  // over the lanes that hold the same columns
        whole += sum;
        const int64_t column = key + 8 * block + 2 * (lane % 4) + odd;
        if (cotangent.column != 0 && lane < 4 && column < keys) atomicAdd(to + column, sum);
      }
    }
    if (cotangent.column == 0) {
      whole = warp_sum(whole, 1, 4);
      if (lane == 0) atomicAdd(to, whole);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 2 * kStrips; ++i) {
    const int64_t at_row = row + 16 * (i / 2) + lane / 4 + 8 * (i % 2);
    float* const of_row = to + at_row * cotangent.row;
    if (cotangent.column == 0) {
      float sum = 0.f;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        sum += g[i / 2][block][2 * (i % 2)] + g[i / 2][block][2 * (i % 2) + 1];
      }
      sum = warp_sum(sum, 1, 4);  // over the lanes that hold the same row
      if (lane % 4 == 0 && at_row < rows) atomicAdd(of_row, sum);
      continue;
    }
    if (at_row >= rows) continue;
    const bool pairs = problem.key_length % 2 == 0;  // else rows are not aligned to two floats
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int64_t column = key + 8 * block + 2 * (lane % 4);
      const float x = g[i / 2][block][2 * (i % 2)], y = g[i / 2][block][2 * (i % 2) + 1];
      if (column >= keys) continue;  // past it gradients are 0
      if (pairs) {
        ptx::add_global_2(of_row + column, x, y);
      } else {
        atomicAdd(of_row + column, x);
        if (column + 1 < keys) atomicAdd(of_row + column + 1, y);
      }
    }
  }
}

template <class E>
__device__ __forceinline__ E from_float(float x) {
  return static_cast<E>(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half from_float(float x) {
  return __float2half_rn(x);
}

// Writes the gradients of logits where they are the gradients of a bias that is not broadcast.
template <class E, int kStrips, int kBlocks>
__device__ __forceinline__ void store_bias_cotangent_as(const Problem& problem,
                                                        const Tensor& cotangent,
                                                        const HeadView& view, int64_t row,
                                                        int64_t key,
                                                        const float (&g)[kStrips][kBlocks][4]) {
  const int lane = threadIdx.x & 31;
  const int64_t offset = batch_offset(cotangent, view.index) + view.head * cotangent.head;
  const bool pairs = has_pairs(problem, cotangent, offset, sizeof(E));
#pragma unroll
  for (int i = 0; i < 2 * kStrips; ++i) {
    const int64_t at_row = row + 16 * (i / 2) + lane / 4 + 8 * (i % 2);
    if (at_row >= view.extent.query_length) continue;
    E* const to = static_cast<E*>(cotangent.data) + offset + at_row * cotangent.row;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int64_t column = key + 8 * block + 2 * (lane % 4);
      const E x = from_float<E>(g[i / 2][block][2 * (i % 2)]);
      const E y = from_float<E>(g[i / 2][block][2 * (i % 2) + 1]);
      if (pairs && column < problem.key_length) {
        *reinterpret_cast<PairOf<E>*>(to + column) = {x, y};
      } else {
        if (column < problem.key_length) to[column] = x;
        if (column + 1 < problem.key_length) to[column + 1] = y;
      }
    }
  }
}

template <int kStrips, int kBlocks>
__device__ __forceinline__ void store_bias_cotangent(const Problem& problem,
                                                     const Tensor& cotangent, const HeadView& view,
                                                     int64_t row, int64_t key,
                                                     const float (&g)[kStrips][kBlocks][4]) {
  switch (cotangent.dtype) {
    case DType::kBF16:
      return store_bias_cotangent_as<__nv_bfloat16>(problem, cotangent, view, row, key, g);
    case DType::kF16:
      return store_bias_cotangent_as<__half>(problem, cotangent, view, row, key, g);
    case DType::kF32:
      return store_bias_cotangent_as<float>(problem, cotangent, view, row, key, g);
    default:
      return store_bias_cotangent_as<double>(problem, cotangent, view, row, key, g);
  }
}

template <int kStrips, int kBlocks>
__device__ __forceinline__ void hide_masked(const Problem& problem, const HeadView& view,
                                            int64_t row, int64_t key,
                                            float (&s)[kStrips][kBlocks][4]) {
  for_each_pair<uint8_t, kStrips, kBlocks>(
      problem, problem.mask, view.mask, row, key,
      [&](int strip, int block, int half, uint8_t x, uint8_t y) {
        if (x == 0) s[strip][block][2 * half] = minus_infinity();
        if (y == 0) s[strip][block][2 * half + 1] = minus_infinity();
      });
}

template <int kStrips, int kBlocks>
__device__ __forceinline__ void hide_other_segments(const Problem& problem, const HeadView& view,
                                                    int64_t row, int64_t key,
                                                    float (&s)[kStrips][kBlocks][4]) {
  const int lane = threadIdx.x & 31;
  const auto* rows = static_cast<const int32_t*>(problem.query_segment_ids.data) + view.query_ids;
  const auto* keys = static_cast<const int32_t*>(problem.key_value_segment_ids.data) + view.key_ids;
  int32_t row_ids[2 * kStrips];
#pragma unroll
  for (int i = 0; i < 2 * kStrips; ++i) {
    row_ids[i] =
        rows[min_of(row + 16 * (i / 2) + lane / 4 + 8 * (i % 2), problem.query_length - 1)];
  }
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int32_t id =
          keys[min_of(key + 8 * block + 2 * (lane % 4) + odd, problem.key_length - 1)];
#pragma unroll
      for (int i = 0; i < 2 * kStrips; ++i) {
        if (row_ids[i] != id) s[i / 2][block][2 * (i % 2) + odd] = minus_infinity();
      }
    }
  }
}

// tanh to about 1e-7, absolutely.
struct Tanh {
  __device__ __forceinline__ float operator()(float x) const {
    return 1.f - 2.f * ptx::reciprocal(1.f + ptx::ex2(2.f * kLog2E * x));
  }
};

__device__ __forceinline__ float soft_cap_slope(const Problem& problem, const HeadView& view,
                                                float product) {
  return soft_capped(product * (view.scale / static_cast<float>(problem.soft_cap)), 1.f, Tanh())
      .slope;
}

// Products to logits, with the policy Everything: soft_cap(scale * q.k) + bias, minus infinity
// where hidden. `on_slope(strip, block, element, slope)` is told the slope of the soft cap.
template <int kStrips, int kBlocks, class OnSlope>
__device__ __forceinline__ void apply_rules(const Problem& problem, const HeadView& view,
                                            int checks, int64_t row, int64_t key,
                                            const OnSlope& on_slope,
                                            float (&s)[kStrips][kBlocks][4]) {
  const float scale = view.scale;
  if (problem.soft_cap != 0) {
    const float cap = static_cast<float>(problem.soft_cap);
    const float scale_in_caps = scale / cap;
#pragma unroll
    for (int i = 0; i < kStrips * kBlocks * 4; ++i) {
      float& x = s[i / (4 * kBlocks)][i / 4 % kBlocks][i % 4];
      const auto capped = soft_capped(x * scale_in_caps, 1.f, Tanh());
      on_slope(i / (4 * kBlocks), i / 4 % kBlocks, i % 4, capped.slope);
      x = capped.value * cap;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kStrips * kBlocks * 4; ++i) {
      s[i / (4 * kBlocks)][i / 4 % kBlocks][i % 4] *= scale;
    }
  }
  if (problem.bias.data != nullptr) add_bias(problem, view, row, key, s);
  if (checks & kCheckRanges) hide_outside(view.extent, row, key, s);
  if (checks & kCheckSegments) hide_other_segments(problem, view, row, key, s);
  if (checks & kCheckMask) hide_masked(problem, view, row, key, s);
}

// Asks the L2 cache for the part of an array [T, S] that a tile will read. All kThreads threads
// call it.
template <int kRows, int kKeys, int kThreads>
__device__ __forceinline__ void prefetch_tile(const Problem& problem, const Tensor& tensor,
                                              int64_t offset, int size, int64_t first_row,
                                              int64_t first_key) {
  if (tensor.data == nullptr || tensor.row == 0 || tensor.column == 0) return;
  const int line = 128 / size;  // elements
  for (int row = threadIdx.x; row < kRows; row += kThreads) {
    if (first_row + row >= problem.query_length) break;
    const char* const from = static_cast<const char*>(tensor.data) +
                             (offset + (first_row + row) * tensor.row + first_key) * size;
    for (int column = 0; column < kKeys && first_key + column < problem.key_length;
         column += line) {
      ptx::prefetch_l2(from + column * size);
    }
  }
}

// What apply_rules will read of a tile, ahead of time.
template <int kRows, int kKeys, int kThreads>
__device__ __forceinline__ void prefetch_rules(const Problem& problem, const HeadView& view,
                                               int checks, int64_t first_row, int64_t first_key) {
  if (problem.bias.data != nullptr) {
    const int size = problem.bias.dtype == DType::kF64   ? 8
                     : problem.bias.dtype == DType::kF32 ? 4
                                                         : 2;
    prefetch_tile<kRows, kKeys, kThreads>(problem, problem.bias, view.bias, size, first_row,
                                          first_key);
  }
  if (checks & kCheckMask) {
    prefetch_tile<kRows, kKeys, kThreads>(problem, problem.mask, view.mask, 1, first_row,
                                          first_key);
  }
}

struct MultiplyWide {
  __device__ __forceinline__ WideProduct<uint32_t> operator()(uint32_t a, uint32_t b) const {
    const uint64_t product = uint64_t{a} * b;
    return {static_cast<uint32_t>(product >> 32), static_cast<uint32_t>(product)};
  }
};

// Which of a thread's elements dropout keeps.
template <int kStrips, int kBlocks>
struct KeptBits {
  uint32_t word[kStrips][(kBlocks + 7) / 8];

  // For the accumulators from (row, key) on.
  __device__ __forceinline__ void draw(const Problem& problem, const HeadView& view, int64_t row,
                                       int64_t key) {
    const int lane = threadIdx.x & 31;
    const uint32_t philox_key[2] = {view.stream[0], view.stream[1]};
    const uint32_t batch = view.stream[2], head = view.stream[3];
    const auto threshold = static_cast<uint32_t>(problem.dropout_threshold);
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
      for (int i = 0; i < (kBlocks + 7) / 8; ++i) word[strip][i] = 0;
#pragma unroll
      for (int pair = 0; pair < kBlocks / 2; ++pair) {
        // One call decides a thread's eight elements of a 16x16 block (attention/philox.h).
        const PhiloxWords<uint32_t> draws = philox_by<uint32_t>(
            {{dropout_row_word(row + 16 * strip + lane / 4),
              dropout_column_word(key + 16 * pair + 2 * (lane % 4)), batch, head}},
            philox_key, MultiplyWide());
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int half_block = i / 4, half = i / 2 % 2, odd = i % 2;
          const int of = dropout_lane(8 * half, 8 * half_block + odd);
          const uint32_t draw = (draws.word[of / 2] >> (16 * (of % 2))) & 0xffffu;
          if (draw >= threshold) word[strip][pair / 4] |= 1u << (pair % 4 * 8 + i);
        }
      }
    }
  }
  __device__ __forceinline__ bool kept(int strip, int block, int element) const {
    return word[strip][block / 8] >> (block % 8 * 4 + element) & 1;
  }
};

}  // namespace jaxflash::cuda::sm80
