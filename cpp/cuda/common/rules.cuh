// The rules of attention on tiles and on accumulators: which tiles to visit, and how the products
// of one become logits. What the rules are is said in cpp/attention.
//
// Accumulators s[strip][block][4] of a warp stand for 16-row strips and 8-column blocks; a thread
// holds rows 16 * strip + lane / 4 + {0, 0, 8, 8} and columns 8 * block + 2 * (lane % 4) +
// {0, 1, 0, 1} of it, from `row` and `key` on, which are multiples of 16. Where the place of the
// accumulators is a KeysDownPlace they are those of the transpose: their rows are keys, and their
// columns rows of queries.
#pragma once

#include <cstdint>

#include "attention/logits.h"
#include "attention/philox.h"
#include "attention/problem.h"
#include "attention/visibility.h"
#include "cuda/common/softmax.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/sm80/element.cuh"
#include "cuda/sm80/params.h"
#include "cuda/sm80/tile.cuh"

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

// Where the arrays of a view's head lie.
template <class Policy>
__device__ __forceinline__ void find_arrays(const Problem& problem, const TileMaps& maps,
                                            HeadView& view) {
  if constexpr (Policy::kEverything) {
    view.bias = batch_offset(problem.bias, view.index) + view.head * problem.bias.head;
    view.mask = batch_offset(problem.mask, view.index) + view.head * problem.mask.head;
    view.mask_map = batch_offset(maps.mask, view.index) + view.head * maps.mask.head;
    view.query_ids = batch_offset(problem.query_segment_ids, view.index);
    view.key_ids = batch_offset(problem.key_value_segment_ids, view.index);
  }
}

// Starts to load the scalars of a head into a view in shared memory; done as cp.async's copies are.
// All threads call it.
template <class Policy>
__device__ __forceinline__ void load_scalars(const Problem& problem, const BatchIndex& index,
                                             int64_t head, HeadView& view) {
  const auto load = [](void* to, const void* from) {
    ptx::cp_async_4(static_cast<uint32_t>(__cvta_generic_to_shared(to)), from, true);
  };
  if (threadIdx.x == 0) {
    if (problem.scale.data != nullptr) {
      load(&view.scale,
           static_cast<const float*>(problem.scale.data) + batch_offset(problem.scale, index));
    } else {
      view.scale = 1.f;
    }
  }
  if (Policy::kEverything && problem.dropout_stream.data != nullptr && threadIdx.x < 4) {
    const auto* words = static_cast<const uint32_t*>(problem.dropout_stream.data) +
                        batch_offset(problem.dropout_stream, index) +
                        head * problem.dropout_stream.head;
    load(&view.stream[threadIdx.x], words + threadIdx.x);
  }
}

template <class Policy>
__device__ __forceinline__ void look_at(const Problem& problem, const TileMaps& maps, int64_t batch,
                                        int64_t head, HeadView& view) {
  view.index = batch_index(problem, batch);
  view.extent = extent_of(problem, view.index);
  view.head = head;
  view.batch = batch;
  view.scale = batch_value<float>(problem.scale, view.index, 1.f);
  find_arrays<Policy>(problem, maps, view);
  if (Policy::kEverything && problem.dropout_stream.data != nullptr) {
    const auto* words = static_cast<const uint32_t*>(problem.dropout_stream.data) +
                        batch_offset(problem.dropout_stream, view.index) +
                        head * problem.dropout_stream.head;
    for (int i = 0; i < 4; ++i) view.stream[i] = words[i];
  }
}

// What must be checked key by key in a tile; kHidden: none of its keys is seen. kChangeAll: beside
// checks, products are not yet logits.
enum TileChecks : int {
  kHidden = -1,
  kCheckRanges = 1,
  kCheckSegments = 2,
  kCheckMask = 4,
  kChangeAll = 8
};

// `view`: extent, batch and mask_map of a HeadView.
template <class Policy, int kRows, int kKeys, class View>
__device__ __forceinline__ int tile_checks(const Problem& problem, const TileMaps& maps,
                                           const View& view, int64_t row_tile, int64_t key_tile) {
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

// Read anew at each call: what the rules compute from it is not kept in registers from tile to
// tile.
__device__ __forceinline__ int lane_now() { return ptx::thread_index() & 31; }

// How many of a thread's columns, from its first on, lie before column `end` of the first.
__device__ __forceinline__ int columns_before(int end) { return 2 * (end >> 3) + min(end & 7, 2); }

// Calls `hide(strip, block, element)` where a key is outside the row's range.
template <int kStrips, int kBlocks, class Hide>
__device__ __forceinline__ void for_each_outside(const Extent& extent, int64_t row, int64_t key,
                                                 const Hide& hide) {
  static_assert(2 * kBlocks <= 32, "a bit for each of a thread's columns");
  const int lane = lane_now();
#pragma unroll
  for (int i = 0; i < 2 * kStrips; ++i) {
    const Range seen = keys_of_row(extent, row + lane / 4 + 8 * i);
    const auto bits_from = [&](int64_t position) {
      const int column = static_cast<int>(clamp_to(position - key, 0, 8 * kBlocks));
      return __funnelshift_lc(0, ~0u, columns_before(column - 2 * (lane % 4)));
    };
    const uint32_t inside = bits_from(seen.begin) & ~bits_from(seen.end);
#pragma unroll
    for (int bit = 0; bit < 2 * kBlocks; ++bit) {
      if ((inside >> bit & 1) == 0) hide(i / 2, bit / 2, 2 * (i % 2) + bit % 2);
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

// Where a warp's accumulators lie: the block's tile, and the warp's place in it.
struct TilePlace {
  static constexpr bool kKeysDown = false;
  int first_row, first_key;
  int row, key;
  int lane;  // of this thread
};
// Likewise of accumulators with keys as their rows: strips are of 16 keys, blocks of 8 rows.
struct KeysDownPlace : TilePlace {
  static constexpr bool kKeysDown = true;
};

// What one direction of accumulators stands for in an array [T, S]: rows or keys from `first` on,
// before `end`, `stride` elements apart.
struct Direction {
  int64_t first, end, stride;
};
// Those down and across accumulators.
struct Directions {
  Direction down, across;
};
template <class Place>
__device__ __forceinline__ Directions directions(const Place& place, const Tensor& tensor,
                                                 int64_t rows, int64_t keys) {
  const Direction of_rows = {int64_t{place.first_row} + place.row, rows, tensor.row};
  const Direction of_keys = {int64_t{place.first_key} + place.key, keys, tensor.column};
  return Place::kKeysDown ? Directions{of_keys, of_rows} : Directions{of_rows, of_keys};
}

// Two neighbours of a row, as bits.
template <class E>
__device__ __forceinline__ uint2 split_pair(uint32_t word) {
  constexpr int kBits = 8 * kSize<E>;
  return {word & ((1u << kBits) - 1), word >> kBits};
}
template <class E>
__device__ __forceinline__ uint2 shared_pair(uint32_t address) {
  if constexpr (kSize<E> == 4) {
    return ptx::load_shared_2(address);
  } else if constexpr (kSize<E> == 2) {
    return split_pair<E>(ptx::load_shared(address));
  } else {
    return split_pair<E>(ptx::load_shared_half(address));
  }
}
template <class E>
__device__ __forceinline__ uint2 global_pair(const typename E::Bits* from) {
  if constexpr (kSize<E> == 4) {
    return *reinterpret_cast<const uint2*>(from);
  } else if constexpr (kSize<E> == 2) {
    return split_pair<E>(*reinterpret_cast<const uint32_t*>(from));
  } else {
    return split_pair<E>(*reinterpret_cast<const uint16_t*>(from));
  }
}

// Whether `count` neighbouring columns, a power of two, from a multiple of it on are an aligned
// word.
__device__ __forceinline__ bool has_words(const Problem& problem, const Tensor& tensor,
                                          int64_t offset, int size, int count) {
  const bool whole = ((offset | tensor.row | problem.key_length) & (count - 1)) == 0;
  return tensor.column == 1 && whole &&
         reinterpret_cast<uintptr_t>(tensor.data) % (count * size) == 0;
}

// How tiles [rows][kKeys] of bias and mask lie in shared memory.
template <int kKeys>
struct RowTiles {
  template <class E>
  using Layout = TileLayout<E, kKeys>;
};

// One element, as bits.
template <class E>
__device__ __forceinline__ uint32_t shared_element(uint32_t address) {
  static_assert(kSize<E> != 2);
  return kSize<E> == 4 ? ptx::load_shared(address) : ptx::load_shared_byte(address);
}

// Calls `visit(strip, block, half, pair)` with the elements of a tile in shared memory at two
// neighbouring columns of the accumulators.
template <class Layout, int kStrips, int kBlocks, class Visitor>
__device__ __forceinline__ void for_each_shared_pair(uint32_t tile, const TilePlace& place,
                                                     const Visitor& visit) {
  using E = typename Layout::T;
  constexpr int kSpanBytes = Layout::kSpan * 16;
  const int lane = place.lane;
  // Blocks of 8 columns are reached by an XOR within the permutation's span, rows by an addition.
  const uint32_t base =
      tile + Layout::element_offset(place.row + lane / 4, place.key + 2 * (lane % 4));
#pragma unroll
  for (int i = 0; i < 2 * kStrips; ++i) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int bytes = 8 * block * kSize<E>;
      visit(i / 2, block, i % 2,
            shared_pair<E>((base ^ (bytes % kSpanBytes)) +
                           bytes / kSpanBytes * Layout::kSpanStride + 8 * i * Layout::kRowBytes));
    }
  }
}

// Where an element lies in a tile whose rows are made of spans.
template <class Layout>
__device__ __forceinline__ uint32_t element_address(uint32_t tile, int row, int key) {
  constexpr int kSpanKeys = Layout::kSpan * Layout::kChunkElements;
  return tile + key / kSpanKeys * Layout::kSpanStride +
         Layout::element_offset(row, key % kSpanKeys);
}

// Of elements of 16 bits: a load transposes four 8x8 matrices, keys + 0, + 8 of 8 rows, then of the
// next 8. A lane gives the address of row lane % 8 of matrix lane / 8.
template <class Layout, int kBlocks, class Visitor>
__device__ __forceinline__ void for_each_transposed_pair(uint32_t tile, int row, int key, int lane,
                                                         const Visitor& visit) {
  const uint32_t base =
      element_address<Layout>(tile, row + lane % 8 + lane / 16 * 8, key + lane / 8 % 2 * 8);
#pragma unroll
  for (int block = 0; block < kBlocks; block += 2) {
    uint32_t words[4];
    ptx::ldmatrix_x4_transposed(words, base + 8 * block * Layout::kRowBytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      visit(block + i / 2, i % 2, split_pair<typename Layout::T>(words[i]));
    }
  }
}
// Of others, one by one.
template <class Layout, int kBlocks, class Visitor>
__device__ __forceinline__ void for_each_single_pair(uint32_t tile, int row, int key, int lane,
                                                     const Visitor& visit) {
  using E = typename Layout::T;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at_row = row + 2 * (lane % 4), at_key = key + lane / 4 + 8 * half;
    const uint32_t even = element_address<Layout>(tile, at_row, at_key);
    const uint32_t odd = element_address<Layout>(tile, at_row + 1, at_key);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int bytes = 8 * block * Layout::kRowBytes;
      visit(block, half, uint2{shared_element<E>(even + bytes), shared_element<E>(odd + bytes)});
    }
  }
}

template <class Layout, int kStrips, int kBlocks, class Visitor>
__device__ __forceinline__ void for_each_shared_pair(uint32_t tile, const KeysDownPlace& place,
                                                     const Visitor& visit) {
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip) {
    const int key = place.key + 16 * strip;
    const auto of_strip = [&](int block, int half, uint2 pair) { visit(strip, block, half, pair); };
    if constexpr (kSize<typename Layout::T> == 2) {
      for_each_transposed_pair<Layout, kBlocks>(tile, place.row, key, place.lane, of_strip);
    } else {
      for_each_single_pair<Layout, kBlocks>(tile, place.row, key, place.lane, of_strip);
    }
  }
}

// Likewise of one line of an array in global memory, line `i` of a thread's, whose elements from
// `at` on lie `stride` apart; those past `last` are clamped to it.
template <int kBlocks, class Bits, class Visitor>
__device__ __forceinline__ void for_each_pair_apart(const Bits* line, int at, int last,
                                                    int64_t stride, int i, const Visitor& visit) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const uint32_t x = line[min(at + 8 * block, last) * stride];
    const uint32_t y = line[min(at + 8 * block + 1, last) * stride];
    visit(i / 2, block, i % 2, uint2{x, y});
  }
}

// Likewise of an array [T, S] in global memory, which may be broadcast; `offset` is that of its
// head. Rows and columns past the end are clamped to the last: what they bring is hidden or
// discarded.
template <class E, int kStrips, int kBlocks, class Visitor>
__device__ __forceinline__ void for_each_global_pair(const Problem& problem, const Extent& extent,
                                                     const Tensor& tensor, int64_t offset,
                                                     const TilePlace& place, const Visitor& visit) {
  using Bits = typename E::Bits;
  const int lane = place.lane;
  const Bits* const data = static_cast<const Bits*>(tensor.data) + offset;
  const int row = place.first_row + place.row + lane / 4;
  const int column = place.first_key + place.key + 2 * (lane % 4);
  const int last_row = static_cast<int>(extent.query_length) - 1;
  const int last_column = static_cast<int>(problem.key_length) - 1;
  const bool whole = column - 2 * (lane % 4) + 8 * kBlocks - 1 <= last_column;
  const bool pairs = whole && has_words(problem, tensor, offset, kSize<E>, 2);
#pragma unroll
  for (int i = 0; i < 2 * kStrips; ++i) {
    const Bits* const of_row = data + min(row + 8 * i, last_row) * tensor.row;
    if (pairs) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        visit(i / 2, block, i % 2, global_pair<E>(of_row + column + 8 * block));
      }
    } else {
      for_each_pair_apart<kBlocks>(of_row, column, last_column, tensor.column, i, visit);
    }
  }
}

template <class E, int kStrips, int kBlocks, class Visitor>
__device__ __forceinline__ void for_each_global_pair(const Problem& problem, const Extent& extent,
                                                     const Tensor& tensor, int64_t offset,
                                                     const KeysDownPlace& place,
                                                     const Visitor& visit) {
  using Bits = typename E::Bits;
  const Bits* const data = static_cast<const Bits*>(tensor.data) + offset;
  const int row = place.first_row + place.row + 2 * (place.lane % 4);
  const int key = place.first_key + place.key + place.lane / 4;
  const int last_row = static_cast<int>(extent.query_length) - 1;
  const int last_key = static_cast<int>(problem.key_length) - 1;
#pragma unroll
  for (int i = 0; i < 2 * kStrips; ++i) {
    const Bits* const of_key = data + min(key + 8 * i, last_key) * tensor.column;
    if (tensor.row == 0) {  // the same for all rows
      const uint32_t x = of_key[0];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) visit(i / 2, block, i % 2, uint2{x, x});
    } else {
      for_each_pair_apart<kBlocks>(of_key, row, last_row, tensor.row, i, visit);
    }
  }
}

// Tiles [rows][keys] of bias and mask in shared memory, of one stage; 0: read from global memory.
struct ArrayTiles {
  uint32_t bias;
  uint32_t mask;
};

__device__ __forceinline__ ArrayTiles array_tiles(const ArrayStaging& staging, uint32_t base,
                                                  int stage) {
  const uint32_t bias = base + stage * (staging.bias_bytes + staging.mask_bytes);
  return {staging.bias_bytes != 0 ? bias : 0,
          staging.mask_bytes != 0 ? bias + staging.bias_bytes : 0};
}

// Starts to copy the arrays' tiles from (first_row, first_key) on that are staged, the mask only
// where it is looked at; zeros past the rows that exist and past the keys. All of the block's
// kThreads take part.
template <int kRows, int kKeys, int kThreads>
__device__ __forceinline__ void load_arrays(const Problem& problem, const HeadView& view,
                                            const ArrayTiles& tiles, int checks, int first_row,
                                            int first_key) {
  const int rows = static_cast<int>(view.extent.query_length) - first_row;
  const int keys = static_cast<int>(problem.key_length) - first_key;
  const auto load = [&](auto element, uint32_t tile, const Tensor& tensor, int64_t offset) {
    using E = decltype(element);
    const auto row_bytes = static_cast<uint32_t>(tensor.row) * kSize<E>;
    copy_tile<TileLayout<E, kKeys>, kRows, kThreads>(
        tile, {static_cast<const typename E::Bits*>(tensor.data) + offset + first_key +
                   first_row * tensor.row,
               row_bytes, keys, rows});
  };
  if (tiles.bias != 0 && problem.bias.dtype == DType::kF32) {
    load(F32(), tiles.bias, problem.bias, view.bias);
  } else if (tiles.bias != 0) {  // either type of 16 bits
    load(BF16(), tiles.bias, problem.bias, view.bias);
  }
  if (tiles.mask != 0 && (checks & kCheckMask)) load(Bool(), tiles.mask, problem.mask, view.mask);
}

template <class E, class Tiles, int kStrips, int kBlocks, class Place, class Visitor>
__device__ __forceinline__ void for_each_pair(const Problem& problem, const HeadView& view,
                                              const Tensor& tensor, int64_t offset, uint32_t tile,
                                              const Place& place, const Visitor& visit) {
  if (tile != 0) {
    for_each_shared_pair<typename Tiles::template Layout<E>, kStrips, kBlocks>(tile, place, visit);
  } else {
    for_each_global_pair<E, kStrips, kBlocks>(problem, view.extent, tensor, offset, place, visit);
  }
}

// Logits s * factor plus the bias. A bias of minus infinity hides, whatever the logit.
template <class E, class Tiles, class Place, int kStrips, int kBlocks>
__device__ __forceinline__ void add_bias_of(const Problem& problem, const HeadView& view,
                                            uint32_t tile, const Place& place, float factor,
                                            float (&s)[kStrips][kBlocks][4]) {
  const auto add = [factor](float& x, float bias) {
    x = bias == minus_infinity() ? bias : x * factor + bias;
  };
  for_each_pair<E, Tiles, kStrips, kBlocks>(problem, view, problem.bias, view.bias, tile, place,
                                            [&](int strip, int block, int half, uint2 pair) {
                                              add(s[strip][block][2 * half], float_of(E(), pair.x));
                                              add(s[strip][block][2 * half + 1],
                                                  float_of(E(), pair.y));
                                            });
}

template <class Tiles, class Place, int kStrips, int kBlocks>
__device__ __forceinline__ void add_bias(const Problem& problem, const HeadView& view,
                                         uint32_t tile, const Place& place, float factor,
                                         float (&s)[kStrips][kBlocks][4]) {
  switch (problem.bias.dtype) {
    case DType::kBF16:
      return add_bias_of<BF16, Tiles>(problem, view, tile, place, factor, s);
    case DType::kF16:
      return add_bias_of<F16, Tiles>(problem, view, tile, place, factor, s);
    default:
      return add_bias_of<F32, Tiles>(problem, view, tile, place, factor, s);
  }
}

// Adds the gradients of logits to those of the bias, f32 and broadcast as the bias is. Rows or
// columns of the accumulators that share an element are added up within the warp first.
template <class Place, int kStrips, int kBlocks>
__device__ __forceinline__ void add_bias_cotangent(const Problem& problem, const Tensor& cotangent,
                                                   const HeadView& view, const Place& place,
                                                   const float (&g)[kStrips][kBlocks][4]) {
  const int lane = threadIdx.x & 31;
  float* const to = static_cast<float*>(cotangent.data) + batch_offset(cotangent, view.index) +
                    view.head * cotangent.head;
  const auto warp_sum = [](float x, int from, int to) {
    for (int mask = from; mask < to; mask *= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
    return x;
  };
  const auto [down, across] =
      directions(place, cotangent, view.extent.query_length, view.extent.key_length);
  const int64_t step = Place::kKeysDown ? across.stride : 1;  // where it is not 0
  if (down.stride == 0) {
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
        const int64_t column = across.first + 8 * block + 2 * (lane % 4) + odd;
        if (across.stride != 0 && lane < 4 && column < across.end) {
          atomicAdd(to + column * step, sum);
        }
      }
    }
    if (across.stride == 0) {
      whole = warp_sum(whole, 1, 4);
      if (lane == 0) atomicAdd(to, whole);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 2 * kStrips; ++i) {
    const int64_t at_row = down.first + 16 * (i / 2) + lane / 4 + 8 * (i % 2);
    float* const of_row = to + at_row * down.stride;
    if (across.stride == 0) {
      float sum = 0.f;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        sum += g[i / 2][block][2 * (i % 2)] + g[i / 2][block][2 * (i % 2) + 1];
      }
      sum = warp_sum(sum, 1, 4);  // over the lanes that hold the same row
      if (lane % 4 == 0 && at_row < down.end) atomicAdd(of_row, sum);
      continue;
    }
    if (at_row >= down.end) continue;
    // Else rows are not aligned to two floats, or neighbours lie apart.
    const bool pairs = !Place::kKeysDown && problem.key_length % 2 == 0;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int64_t column = across.first + 8 * block + 2 * (lane % 4);
      const float x = g[i / 2][block][2 * (i % 2)], y = g[i / 2][block][2 * (i % 2) + 1];
      if (column >= across.end) continue;  // past it gradients are 0
      if (pairs) {
        ptx::add_global_2(of_row + column, x, y);
      } else {
        atomicAdd(of_row + column * step, x);
        if (column + 1 < across.end) atomicAdd(of_row + (column + 1) * step, y);
      }
    }
  }
}

// Writes accumulators with keys as rows to an array whose keys are neighbours: 8x8 matrices are
// transposed, so that a quad has 16 keys of a row, and a thread four of them.
template <class E, int kStrips, int kBlocks>
__device__ __forceinline__ void store_keys_down(const Direction& keys, const Direction& rows,
                                                typename E::Bits* to,
                                                const float (&g)[kStrips][kBlocks][4]) {
  const int lane = lane_now(), quad = lane % 4;
  // Lanes that have keys 4 * quad, + 1 and the next two, of the first eight keys or the second.
  const int from = (lane & ~3) + 2 * quad % 4;
  const int64_t row = rows.first + lane / 4;
  const int rows_left = static_cast<int>(min_of(rows.end - row, 8 * kBlocks));
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip) {
    const int64_t key = keys.first + 16 * strip + 4 * quad;
    auto* at = to + row * rows.stride + key;
    const int left = key < keys.end ? rows_left : 0;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block, at += 8 * rows.stride) {
      const float (&x)[4] = g[strip][block];
      const uint32_t first = ptx::transpose_8x8(pack(E(), x[0], x[1]));
      const uint32_t second = ptx::transpose_8x8(pack(E(), x[2], x[3]));
      const auto word_of = [&](int source) {
        const uint32_t a = __shfl_sync(0xffffffffu, first, source);
        const uint32_t b = __shfl_sync(0xffffffffu, second, source);
        return quad < 2 ? a : b;
      };
      const uint2 four = {word_of(from), word_of(from + 1)};
      if (8 * block < left) *reinterpret_cast<uint2*>(at) = four;
    }
  }
}

// Writes the gradients of logits where they are the gradients of a bias that is not broadcast.
template <class E, class Place, int kStrips, int kBlocks>
__device__ __forceinline__ void store_bias_cotangent_as(const Problem& problem,
                                                        const Tensor& cotangent,
                                                        const HeadView& view, const Place& place,
                                                        const float (&g)[kStrips][kBlocks][4]) {
  const int lane = threadIdx.x & 31;
  const int64_t offset = batch_offset(cotangent, view.index) + view.head * cotangent.head;
  const bool pairs = !Place::kKeysDown && has_words(problem, cotangent, offset, kSize<E>, 2);
  const auto [down, across] =
      directions(place, cotangent, view.extent.query_length, problem.key_length);
  if constexpr (Place::kKeysDown && kSize<E> == 2) {
    if (has_words(problem, cotangent, offset, kSize<E>, 4)) {
      auto* const to = static_cast<typename E::Bits*>(cotangent.data) + offset;
      return store_keys_down<E>(down, across, to, g);
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * kStrips; ++i) {
    const int64_t at_row = down.first + 16 * (i / 2) + lane / 4 + 8 * (i % 2);
    if (at_row >= down.end) continue;
    auto* const to = static_cast<typename E::Bits*>(cotangent.data) + offset + at_row * down.stride;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int64_t column = across.first + 8 * block + 2 * (lane % 4);
      const float x = g[i / 2][block][2 * (i % 2)], y = g[i / 2][block][2 * (i % 2) + 1];
      if (column >= across.end) continue;
      const bool both = column + 1 < across.end;
      if constexpr (Place::kKeysDown) {
        store_element(E(), to + column * across.stride, x);
        if (both) store_element(E(), to + (column + 1) * across.stride, y);
      } else {
        store_pair(E(), to + column, x, y, both, pairs);
      }
    }
  }
}

template <class Place, int kStrips, int kBlocks>
__device__ __forceinline__ void store_bias_cotangent(const Problem& problem,
                                                     const Tensor& cotangent, const HeadView& view,
                                                     const Place& place,
                                                     const float (&g)[kStrips][kBlocks][4]) {
  switch (cotangent.dtype) {
    case DType::kBF16:
      return store_bias_cotangent_as<BF16>(problem, cotangent, view, place, g);
    case DType::kF16:
      return store_bias_cotangent_as<F16>(problem, cotangent, view, place, g);
    default:
      return store_bias_cotangent_as<F32>(problem, cotangent, view, place, g);
  }
}

template <class Tiles, class Place, int kStrips, int kBlocks>
__device__ __forceinline__ void hide_masked(const Problem& problem, const HeadView& view,
                                            uint32_t tile, const Place& place,
                                            float (&s)[kStrips][kBlocks][4]) {
  for_each_pair<Bool, Tiles, kStrips, kBlocks>(problem, view, problem.mask, view.mask, tile, place,
                                               [&](int strip, int block, int half, uint2 pair) {
                                                 if (pair.x == 0)
                                                   s[strip][block][2 * half] = minus_infinity();
                                                 if (pair.y == 0)
                                                   s[strip][block][2 * half + 1] = minus_infinity();
                                               });
}

// Segment ids from a position on; those past the last count as it.
struct SegmentIds {
  const int32_t* ids;
  int first, last;

  __device__ __forceinline__ int32_t at(int i) const { return ids[min(first + i, last)]; }
};

template <class Place, int kStrips, int kBlocks>
__device__ __forceinline__ void hide_other_segments(const Problem& problem, const HeadView& view,
                                                    const Place& place,
                                                    float (&s)[kStrips][kBlocks][4]) {
  const int lane = lane_now();
  const auto ids_of = [](const Tensor& of, int64_t offset, int first, int64_t length) {
    return SegmentIds{static_cast<const int32_t*>(of.data) + offset, first,
                      static_cast<int>(length) - 1};
  };
  const SegmentIds rows = ids_of(problem.query_segment_ids, view.query_ids,
                                 place.first_row + place.row, problem.query_length);
  const SegmentIds keys = ids_of(problem.key_value_segment_ids, view.key_ids,
                                 place.first_key + place.key, problem.key_length);
  const SegmentIds& down = Place::kKeysDown ? keys : rows;
  const SegmentIds& across = Place::kKeysDown ? rows : keys;
  int32_t row_ids[2 * kStrips];
#pragma unroll
  for (int i = 0; i < 2 * kStrips; ++i) row_ids[i] = down.at(lane / 4 + 8 * i);
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int32_t id = across.at(8 * block + 2 * (lane % 4) + odd);
#pragma unroll
      for (int i = 0; i < 2 * kStrips; ++i) {
        if (row_ids[i] != id) s[i / 2][block][2 * (i % 2) + odd] = minus_infinity();
      }
    }
  }
}

// A thread's elements of a block, as one value of attention/logits.h.
struct FourFloats {
  float x[4];
};
__device__ __forceinline__ FourFloats operator*(const FourFloats& a, const FourFloats& b) {
  return {a.x[0] * b.x[0], a.x[1] * b.x[1], a.x[2] * b.x[2], a.x[3] * b.x[3]};
}
__device__ __forceinline__ FourFloats operator-(float a, const FourFloats& b) {
  return {a - b.x[0], a - b.x[1], a - b.x[2], a - b.x[3]};
}

// tanh(x * factor / (2 log2 e)) = 1 - 2 / (1 + 2^(x * factor)) to about 1e-7, absolutely.
struct Tanh {
  float factor;

  __device__ __forceinline__ float operator()(float x) const {
    return 1.f - 2.f * ptx::reciprocal(1.f + ptx::ex2(factor * x));
  }
};

// The same of four, to about 1e-6. Special functions are slow, so that the four share a reciprocal:
// that of all their denominators' product, of which each is multiplied by the other three. Beyond
// 2^30 the result is 1; a NaN must not get into the product.
struct SharedTanh {
  float factor;

  __device__ __forceinline__ FourFloats operator()(const FourFloats& x) const {
    float d[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = 1.f + ptx::ex2(fminf(factor * x.x[i], 30.f));
    const float lower = d[0] * d[1], upper = d[2] * d[3];
    const float twice = -2.f * ptx::reciprocal(lower * upper);
    const float of_lower = twice * upper, of_upper = twice * lower;
    const float quotients[4] = {of_lower * d[1], of_lower * d[0], of_upper * d[3], of_upper * d[2]};
    FourFloats t;
#pragma unroll
    for (int i = 0; i < 4; ++i) t.x[i] = x.x[i] == x.x[i] ? 1.f + quotients[i] : x.x[i];
    return t;
  }
};

// Takes products to the tanh of logits in units of the cap.
__device__ __forceinline__ float tanh_factor(const Problem& problem, const HeadView& view) {
  return 2.f * kLog2E * view.scale / static_cast<float>(problem.soft_cap);
}

__device__ __forceinline__ float soft_cap_slope(const Problem& problem, const HeadView& view,
                                                float product) {
  return soft_capped(product, Tanh{tanh_factor(problem, view)}).slope;
}

// Products to logits in units of the cap.
template <class T, int kStrips, int kBlocks, class OnSlope>
__device__ __forceinline__ void apply_soft_cap(float factor, const OnSlope& on_slope,
                                               float (&s)[kStrips][kBlocks][4]) {
#pragma unroll
  for (int i = 0; i < kStrips * kBlocks; ++i) {
    const int strip = i / kBlocks, block = i % kBlocks;
    float (&x)[4] = s[strip][block];
    if constexpr (kIsFloat<T>) {
#pragma unroll
      for (int element = 0; element < 4; ++element) {
        const auto capped = soft_capped(x[element], Tanh{factor});
        on_slope(strip, block, element, capped.slope);
        x[element] = capped.in_caps;
      }
    } else {
      const auto capped = soft_capped(FourFloats{x[0], x[1], x[2], x[3]}, SharedTanh{factor});
#pragma unroll
      for (int element = 0; element < 4; ++element) {
        on_slope(strip, block, element, capped.slope.x[element]);
        x[element] = capped.in_caps.x[element];
      }
    }
  }
}

// How logits are held: in units of `nats`. `factor` takes products, or what the soft cap made of
// them, to this unit. Where nothing is added to them, that is at most a change of sign. Floats are
// held in nats: they must not differ from the statistics by a rounding.
struct LogitUnit {
  float nats;
  float factor;
};

template <class T, class Policy>
__device__ __forceinline__ LogitUnit logit_unit(const Problem& problem, const HeadView& view) {
  float scale = view.scale;
  bool in_nats = kIsFloat<T>;
  if constexpr (Policy::kEverything) {
    if (problem.soft_cap != 0) scale = static_cast<float>(problem.soft_cap);
    in_nats |= problem.bias.data != nullptr;
  }
  if (in_nats) return {1.f, scale};
  return scale == 0.f ? LogitUnit{1.f, 0.f} : LogitUnit{fabsf(scale), copysignf(1.f, scale)};
}

template <class T, class Policy>
__device__ __forceinline__ Exponent<T> exponent_of(const Problem& problem, const HeadView& view) {
  return {logit_unit<T, Policy>(problem, view).nats * kLog2E};
}

// All that takes a head's products to logits.
struct Scaling {
  LogitUnit unit;
  float tanh_factor;  // see above
  bool caps;
};
template <class T, class Policy>
__device__ __forceinline__ Scaling scaling_of(const Problem& problem, const HeadView& view) {
  const bool caps = Policy::kEverything && problem.soft_cap != 0;
  return {logit_unit<T, Policy>(problem, view), caps ? tanh_factor(problem, view) : 0.f, caps};
}

// A view that has it ready.
struct ScaledView : HeadView {
  Scaling scaling;
};
template <class T, class Policy>
__device__ __forceinline__ Scaling scaling_of(const Problem&, const ScaledView& view) {
  return view.scaling;
}

// The head's sink, a logit; minus infinity where there is none.
template <class Policy>
__device__ __forceinline__ float sink_of(const Problem& problem, const BatchIndex& index,
                                         int64_t head) {
  if (!Policy::kEverything || problem.sinks.data == nullptr) return minus_infinity();
  return static_cast<const float*>(
      problem.sinks.data)[batch_offset(problem.sinks, index) + head * problem.sinks.head];
}

// Products to logits: soft_cap(scale * q.k) + bias, minus infinity where hidden.
// `on_slope(strip, block, element, slope)` is told the slope of the soft cap. With keys as rows of
// the accumulators, what is outside the ranges is left to the caller to hide.
template <class T, class Policy, class Tiles, class View, class Place, int kStrips, int kBlocks,
          class OnSlope>
__device__ __forceinline__ void apply_rules(const Problem& problem, const View& view, int checks,
                                            const ArrayTiles& tiles, const Place& place,
                                            const OnSlope& on_slope,
                                            float (&s)[kStrips][kBlocks][4]) {
  const Scaling scaling = scaling_of<T, Policy>(problem, view);
  if (Policy::kEverything && scaling.caps) apply_soft_cap<T>(scaling.tanh_factor, on_slope, s);
  const float factor = scaling.unit.factor;
  if (Policy::kEverything && problem.bias.data != nullptr) {
    add_bias<Tiles>(problem, view, tiles.bias, place, factor, s);
  } else if (factor != 1.f) {
#pragma unroll
    for (int i = 0; i < kStrips * kBlocks * 4; ++i) {
      s[i / (4 * kBlocks)][i / 4 % kBlocks][i % 4] *= factor;
    }
  }
  if ((checks & (kCheckRanges | kCheckSegments | kCheckMask)) == 0) return;  // one jump, not three
  if constexpr (!Place::kKeysDown) {
    const int row = place.first_row + place.row, key = place.first_key + place.key;
    if (checks & kCheckRanges) hide_outside(view.extent, row, key, s);
  }
  if constexpr (Policy::kEverything) {
    if (checks & kCheckSegments) hide_other_segments(problem, view, place, s);
    if (checks & kCheckMask) hide_masked<Tiles>(problem, view, tiles.mask, place, s);
  }
}

// Asks the L2 cache for the part of an array [T, S] that a tile will read. kThreads threads in
// sequence call it, all of a block or of a warp.
template <int kRows, int kKeys, int kThreads>
__device__ __forceinline__ void prefetch_tile(const Problem& problem, const Tensor& tensor,
                                              int64_t offset, int size, int64_t first_row,
                                              int64_t first_key) {
  if (tensor.data == nullptr || tensor.row == 0 || tensor.column == 0) return;
  const int line = 128 / size;  // elements
  for (int row = threadIdx.x % kThreads; row < kRows; row += kThreads) {
    if (first_row + row >= problem.query_length) break;
    const char* const from = static_cast<const char*>(tensor.data) +
                             (offset + (first_row + row) * tensor.row + first_key) * size;
    for (int column = 0; column < kKeys && first_key + column < problem.key_length;
         column += line) {
      ptx::prefetch_l2(from + column * size);
    }
  }
}

// What apply_rules will read of a tile from global memory, ahead of time.
template <int kRows, int kKeys, int kThreads>
__device__ __forceinline__ void prefetch_rules(const Problem& problem, const HeadView& view,
                                               const ArrayStaging& staging, int checks,
                                               int64_t first_row, int64_t first_key) {
  if (problem.bias.data != nullptr && staging.bias_bytes == 0) {
    const int size = problem.bias.dtype == DType::kF32 ? 4 : 2;
    prefetch_tile<kRows, kKeys, kThreads>(problem, problem.bias, view.bias, size, first_row,
                                          first_key);
  }
  if ((checks & kCheckMask) && staging.mask_bytes == 0) {
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

// What one call of Philox draws (attention/philox.h): that which decides of (row, key) and seven
// others.
__device__ __forceinline__ PhiloxWords<uint32_t> draws_at(const HeadView& view, int row, int key) {
  const uint32_t philox_key[2] = {view.stream[0], view.stream[1]};
  return philox<uint32_t>(
      {{dropout_row_word(row), dropout_column_word(key), view.stream[2], view.stream[3]}},
      philox_key, MultiplyWide());
}

// Calls `visit(i, kept)` with what dropout does to a thread's eight elements of a 16x16 block from
// (row, key) on, which one call decides: elements i % 4 of its two blocks of 8 columns.
template <class Visitor>
__device__ __forceinline__ void for_each_draw(const Problem& problem, const HeadView& view, int row,
                                              int key, const Visitor& visit) {
  const int lane = lane_now();
  const PhiloxWords<uint32_t> draws = draws_at(view, row + lane / 4, key + 2 * (lane % 4));
  const auto threshold = static_cast<uint32_t>(problem.dropout_threshold);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    visit(i, dropout_keeps(draws, dropout_lane(8 * (i / 2 % 2), 8 * (i / 4) + i % 2), threshold));
  }
}

// The same of accumulators whose rows are keys: bits 8 * i + 4 * (block % 2) + element for its
// kCount 16x16 blocks from row + 16 * i on. A call decides of two neighbouring keys, which are two
// threads', and a thread has two neighbouring rows: each of the two makes the call for one row.
template <int kCount>
__device__ __forceinline__ uint32_t draw_keys_down(const Problem& problem, const HeadView& view,
                                                   int row, int key) {
  const int lane = lane_now();
  const int odd = lane / 4 % 2;  // the key, and the row that is drawn for
  const auto threshold = static_cast<uint32_t>(problem.dropout_threshold);
  uint32_t mine = 0;  // a bit for each of dropout_lane's
#pragma unroll 2      // registers are short
  for (int i = 0; i < kCount; ++i) {
    const PhiloxWords<uint32_t> draws =
        draws_at(view, row + 16 * i + 2 * (lane % 4) + odd, key + lane / 4);
#pragma unroll
    for (int bit = 0; bit < 8; ++bit) {
      if (dropout_keeps(draws, bit, threshold)) mine |= 1u << (8 * i + bit);
    }
  }
  const uint32_t other = __shfl_xor_sync(0xffffffffu, mine, 4);
  // Of both the key's bits, 4 * (row / 8) + 2 * (key / 8) + {0, 2, 4, 6}.
  const uint32_t of_mine = mine >> odd & 0x55555555u, of_other = other >> odd & 0x55555555u;
  return odd ? of_mine << 1 | of_other : of_mine | of_other << 1;
}

// Which of a thread's elements dropout keeps.
template <int kStrips, int kBlocks>
struct KeptBits {
  uint32_t word[kStrips][(kBlocks + 7) / 8];

  // For the accumulators from (row, key) on.
  __device__ __forceinline__ void draw(const Problem& problem, const HeadView& view, int row,
                                       int key) {
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
      for (int i = 0; i < (kBlocks + 7) / 8; ++i) word[strip][i] = 0;
#pragma unroll
      for (int pair = 0; pair < kBlocks / 2; ++pair) {
        for_each_draw(problem, view, row + 16 * strip, key + 16 * pair, [&](int i, bool kept) {
          if (kept) word[strip][pair / 4] |= 1u << (pair % 4 * 8 + i);
        });
      }
    }
  }
  // For those with keys as rows.
  __device__ __forceinline__ void draw(const Problem& problem, const HeadView& view,
                                       const KeysDownPlace& place) {
    constexpr int kPairs = kBlocks / 2 < 4 ? kBlocks / 2 : 4;  // a word
    static_assert(kBlocks / 2 % kPairs == 0);
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
      for (int i = 0; i < kBlocks / 2 / kPairs; ++i) {
        word[strip][i] =
            draw_keys_down<kPairs>(problem, view, place.first_row + place.row + 16 * kPairs * i,
                                   place.first_key + place.key + 16 * strip);
      }
    }
  }
  __device__ __forceinline__ bool kept(int strip, int block, int element) const {
    return word[strip][block / 8] >> (block % 8 * 4 + element) & 1;
  }
};

}  // namespace jaxflash::cuda::sm80
