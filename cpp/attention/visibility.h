// Which keys a query sees.
//
// Lengths, causality, windows and offsets leave every query one contiguous range of keys, whose two
// ends grow with the query's position; segment ids and masks then hide single keys within it. All
// rules are conjoined. A kernel cuts its loop by the ranges and asks for single keys only in tiles
// that are seen in part.
#pragma once

#include <cstdint>

#include "attention/config.h"
#include "attention/problem.h"

namespace jaxflash {

// Positions [begin, end); empty where end <= begin.
struct Range {
  int64_t begin;
  int64_t end;
};

enum class TileVisibility : uint8_t { kNone, kSome, kAll };

// The visibility rules of one batch, read from the operands.
struct Extent {
  int64_t query_length;  // rows at or past it do not exist
  int64_t key_length;    // keys at or past it do not exist
  int64_t query_offset;  // position of query 0 on the key axis
  int64_t window_left;
  int64_t window_right;
};

JAXFLASH_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
JAXFLASH_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
JAXFLASH_INLINE int64_t clamp_to(int64_t x, int64_t low, int64_t high) {
  return min_of(max_of(x, low), high);
}

JAXFLASH_INLINE Extent extent_of(const Problem& problem, const BatchIndex& index) {
  const auto query_length = batch_value<int32_t>(problem.query_lengths, index,
                                                 static_cast<int32_t>(problem.query_length));
  const auto key_length = batch_value<int32_t>(problem.key_value_lengths, index,
                                               static_cast<int32_t>(problem.key_length));
  return {clamp_to(query_length, 0, problem.query_length),
          clamp_to(key_length, 0, problem.key_length),
          batch_value<int32_t>(problem.query_offset, index, 0), problem.window_left,
          problem.window_right};
}
JAXFLASH_INLINE Extent extent_of(const Problem& problem, int64_t b) {
  return extent_of(problem, batch_index(problem, b));
}

// [begin, end) within 0 .. length. Both ends stay monotonic where the range is empty.
JAXFLASH_INLINE Range clamped(int64_t begin, int64_t end, int64_t length) {
  return {clamp_to(begin, 0, length), clamp_to(end, 0, length)};
}

// Keys in the range of query `row`; empty for a row past the query length.
JAXFLASH_INLINE Range keys_of_row(const Extent& extent, int64_t row) {
  if (row >= extent.query_length) return {0, 0};
  const int64_t position = row + extent.query_offset;
  const int64_t begin = extent.window_left == kUnlimited ? 0 : position - extent.window_left;
  const int64_t end =
      extent.window_right == kUnlimited ? extent.key_length : position + extent.window_right + 1;
  return clamped(begin, end, extent.key_length);
}

// Keys that at least one of `rows` has in its range. `rows` is not empty.
JAXFLASH_INLINE Range keys_of_any_row(const Extent& extent, Range rows) {
  const int64_t last = min_of(rows.end, extent.query_length) - 1;
  if (last < rows.begin) return {0, 0};
  return {keys_of_row(extent, rows.begin).begin, keys_of_row(extent, last).end};
}

// Keys that every existing one of `rows` has in its range. `rows` is not empty.
JAXFLASH_INLINE Range keys_of_every_row(const Extent& extent, Range rows) {
  const int64_t last = min_of(rows.end, extent.query_length) - 1;
  if (last < rows.begin) return {0, 0};
  return {keys_of_row(extent, last).begin, keys_of_row(extent, rows.begin).end};
}

// Rows that have at least one of `keys` in their range. `keys` is not empty.
JAXFLASH_INLINE Range rows_of_any_key(const Extent& extent, Range keys) {
  const int64_t last = min_of(keys.end, extent.key_length) - 1;
  if (last < keys.begin) return {0, 0};
  const int64_t begin = extent.window_right == kUnlimited
                            ? 0
                            : keys.begin - extent.window_right - extent.query_offset;
  const int64_t end = extent.window_left == kUnlimited
                          ? extent.query_length
                          : last + extent.window_left - extent.query_offset + 1;
  return clamped(begin, end, extent.query_length);
}

// Rows that have every one of `keys` in their range. `keys` is not empty.
JAXFLASH_INLINE Range rows_of_every_key(const Extent& extent, Range keys) {
  if (keys.end > extent.key_length) return {0, 0};
  const int64_t begin = extent.window_right == kUnlimited
                            ? 0
                            : keys.end - 1 - extent.window_right - extent.query_offset;
  const int64_t end = extent.window_left == kUnlimited
                          ? extent.query_length
                          : keys.begin + extent.window_left - extent.query_offset + 1;
  return clamped(begin, end, extent.query_length);
}

// What rows see of a tile of keys, by the ranges alone.
JAXFLASH_INLINE TileVisibility tile_visibility(const Extent& extent, Range rows, Range keys) {
  const Range any = keys_of_any_row(extent, rows);
  if (max_of(any.begin, keys.begin) >= min_of(any.end, keys.end)) return TileVisibility::kNone;
  const Range every = keys_of_every_row(extent, rows);
  const bool all = every.begin <= keys.begin && keys.end <= every.end;
  return all ? TileVisibility::kAll : TileVisibility::kSome;
}

// Whether there may be rows that see no key, as far as the operands' presence tells.
JAXFLASH_INLINE bool rows_may_see_nothing(const Problem& problem) {
  return problem.bias.data != nullptr || problem.mask.data != nullptr ||
         problem.query_segment_ids.data != nullptr || problem.query_offset.data != nullptr ||
         problem.key_value_lengths.data != nullptr || problem.window_left != kUnlimited;
}

// Whether every row sees every key, but for a bias of minus infinity, as far as the operands'
// presence tells.
JAXFLASH_INLINE bool rows_see_all_keys(const Problem& problem) {
  return problem.mask.data == nullptr && problem.query_segment_ids.data == nullptr &&
         problem.query_lengths.data == nullptr && problem.key_value_lengths.data == nullptr &&
         problem.window_left == kUnlimited && problem.window_right == kUnlimited;
}

// The least and the greatest segment id of a tile's rows or keys.
struct SegmentBounds {
  int32_t least;
  int32_t greatest;
};

// What rows see of keys by their segment ids, from the bounds of both.
JAXFLASH_INLINE TileVisibility segment_visibility(SegmentBounds rows, SegmentBounds keys) {
  if (rows.greatest < keys.least || keys.greatest < rows.least) return TileVisibility::kNone;
  const bool one_segment = rows.least == rows.greatest && keys.least == keys.greatest;
  return one_segment ? TileVisibility::kAll : TileVisibility::kSome;
}

}  // namespace jaxflash
