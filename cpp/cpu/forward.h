// Forward pass: online softmax over tiles of keys (arXiv 1805.02867, 2205.14135).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/gemm.h"
#include "cpu/launch.h"
#include "cpu/tile.h"

namespace jaxflash::cpu::JAXFLASH_ISA {

// Row tiles that one task takes through the keys together, so that each tile of keys is loaded once
// for all of them.
inline constexpr int64_t kRowTilesPerTask = 4;

// The state of one row tile on its way through the keys.
template <class T>
struct RowState {
  RowTile<T> tile;
  T* query;   // [H][kTileRows]
  T* output;  // [Hv][kTileRows], relative to `peak`
  T* peak;    // [kTileRows] greatest logit so far
  T* sum;     // [kTileRows] sum of exp(logit - peak)
  T* shrink;  // [kTileRows] what the last move of the peak multiplies earlier sums by

  RowState(const Problem& problem, Scratch& scratch)
      : tile(scratch),
        query(scratch.take<T>(padded<T>(problem.head_dim) * kTileRows)),
        output(scratch.take<T>(padded<T>(problem.value_dim) * kTileRows)),
        peak(scratch.take<T>(kTileRows)),
        sum(scratch.take<T>(kTileRows)),
        shrink(scratch.take<T>(kTileRows)) {}
};

template <class T>
struct ForwardArrays {
  RowState<T> states[kRowTilesPerTask];
  RuleArrays<T> rules;
  T* key;      // [kTileKeys][H]
  T* value;    // [kTileKeys][Hv]
  T* logits;   // [kTileKeys][kTileRows], then probabilities
  T* factors;  // [kTileKeys][kTileRows] dropout
  T* rows;     // [kTileRows][H or Hv] row-major staging

  ForwardArrays(const Problem& problem, Scratch& scratch)
      : states{{problem, scratch}, {problem, scratch}, {problem, scratch}, {problem, scratch}},
        rules(problem, scratch),
        key(scratch.take<T>(kTileKeys * padded<T>(problem.head_dim))),
        value(scratch.take<T>(kTileKeys * padded<T>(problem.value_dim))),
        logits(scratch.take<T>(kTileKeys * kTileRows)),
        factors(scratch.take<T>(problem.dropout_threshold != 0 ? kTileKeys * kTileRows : 0)),
        rows(scratch.take<T>(kTileRows * padded<T>(max_of(problem.head_dim, problem.value_dim)))) {}
};

template <class T>
inline void begin_rows(const Problem& problem, T* staging, RowState<T>& state) {
  const RowTile<T>& tile = state.tile;
  load_tile(problem, problem.query, tile, problem.head_dim, staging);
  transpose(staging, padded<T>(problem.head_dim), tile.width, padded<T>(problem.head_dim),
            state.query, kTileRows);
  std::memset(state.output, 0, padded<T>(problem.value_dim) * kTileRows * sizeof(T));
  // The sink is a logit that is there before any key.
  T sink = -infinity<T>();
  if (problem.sinks.data != nullptr) {
    sink = static_cast<const T*>(
        problem.sinks.data)[row_offset(problem, problem.sinks, tile.b, tile.head, 0)];
  }
  for (int64_t r = 0; r < kTileRows; ++r) {
    state.peak[r] = sink;
    state.sum[r] = sink == -infinity<T>() ? T(0) : T(1);
  }
}

// Logits to exp(logit - peak), in place; the peak and the sum move along. True if any peak moved,
// so that the output must be shrunk too.
template <class T>
inline bool online_softmax(int64_t key_count, T* logits, RowState<T>& state) {
  bool moved = false;
  for (int64_t lane = 0; lane < state.tile.width; lane += kLanes<T>) {
    const Vec<T> old_peak = load(state.peak + lane);
    Vec<T> peak = old_peak;
    for (int64_t key = 0; key < key_count; ++key) {
      peak = greater_of(load(logits + key * kTileRows + lane), peak);
    }
    // A row that has seen nothing yet has no peak to subtract; all its exponentials are exp(-inf).
    const Vec<T> origin = peak == -infinity<T>() ? Vec<T>{} : peak;
    Vec<T> sum = {};
    for (int64_t key = 0; key < key_count; ++key) {
      T* const at = logits + key * kTileRows + lane;
      const Vec<T> p = exp<T>(load(at) - origin);
      sum += p;
      store(at, p);
    }
    const Vec<T> shrink = exp<T>(old_peak - origin);
    store(state.peak + lane, peak);
    store(state.sum + lane, load(state.sum + lane) * shrink + sum);
    store(state.shrink + lane, shrink);
    for (int i = 0; i < kLanes<T>; ++i) moved |= shrink[i] != T(1);
  }
  return moved;
}

// columns[c][row] *= factors[row].
template <class T>
inline void multiply_rows(int64_t column_count, int64_t width, const T* factors, T* columns) {
  for (int64_t c = 0; c < column_count; ++c) {
    for (int64_t lane = 0; lane < width; lane += kLanes<T>) {
      T* const at = columns + c * kTileRows + lane;
      store(at, load(at) * load(factors + lane));
    }
  }
}

// Takes one tile of rows over one tile of keys, which it sees at least in part.
template <class T>
inline void attend(const Problem& problem, Range keys, const LogitRules<T>& rules,
                   ForwardArrays<T>& arrays, RowState<T>& state) {
  const int64_t key_count = keys.end - keys.begin;
  const int64_t width = state.tile.width;
  const int64_t key_stride = padded<T>(problem.head_dim);
  const int64_t value_stride = padded<T>(problem.value_dim);
  gemm<T, Store::kAssign>(key_count, width, problem.head_dim, {arrays.key, key_stride, 1},
                          state.query, kTileRows, arrays.logits, kTileRows);
  apply_rules(rules, state.tile, keys, arrays.logits);
  if (online_softmax(key_count, arrays.logits, state)) {
    multiply_rows(problem.value_dim, width, state.shrink, state.output);
  }
  if (problem.dropout_threshold != 0) {
    dropout_factors(problem, state.tile, keys, arrays.factors);
    multiply_tile(key_count, width, arrays.factors, arrays.logits);
  }
  gemm<T, Store::kAdd>(problem.value_dim, width, key_count, {arrays.value, 1, value_stride},
                       arrays.logits, kTileRows, state.output, kTileRows);
}

// Writes the rows [first, first + kTileRows) of output and statistics that exist in the query.
template <class T>
inline void finish_rows(const Problem& problem, const ForwardResults& results, T* staging,
                        RowState<T>& state) {
  const RowTile<T>& tile = state.tile;
  const int64_t stride = padded<T>(problem.value_dim);
  for (int64_t r = 0; r < tile.width; ++r) {
    state.shrink[r] = state.sum[r] == T(0) ? T(0) : T(1) / state.sum[r];
  }
  multiply_rows(problem.value_dim, tile.width, state.shrink, state.output);
  transpose(state.output, kTileRows, stride, tile.width, staging, stride);

  const int64_t rows = min_of(problem.query_length - tile.first, kTileRows);
  std::memset(staging + tile.rows * stride, 0, (rows - tile.rows) * stride * sizeof(T));
  const Tensor& peaks = results.statistics.logit_max;
  const Tensor& sums = results.statistics.log_sum;
  T* const peak =
      static_cast<T*>(peaks.data) + row_offset(problem, peaks, tile.b, tile.head, tile.first);
  T* const log_sum =
      static_cast<T*>(sums.data) + row_offset(problem, sums, tile.b, tile.head, tile.first);
  const int64_t output = row_offset(problem, results.output, tile.b, tile.head, tile.first);
  for (int64_t r = 0; r < rows; ++r) {
    const T sum = r < tile.rows ? state.sum[r] : T(0);
    // Logits that are all NaN leave the peak where it was, but are not those of a row that sees
    // nothing.
    peak[r * peaks.row] = sum == T(0) ? -infinity<T>() : std::isnan(sum) ? sum : state.peak[r];
    log_sum[r * sums.row] = sum == T(0) ? T(0) : std::log(sum);
    store_row(results.output.dtype, results.output.data, output + r * results.output.row,
              problem.value_dim, staging + r * stride);
  }
}

// One task: up to kRowTilesPerTask row tiles of the query heads of one key head, over all keys that
// any of them may see. Row tiles are numbered with the heads fastest.
template <class T>
inline void forward_task(const Problem& problem, const ForwardResults& results, int64_t b,
                         int64_t key_head, Range row_tiles, ForwardArrays<T>& arrays) {
  const int64_t group = problem.query_heads / problem.key_heads;
  const int64_t count = row_tiles.end - row_tiles.begin;
  Range any = {problem.key_length, 0};
  for (int64_t i = 0; i < count; ++i) {
    const int64_t index = row_tiles.begin + i;
    RowState<T>& state = arrays.states[i];
    place(problem, b, key_head * group + index % group, index / group * kTileRows, state.tile);
    begin_rows(problem, arrays.rows, state);
    if (state.tile.any.begin < state.tile.any.end) {
      any = {min_of(any.begin, state.tile.any.begin), max_of(any.end, state.tile.any.end)};
    }
  }
  for (int64_t first = any.begin / kTileKeys * kTileKeys; first < any.end; first += kTileKeys) {
    const Range keys = {first, min_of(first + kTileKeys, any.end)};
    bool loaded = false;
    for (int64_t i = 0; i < count; ++i) {
      LogitRules<T> rules;
      if (!find_rules(problem, arrays.states[i].tile, keys, arrays.rules, rules)) continue;
      if (!loaded) {
        load_rows(problem, problem.key, b, key_head, keys, problem.head_dim, arrays.key,
                  padded<T>(problem.head_dim));
        load_rows(problem, problem.value, b, key_head, keys, problem.value_dim, arrays.value,
                  padded<T>(problem.value_dim));
        loaded = true;
      }
      attend(problem, keys, rules, arrays, arrays.states[i]);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    finish_rows(problem, results, arrays.rows, arrays.states[i]);
  }
}

template <class T>
inline bool forward(const Problem& problem, const ForwardResults& results, Executor& executor) {
  const int64_t group = problem.query_heads / problem.key_heads;
  const int64_t row_tiles = tiles_of(problem.query_length, kTileRows) * group;
  const int64_t heads = problem.batches * problem.key_heads;
  // Enough tasks to keep all threads busy to the end, then as few loads of keys as possible.
  const int64_t wanted_tasks = 4 * max_of(executor.thread_count(), 1);
  const int64_t per_task = clamp_to(heads * row_tiles / wanted_tasks, 1, kRowTilesPerTask);
  const int64_t tasks_per_head = tiles_of(row_tiles, per_task);
  return for_each_task<ForwardArrays<T>>(
      executor, heads * tasks_per_head, problem, [&](ForwardArrays<T>& arrays, int64_t task) {
        // The last rows first: under a causal mask they are the longest tasks.
        const int64_t part = tasks_per_head - 1 - task / heads;
        const int64_t head = task % heads;
        const Range tiles = {part * per_task, min_of((part + 1) * per_task, row_tiles)};
        forward_task(problem, results, head / problem.key_heads, head % problem.key_heads, tiles,
                     arrays);
      });
}

}  // namespace jaxflash::cpu::JAXFLASH_ISA
