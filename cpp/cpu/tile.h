// Tiles of rows and keys: loading them, and the logits of one against the other.
//
// A tile of logits is stored transposed, [key][row], with the rows along the lanes of a vector:
// maxima and sums over keys are then plain vector operations, and neither key nor value has to be
// transposed for either product.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention/logits.h"
#include "attention/philox.h"
#include "attention/problem.h"
#include "attention/visibility.h"
#include "cpu/convert.h"
#include "cpu/launch.h"
#include "cpu/scratch.h"
#include "cpu/vector.h"

namespace jaxflash::cpu::JAXFLASH_ISA {

// A [64][head dim] tile of rows and a [kTileKeys][64] tile of logits stay in L1 and L2; both are
// multiples of every vector width and of the 16x16 blocks of dropout.
inline constexpr int64_t kTileRows = 64;

JAXFLASH_INLINE int64_t tiles_of(int64_t length, int64_t tile) {
  return (length + tile - 1) / tile;
}

template <class T>
JAXFLASH_INLINE int64_t padded(int64_t count) {
  return tiles_of(count, kLanes<T>) * kLanes<T>;
}

template <class T>
JAXFLASH_INLINE T infinity() {
  return static_cast<T>(__builtin_inf());
}

// Rows [first, first + rows) of one (batch, head), and what they may see.
template <class T>
struct RowTile {
  int64_t b = 0;
  int64_t head = 0;
  int64_t first = 0;
  int64_t rows = 0;   // that exist: before the query length
  int64_t width = 0;  // lanes in use: rows rounded up to whole vectors, so 0 if none exist
  Extent extent = {};
  Range any = {};                 // keys that some row has in its range
  SegmentBounds segments = {};    // of the rows
  Int<T>* key_begin = nullptr;    // [kTileRows] the range of keys of each row, empty past the rows
  Int<T>* key_end = nullptr;      // [kTileRows]
  Int<T>* segment_ids = nullptr;  // [kTileRows]

  explicit RowTile(Scratch& scratch)
      : key_begin(scratch.take<Int<T>>(kTileRows)),
        key_end(scratch.take<Int<T>>(kTileRows)),
        segment_ids(scratch.take<Int<T>>(kTileRows)) {}

  Range span() const { return {first, first + rows}; }
};

inline SegmentBounds bounds_of(const int32_t* ids, int64_t count) {
  SegmentBounds bounds = {ids[0], ids[0]};
  for (int64_t i = 1; i < count; ++i) {
    bounds.least = ids[i] < bounds.least ? ids[i] : bounds.least;
    bounds.greatest = ids[i] > bounds.greatest ? ids[i] : bounds.greatest;
  }
  return bounds;
}

inline const int32_t* segment_row(const Problem& problem, const Tensor& ids, int64_t b) {
  return static_cast<const int32_t*>(ids.data) + batch_offset(problem, ids, b);
}

template <class T>
inline void place(const Problem& problem, int64_t b, int64_t head, int64_t first,
                  RowTile<T>& tile) {
  tile.b = b;
  tile.head = head;
  tile.first = first;
  tile.extent = extent_of(problem, b);
  tile.rows = clamp_to(tile.extent.query_length - first, 0, kTileRows);
  tile.width = padded<T>(tile.rows);
  if (tile.rows == 0) {
    tile.any = {0, 0};
    return;
  }
  tile.any = keys_of_any_row(tile.extent, tile.span());
  for (int64_t r = 0; r < tile.width; ++r) {
    const Range keys = keys_of_row(tile.extent, first + r);
    tile.key_begin[r] = static_cast<Int<T>>(keys.begin);
    tile.key_end[r] = static_cast<Int<T>>(keys.end);
  }
  if (problem.query_segment_ids.data != nullptr) {
    const int32_t* ids = segment_row(problem, problem.query_segment_ids, b) + first;
    tile.segments = bounds_of(ids, tile.rows);
    for (int64_t r = 0; r < tile.width; ++r) tile.segment_ids[r] = ids[min_of(r, tile.rows - 1)];
  }
}

// Elements of `tensor` for (b, head) at `row`, column 0.
JAXFLASH_INLINE int64_t row_offset(const Problem& problem, const Tensor& tensor, int64_t b,
                                   int64_t head, int64_t row) {
  return batch_offset(problem, tensor, b) + head * tensor.head + row * tensor.row;
}

// Copies rows of `columns` channels to [count][stride], with zeros up to the stride.
template <class T>
inline void load_rows(const Problem& problem, const Tensor& tensor, int64_t b, int64_t head,
                      Range rows, int64_t columns, T* to, int64_t stride) {
  int64_t offset = row_offset(problem, tensor, b, head, rows.begin);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    load_row(tensor.dtype, tensor.data, offset, columns, to);
    for (int64_t c = columns; c < stride; ++c) to[c] = 0;
    offset += tensor.row;
    to += stride;
  }
}

// Loads the rows of a tile, with rows of zeros up to its width.
template <class T>
inline void load_tile(const Problem& problem, const Tensor& tensor, const RowTile<T>& tile,
                      int64_t columns, T* to) {
  const int64_t stride = padded<T>(columns);
  load_rows(problem, tensor, tile.b, tile.head, tile.span(), columns, to, stride);
  std::memset(to + tile.rows * stride, 0, (tile.width - tile.rows) * stride * sizeof(T));
}

// One statistic of each row: [*B, T, N]; `past` in the lanes past the rows.
template <class T>
inline void load_statistic(const Problem& problem, const Tensor& tensor, const RowTile<T>& tile,
                           T past, T* to) {
  const T* from = static_cast<const T*>(tensor.data) +
                  row_offset(problem, tensor, tile.b, tile.head, tile.first);
  for (int64_t r = 0; r < tile.width; ++r) to[r] = r < tile.rows ? from[r * tensor.row] : past;
}

// The rules by which the products q.k of one tile become logits.
template <class T>
struct LogitRules {
  T scale = 1;
  T soft_cap = 0;                    // 0: none
  bool ranges = false;               // some keys are outside some row's range
  const int32_t* key_ids = nullptr;  // segment ids of the tile's keys, where they must be compared
  const T* addend = nullptr;         // [key][kTileRows]: bias, and -inf where the mask hides
  T* slope = nullptr;                // out, [key][kTileRows]: d capped / d scaled, with a soft cap
};

// What the mask shows of a tile.
template <class T>
inline TileVisibility mask_visibility(const Problem& problem, const RowTile<T>& tile, Range keys) {
  const Tensor& mask = problem.mask;
  const auto* row = static_cast<const uint8_t*>(mask.data) +
                    row_offset(problem, mask, tile.b, tile.head, tile.first) +
                    keys.begin * mask.column;
  const int64_t rows = mask.row == 0 ? 1 : tile.rows;
  const int64_t columns = mask.column == 0 ? 1 : keys.end - keys.begin;
  int64_t visible = 0;
  for (int64_t r = 0; r < rows; ++r, row += mask.row) {
    for (int64_t c = 0; c < columns; ++c) visible += row[c] != 0;
  }
  if (visible == 0) return TileVisibility::kNone;
  return visible == rows * columns ? TileVisibility::kAll : TileVisibility::kSome;
}

// Writes bias and mask of a tile as one addend, [key][kTileRows]. `rows` is scratch for
// [kTileRows][kTileKeys].
template <class T>
inline void load_addend(const Problem& problem, const RowTile<T>& tile, Range keys, bool masked,
                        T* rows, T* addend) {
  const int64_t columns = keys.end - keys.begin;
  const Tensor& bias = problem.bias;
  const Tensor& mask = problem.mask;
  for (int64_t r = 0; r < tile.rows; ++r) {
    T* const to = rows + r * kTileKeys;
    std::memset(to, 0, kTileKeys * sizeof(T));
    if (bias.data != nullptr) {
      const int64_t offset = row_offset(problem, bias, tile.b, tile.head, tile.first + r);
      if (bias.column == 0) {
        load_row(bias.dtype, bias.data, offset, 1, to);
        for (int64_t c = 1; c < columns; ++c) to[c] = to[0];
      } else {
        load_row(bias.dtype, bias.data, offset + keys.begin, columns, to);
      }
    }
    if (masked) {
      const auto* visible = static_cast<const uint8_t*>(mask.data) +
                            row_offset(problem, mask, tile.b, tile.head, tile.first + r) +
                            keys.begin * mask.column;
      for (int64_t c = 0; c < columns; ++c) {
        to[c] = visible[c * mask.column] != 0 ? to[c] : -infinity<T>();
      }
    }
  }
  std::memset(rows + tile.rows * kTileKeys, 0, (tile.width - tile.rows) * kTileKeys * sizeof(T));
  transpose(rows, kTileKeys, tile.width, padded<T>(columns), addend, kTileRows);
}

// Scratch for the rules of a tile.
template <class T>
struct RuleArrays {
  T* addend;
  T* addend_rows;
  T* slope;

  RuleArrays(const Problem& problem, Scratch& scratch)
      : addend(scratch.take<T>(has_addend(problem) ? kTileRows * kTileKeys : 0)),
        addend_rows(scratch.take<T>(has_addend(problem) ? kTileRows * kTileKeys : 0)),
        slope(scratch.take<T>(problem.soft_cap != 0 ? kTileRows * kTileKeys : 0)) {}

  static bool has_addend(const Problem& problem) {
    return problem.bias.data != nullptr || problem.mask.data != nullptr;
  }
};

// Finds what a tile needs; false if no row of it sees any of the keys.
template <class T>
inline bool find_rules(const Problem& problem, const RowTile<T>& tile, Range keys,
                       const RuleArrays<T>& arrays, LogitRules<T>& rules) {
  if (tile.rows == 0) return false;
  const TileVisibility ranges = tile_visibility(tile.extent, tile.span(), keys);
  if (ranges == TileVisibility::kNone) return false;
  rules.ranges = ranges == TileVisibility::kSome;

  rules.key_ids = nullptr;
  if (problem.key_value_segment_ids.data != nullptr) {
    const int32_t* ids = segment_row(problem, problem.key_value_segment_ids, tile.b) + keys.begin;
    const TileVisibility segments =
        segment_visibility(tile.segments, bounds_of(ids, keys.end - keys.begin));
    if (segments == TileVisibility::kNone) return false;
    if (segments == TileVisibility::kSome) rules.key_ids = ids;
  }

  bool masked = false;
  if (problem.mask.data != nullptr) {
    const TileVisibility visibility = mask_visibility(problem, tile, keys);
    if (visibility == TileVisibility::kNone) return false;
    masked = visibility == TileVisibility::kSome;
  }
  rules.addend = nullptr;
  if (masked || problem.bias.data != nullptr) {
    load_addend(problem, tile, keys, masked, arrays.addend_rows, arrays.addend);
    rules.addend = arrays.addend;
  }

  rules.scale = batch_value<T>(problem, problem.scale, tile.b, T(1));
  rules.soft_cap = static_cast<T>(problem.soft_cap);
  rules.slope = arrays.slope;
  return true;
}

// The logits of one vector of rows against one key. `at` is the element in a [key][kTileRows] tile.
template <class T>
JAXFLASH_INLINE Vec<T> logit(const LogitRules<T>& rules, const RowTile<T>& tile, int64_t lane,
                             int64_t key, int64_t at, Int<T> position, Vec<T> product) {
  Vec<T> s = product * rules.scale;
  if (rules.soft_cap != 0) {
    const auto capped = soft_capped(s / rules.soft_cap, Tanh<T>());
    s = capped.in_caps * rules.soft_cap;
    store(rules.slope + at, capped.slope);
  }
  if (rules.addend != nullptr) {
    const Vec<T> addend = load(rules.addend + at);
    s = addend == -infinity<T>() ? addend : s + addend;
  }
  if (rules.ranges) {
    const IntVec<T> seen =
        (load(tile.key_begin + lane) <= position) & (load(tile.key_end + lane) > position);
    s = seen ? s : broadcast(-infinity<T>());
  }
  if (rules.key_ids != nullptr) {
    const IntVec<T> seen = load(tile.segment_ids + lane) == Int<T>(rules.key_ids[key]);
    s = seen ? s : broadcast(-infinity<T>());
  }
  return s;
}

// Turns the products of a tile, [key][kTileRows], into logits in place.
template <class T>
inline void apply_rules(const LogitRules<T>& rules, const RowTile<T>& tile, Range keys, T* tile_s) {
  const int64_t count = keys.end - keys.begin;
  for (int64_t lane = 0; lane < tile.width; lane += kLanes<T>) {
    for (int64_t key = 0; key < count; ++key) {
      const int64_t at = key * kTileRows + lane;
      const auto position = static_cast<Int<T>>(keys.begin + key);
      store(tile_s + at, logit(rules, tile, lane, key, at, position, load(tile_s + at)));
    }
  }
}

// tile *= factors, both [key][kTileRows].
template <class T>
inline void multiply_tile(int64_t key_count, int64_t width, const T* factors, T* tile) {
  for (int64_t key = 0; key < key_count; ++key) {
    for (int64_t lane = 0; lane < width; lane += kLanes<T>) {
      T* const at = tile + key * kTileRows + lane;
      store(at, load(at) * load(factors + key * kTileRows + lane));
    }
  }
}

// Eight lanes: the rows that eight Philox calls share a column word with (attention/philox.h).
typedef uint32_t RowWords __attribute__((vector_size(32)));
typedef uint64_t WideRowWords __attribute__((vector_size(64)));

struct MultiplyWide {
  JAXFLASH_INLINE WideProduct<RowWords> operator()(RowWords a, uint32_t b) const {
    const WideRowWords product =
        __builtin_convertvector(a, WideRowWords) * static_cast<uint64_t>(b);
    return {__builtin_convertvector(product >> 32, RowWords), a * b};
  }
};

// Writes what the probabilities of a tile are multiplied by, [key][kTileRows]: 0 where dropped.
template <class T>
inline void dropout_factors(const Problem& problem, const RowTile<T>& tile, Range keys,
                            T* factors) {
  const auto* words = static_cast<const uint32_t*>(problem.dropout_stream.data) +
                      batch_offset(problem, problem.dropout_stream, tile.b) +
                      tile.head * problem.dropout_stream.head;
  const uint32_t key[2] = {words[0], words[1]};
  const auto threshold = static_cast<uint32_t>(problem.dropout_threshold);
  const T keep = static_cast<T>(dropout_keep_scale(problem.dropout_threshold));
  const int64_t count = keys.end - keys.begin;
  for (int64_t row = 0; row < tile.rows; row += 16) {
    RowWords row_word;
    for (int r = 0; r < 8; ++r) row_word[r] = dropout_row_word(tile.first + row + r);
    for (int64_t pair = 0; pair < count; pair += (pair % 8 == 6) ? 10 : 2) {
      PhiloxWords<RowWords> draws = {{row_word, RowWords{} + dropout_column_word(keys.begin + pair),
                                      RowWords{} + words[2], RowWords{} + words[3]}};
      draws = philox(draws, key, MultiplyWide());
      for (int half = 0; half < 2; ++half) {
        for (int side = 0; side < 2; ++side) {
          for (int odd = 0; odd < 2; ++odd) {
            const auto kept =
                dropout_keeps(draws, dropout_lane(half * 8, side * 8 + odd), threshold);
            T* const to = factors + (pair + side * 8 + odd) * kTileRows + row + half * 8;
            for (int r = 0; r < 8; ++r) to[r] = kept[r] ? keep : T(0);
          }
        }
      }
    }
  }
}

}  // namespace jaxflash::cpu::JAXFLASH_ISA
