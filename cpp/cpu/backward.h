// Backward pass: probabilities are computed again from the statistics of the forward pass
// (arXiv 2205.14135, Algorithm 4; 2307.08691).
//
// One task owns the cotangents of the keys of one (batch, key head) and adds up the query cotangent
// of its own query heads, so no two tasks ever write to the same place and the result does not
// depend on the number of threads. With fewer (batch, key head) pairs than threads, the key tiles
// of a pair are dealt to several tasks, each with sums of its own.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/gemm.h"
#include "cpu/launch.h"
#include "cpu/tile.h"

namespace jaxflash::cpu::JAXFLASH_ISA {

// The batches that share one cotangent of key, value or bias: `repeats` for each of `units`.
struct BatchGroups {
  bool summed[kMaxBatchDims] = {};
  int64_t units = 1;
  int64_t repeats = 1;
};

inline BatchGroups group_batches(const Problem& problem, const Tensor& cotangent) {
  BatchGroups groups;
  for (int dim = 0; dim < problem.batch_rank; ++dim) {
    groups.summed[dim] = cotangent.data != nullptr && cotangent.batch[dim] == 0;
    (groups.summed[dim] ? groups.repeats : groups.units) *= problem.batch_size[dim];
  }
  return groups;
}

inline int64_t batch_of(const Problem& problem, const BatchGroups& groups, int64_t unit,
                        int64_t repeat) {
  int64_t b = 0;
  int64_t step = 1;
  for (int dim = problem.batch_rank - 1; dim >= 0; --dim) {
    int64_t& index = groups.summed[dim] ? repeat : unit;
    b += index % problem.batch_size[dim] * step;
    index /= problem.batch_size[dim];
    step *= problem.batch_size[dim];
  }
  return b;
}

template <class T>
struct BackwardArrays {
  RowTile<T> tile;
  RuleArrays<T> rules;
  T* key;                // [kTileKeys][H]
  T* value;              // [kTileKeys][Hv]
  T* query;              // [kTileRows][H]
  T* query_columns;      // [H][kTileRows]
  T* cotangent;          // [kTileRows][Hv], of the output
  T* cotangent_columns;  // [Hv][kTileRows]
  T* peak;               // [kTileRows]; +inf where a row sees nothing, so that exp(s - peak) is 0
  T* log_sum;            // [kTileRows]
  T* delta;              // [kTileRows]
  T* probabilities;      // [kTileKeys][kTileRows], after dropout
  T* gradients;          // [kTileKeys][kTileRows], cotangent of the logits
  T* factors;            // [kTileKeys][kTileRows], dropout
  T* key_sum;            // [kTileKeys][H]
  T* value_sum;          // [kTileKeys][Hv]
  T* query_sum;          // [kTileRows][H]
  T* bias_sum;           // [kTileKeys][kTileRows]

  BackwardArrays(const Problem& problem, Scratch& scratch)
      : tile(scratch), rules(problem, scratch) {
    const int64_t head_dim = padded<T>(problem.head_dim);
    const int64_t value_dim = padded<T>(problem.value_dim);
    key = scratch.take<T>(kTileKeys * head_dim);
    value = scratch.take<T>(kTileKeys * value_dim);
    query = scratch.take<T>(kTileRows * head_dim);
    query_columns = scratch.take<T>(kTileRows * head_dim);
    cotangent = scratch.take<T>(kTileRows * value_dim);
    cotangent_columns = scratch.take<T>(kTileRows * value_dim);
    peak = scratch.take<T>(kTileRows);
    log_sum = scratch.take<T>(kTileRows);
    delta = scratch.take<T>(kTileRows);
    probabilities = scratch.take<T>(kTileKeys * kTileRows);
    gradients = scratch.take<T>(kTileKeys * kTileRows);
    factors = scratch.take<T>(problem.dropout_threshold != 0 ? kTileKeys * kTileRows : 0);
    key_sum = scratch.take<T>(kTileKeys * head_dim);
    value_sum = scratch.take<T>(kTileKeys * value_dim);
    query_sum = scratch.take<T>(kTileRows * head_dim);
    bias_sum = scratch.take<T>(problem.bias.data != nullptr ? kTileKeys * kTileRows : 0);
  }
};

template <class T>
inline void load_keys(const Problem& problem, int64_t b, int64_t key_head, Range keys,
                      BackwardArrays<T>& arrays) {
  load_rows(problem, problem.key, b, key_head, keys, problem.head_dim, arrays.key,
            padded<T>(problem.head_dim));
  load_rows(problem, problem.value, b, key_head, keys, problem.value_dim, arrays.value,
            padded<T>(problem.value_dim));
}

// Loads what the tile's rows bring: query, cotangent of the output, statistics.
template <class T>
inline void load_query_side(const Problem& problem, const BackwardInputs& inputs,
                            BackwardArrays<T>& arrays) {
  const RowTile<T>& tile = arrays.tile;
  const int64_t head_dim = padded<T>(problem.head_dim);
  const int64_t value_dim = padded<T>(problem.value_dim);
  load_tile(problem, problem.query, tile, problem.head_dim, arrays.query);
  load_tile(problem, inputs.output_cotangent, tile, problem.value_dim, arrays.cotangent);
  load_statistic(problem, inputs.statistics.logit_max, tile, -infinity<T>(), arrays.peak);
  load_statistic(problem, inputs.statistics.log_sum, tile, T(0), arrays.log_sum);
  load_statistic(problem, inputs.delta, tile, T(0), arrays.delta);
  // What a row that sees nothing brings must not count, even if it is NaN.
  for (int64_t r = 0; r < tile.width; ++r) {
    if (arrays.peak[r] != -infinity<T>()) continue;
    arrays.peak[r] = infinity<T>();
    arrays.delta[r] = 0;
    std::memset(arrays.query + r * head_dim, 0, head_dim * sizeof(T));
    std::memset(arrays.cotangent + r * value_dim, 0, value_dim * sizeof(T));
  }
  transpose(arrays.query, head_dim, tile.width, head_dim, arrays.query_columns, kTileRows);
  transpose(arrays.cotangent, value_dim, tile.width, value_dim, arrays.cotangent_columns,
            kTileRows);
}

// Fills `probabilities`.
template <class T>
inline void compute_probabilities(const Problem& problem, Range keys, const LogitRules<T>& rules,
                                  BackwardArrays<T>& arrays) {
  const int64_t key_count = keys.end - keys.begin;
  const int64_t width = arrays.tile.width;
  T* const p = arrays.probabilities;
  gemm<T, Store::kAssign>(key_count, width, problem.head_dim,
                          {arrays.key, padded<T>(problem.head_dim), 1}, arrays.query_columns,
                          kTileRows, p, kTileRows);
  apply_rules(rules, arrays.tile, keys, p);
  for (int64_t lane = 0; lane < width; lane += kLanes<T>) {
    const Vec<T> peak = load(arrays.peak + lane), log_sum = load(arrays.log_sum + lane);
    for (int64_t key = 0; key < key_count; ++key) {
      T* const at = p + key * kTileRows + lane;
      store(at, exp<T>((load(at) - peak) - log_sum));
    }
  }
}

// Fills `gradients` from the probabilities before dropout.
template <class T>
inline void compute_gradients(const Problem& problem, int64_t key_count,
                              BackwardArrays<T>& arrays) {
  const int64_t width = arrays.tile.width;
  T* const gradients = arrays.gradients;
  gemm<T, Store::kAssign>(key_count, width, problem.value_dim,
                          {arrays.value, padded<T>(problem.value_dim), 1}, arrays.cotangent_columns,
                          kTileRows, gradients, kTileRows);
  if (problem.dropout_threshold != 0) {
    multiply_tile(key_count, width, arrays.factors, gradients);
  }
  for (int64_t lane = 0; lane < width; lane += kLanes<T>) {
    const Vec<T> delta = load(arrays.delta + lane);
    for (int64_t key = 0; key < key_count; ++key) {
      const int64_t at = key * kTileRows + lane;
      store(gradients + at, load(arrays.probabilities + at) * (load(gradients + at) - delta));
    }
  }
}

// Probabilities (after dropout) and, where asked for, cotangents of the logits after cap and bias.
template <class T>
inline void compute_tile(const Problem& problem, Range keys, const LogitRules<T>& rules,
                         bool wants_gradients, BackwardArrays<T>& arrays) {
  const int64_t key_count = keys.end - keys.begin;
  compute_probabilities(problem, keys, rules, arrays);
  if (problem.dropout_threshold != 0) {
    dropout_factors(problem, arrays.tile, keys, arrays.factors);
  }
  if (wants_gradients) compute_gradients(problem, key_count, arrays);
  if (problem.dropout_threshold != 0) {
    multiply_tile(key_count, arrays.tile.width, arrays.factors, arrays.probabilities);
  }
}

// The main pass: cotangents of query, key and value.
template <class T>
class MainPass {
 public:
  MainPass(const Problem& problem, const BackwardInputs& inputs, const BackwardResults& results)
      : problem_(problem),
        inputs_(inputs),
        results_(results),
        groups_(group_batches(problem, results.key.data != nullptr ? results.key : results.value)),
        query_sums_(results.workspace.data != nullptr ? results.workspace : results.query) {}

  bool run(Executor& executor) const {
    const int64_t heads = groups_.units * problem_.key_heads;
    return for_each_task<BackwardArrays<T>>(
        executor, heads * results_.chunks, problem_, [&](BackwardArrays<T>& arrays, int64_t task) {
          run_task(task % heads / problem_.key_heads, task % problem_.key_heads, task / heads,
                   arrays);
        });
  }

 private:
  int64_t group_size() const { return problem_.query_heads / problem_.key_heads; }
  bool wants_query() const { return query_sums_.data != nullptr; }
  bool wants_gradients() const { return wants_query() || results_.key.data != nullptr; }

  T* query_sum_row(int64_t chunk, int64_t b, int64_t head, int64_t row) const {
    return static_cast<T*>(query_sums_.data) + chunk * results_.chunk_stride +
           row_offset(problem_, query_sums_, b, head, row);
  }

  void run_task(int64_t unit, int64_t key_head, int64_t chunk, BackwardArrays<T>& arrays) const {
    if (wants_query()) clear_query_sums(unit, key_head, chunk);
    const int64_t step = results_.chunks * kTileKeys;
    for (int64_t first = chunk * kTileKeys; first < problem_.key_length; first += step) {
      const Range keys = {first, min_of(first + kTileKeys, problem_.key_length)};
      std::memset(arrays.key_sum, 0, kTileKeys * padded<T>(problem_.head_dim) * sizeof(T));
      std::memset(arrays.value_sum, 0, kTileKeys * padded<T>(problem_.value_dim) * sizeof(T));
      load_keys(problem_, batch_of(problem_, groups_, unit, 0), key_head, keys, arrays);
      for (int64_t repeat = 0; repeat < groups_.repeats; ++repeat) {
        add_batch(batch_of(problem_, groups_, unit, repeat), key_head, chunk, keys, arrays);
      }
      store_key_side(unit, key_head, keys, arrays);
    }
  }

  void clear_query_sums(int64_t unit, int64_t key_head, int64_t chunk) const {
    for (int64_t repeat = 0; repeat < groups_.repeats; ++repeat) {
      const int64_t b = batch_of(problem_, groups_, unit, repeat);
      for (int64_t row = 0; row < problem_.query_length; ++row) {
        std::memset(query_sum_row(chunk, b, key_head * group_size(), row), 0,
                    group_size() * problem_.head_dim * sizeof(T));
      }
    }
  }

  // Adds what the queries of one batch give to a tile of keys, and get from it. Keys past the
  // length are loaded, but nothing is computed with them.
  void add_batch(int64_t b, int64_t key_head, int64_t chunk, Range keys,
                 BackwardArrays<T>& arrays) const {
    const Extent extent = extent_of(problem_, b);
    keys.end = min_of(keys.end, extent.key_length);
    if (keys.end <= keys.begin) return;
    const Range rows = rows_of_any_key(extent, keys);
    for (int64_t first = rows.begin / kTileRows * kTileRows; first < rows.end; first += kTileRows) {
      for (int64_t g = 0; g < group_size(); ++g) {
        place(problem_, b, key_head * group_size() + g, first, arrays.tile);
        LogitRules<T> rules;
        if (find_rules(problem_, arrays.tile, keys, arrays.rules, rules)) {
          add_tile(chunk, keys, rules, arrays);
        }
      }
    }
  }

  void add_tile(int64_t chunk, Range keys, const LogitRules<T>& rules,
                BackwardArrays<T>& arrays) const {
    const RowTile<T>& tile = arrays.tile;
    const int64_t key_count = keys.end - keys.begin;
    const int64_t head_dim = padded<T>(problem_.head_dim);
    const int64_t value_dim = padded<T>(problem_.value_dim);
    load_query_side(problem_, inputs_, arrays);
    compute_tile(problem_, keys, rules, wants_gradients(), arrays);
    if (results_.value.data != nullptr) {
      gemm<T, Store::kAdd>(key_count, value_dim, tile.rows, {arrays.probabilities, kTileRows, 1},
                           arrays.cotangent, value_dim, arrays.value_sum, value_dim);
    }
    if (!wants_gradients()) return;
    if (rules.soft_cap != 0) {
      multiply_tile(key_count, tile.width, arrays.rules.slope, arrays.gradients);
    }
    if (results_.key.data != nullptr) {
      for (int64_t i = 0; i < tile.rows * head_dim; ++i) arrays.query[i] *= rules.scale;
      gemm<T, Store::kAdd>(key_count, head_dim, tile.rows, {arrays.gradients, kTileRows, 1},
                           arrays.query, head_dim, arrays.key_sum, head_dim);
    }
    if (wants_query()) {
      gemm<T, Store::kAssign>(tile.rows, head_dim, key_count, {arrays.gradients, 1, kTileRows},
                              arrays.key, head_dim, arrays.query_sum, head_dim);
      for (int64_t r = 0; r < tile.rows; ++r) {
        T* const to = query_sum_row(chunk, tile.b, tile.head, tile.first + r);
        const T* const from = arrays.query_sum + r * head_dim;
        for (int64_t c = 0; c < problem_.head_dim; ++c) to[c] += from[c];
      }
    }
  }

  void store_key_side(int64_t unit, int64_t key_head, Range keys,
                      const BackwardArrays<T>& arrays) const {
    const int64_t b = batch_of(problem_, groups_, unit, 0);
    store_rows(results_.key, b, key_head, keys, problem_.head_dim, arrays.key_sum);
    store_rows(results_.value, b, key_head, keys, problem_.value_dim, arrays.value_sum);
  }

  void store_rows(const Tensor& to, int64_t b, int64_t head, Range rows, int64_t columns,
                  const T* from) const {
    if (to.data == nullptr) return;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      store_row(to.dtype, to.data, row_offset(problem_, to, b, head, row), columns, from);
      from += padded<T>(columns);
    }
  }

  const Problem& problem_;
  const BackwardInputs& inputs_;
  const BackwardResults& results_;
  const BatchGroups groups_;
  const Tensor query_sums_;
};

// One row of every head: the chunks' sums to the query cotangent, and to the scale's.
template <class T>
inline void finish_query_row(const Problem& problem, const BackwardResults& results,
                             const Tensor& sums, int64_t b, int64_t row, T* query, T* sum) {
  const T scale = batch_value<T>(problem, problem.scale, b, T(1));
  for (int64_t head = 0; head < problem.query_heads; ++head) {
    const T* from = static_cast<const T*>(sums.data) + row_offset(problem, sums, b, head, row);
    for (int64_t c = 0; c < problem.head_dim; ++c) sum[c] = from[c];
    for (int64_t chunk = 1; chunk < results.chunks; ++chunk) {
      from += results.chunk_stride;
      for (int64_t c = 0; c < problem.head_dim; ++c) sum[c] += from[c];
    }
    if (results.scale.data != nullptr) {
      load_row(problem.query.dtype, problem.query.data,
               row_offset(problem, problem.query, b, head, row), problem.head_dim, query);
      T product = 0;
      // A row that sees nothing has sums of 0 and a query that may be NaN.
      for (int64_t c = 0; c < problem.head_dim; ++c) {
        product += sum[c] == 0 ? T(0) : sum[c] * query[c];
      }
      static_cast<T*>(results.scale.data)[row_offset(problem, results.scale, b, head, row)] =
          product;
    }
    if (results.query.data != nullptr) {
      // Nor may a scale that is not finite reach rows with sums of 0.
      for (int64_t c = 0; c < problem.head_dim; ++c) sum[c] = sum[c] == 0 ? T(0) : sum[c] * scale;
      store_row(results.query.dtype, results.query.data,
                row_offset(problem, results.query, b, head, row), problem.head_dim, sum);
    }
  }
}

template <class T>
struct RowArrays {
  T* query;
  T* sum;

  RowArrays(const Problem& problem, Scratch& scratch)
      : query(scratch.take<T>(problem.head_dim)), sum(scratch.take<T>(problem.head_dim)) {}
};

template <class T>
inline bool finish_query(const Problem& problem, const BackwardResults& results,
                         Executor& executor) {
  const Tensor& sums = results.workspace.data != nullptr ? results.workspace : results.query;
  const int64_t row_tiles = tiles_of(problem.query_length, kTileRows);
  return for_each_task<RowArrays<T>>(
      executor, problem.batches * row_tiles, problem, [&](RowArrays<T>& arrays, int64_t task) {
        const int64_t first = task % row_tiles * kTileRows;
        const int64_t end = min_of(first + kTileRows, problem.query_length);
        for (int64_t row = first; row < end; ++row) {
          finish_query_row(problem, results, sums, task / row_tiles, row, arrays.query, arrays.sum);
        }
      });
}

// The bias pass: one task owns a tile of the bias and adds up everything it was broadcast to.
template <class T>
class BiasPass {
 public:
  BiasPass(const Problem& problem, const BackwardInputs& inputs, const Tensor& bias)
      : problem_(problem),
        inputs_(inputs),
        bias_(bias),
        groups_(group_batches(problem, bias)),
        heads_(bias.head == 0 ? 1 : problem.query_heads),
        row_tiles_(bias.row == 0 ? 1 : tiles_of(problem.query_length, kTileRows)),
        key_tiles_(bias.column == 0 ? 1 : tiles_of(problem.key_length, kTileKeys)) {}

  bool run(Executor& executor) const {
    return for_each_task<BackwardArrays<T>>(
        executor, groups_.units * heads_ * row_tiles_ * key_tiles_, problem_,
        [&](BackwardArrays<T>& arrays, int64_t task) { run_task(task, arrays); });
  }

 private:
  // All of an axis where the bias is broadcast along it, else one tile.
  static Range span(int64_t stride, int64_t tile, int64_t tile_size, int64_t length) {
    if (stride == 0) return {0, length};
    return {tile * tile_size, min_of((tile + 1) * tile_size, length)};
  }

  void run_task(int64_t task, BackwardArrays<T>& arrays) const {
    const int64_t key_tile = task % key_tiles_;
    const int64_t row_tile = task / key_tiles_ % row_tiles_;
    const int64_t head = task / key_tiles_ / row_tiles_ % heads_;
    const int64_t unit = task / key_tiles_ / row_tiles_ / heads_;
    const Range rows = span(bias_.row, row_tile, kTileRows, problem_.query_length);
    const Range keys = span(bias_.column, key_tile, kTileKeys, problem_.key_length);
    const Range heads = span(bias_.head, head, 1, problem_.query_heads);
    std::memset(arrays.bias_sum, 0, kTileKeys * kTileRows * sizeof(T));
    for (int64_t repeat = 0; repeat < groups_.repeats; ++repeat) {
      const int64_t b = batch_of(problem_, groups_, unit, repeat);
      for (int64_t h = heads.begin; h < heads.end; ++h) add_head(b, h, rows, keys, arrays);
    }
    store_tile(batch_of(problem_, groups_, unit, 0), head, rows, keys, arrays);
  }

  void add_head(int64_t b, int64_t head, Range rows, Range keys, BackwardArrays<T>& arrays) const {
    const Extent extent = extent_of(problem_, b);
    const int64_t key_head = head / (problem_.query_heads / problem_.key_heads);
    for (int64_t first = keys.begin; first < keys.end; first += kTileKeys) {
      const Range tile = {first, min_of(first + kTileKeys, min_of(keys.end, extent.key_length))};
      if (tile.end <= tile.begin) break;
      load_keys(problem_, b, key_head, tile, arrays);
      for (int64_t row = rows.begin; row < rows.end; row += kTileRows) {
        place(problem_, b, head, row, arrays.tile);
        LogitRules<T> rules;
        if (!find_rules(problem_, arrays.tile, tile, arrays.rules, rules)) continue;
        load_query_side(problem_, inputs_, arrays);
        compute_tile(problem_, tile, rules, true, arrays);
        add_gradients(tile.end - tile.begin, arrays);
      }
    }
  }

  void add_gradients(int64_t key_count, BackwardArrays<T>& arrays) const {
    for (int64_t key = 0; key < key_count; ++key) {
      for (int64_t lane = 0; lane < arrays.tile.width; lane += kLanes<T>) {
        T* const to = arrays.bias_sum + key * kTileRows + lane;
        store(to, load(to) + load(arrays.gradients + key * kTileRows + lane));
      }
    }
  }

  void store_tile(int64_t b, int64_t head, Range rows, Range keys,
                  BackwardArrays<T>& arrays) const {
    T* const sum = arrays.bias_sum;
    T* const by_row = arrays.gradients;  // [kTileRows][kTileKeys]
    if (bias_.column == 0) {
      for (int64_t at = kTileRows; at < kTileKeys * kTileRows; ++at) sum[at % kTileRows] += sum[at];
    }
    transpose(sum, kTileRows, kTileKeys, kTileRows, by_row, kTileKeys);
    if (bias_.row == 0) {
      for (int64_t at = kTileKeys; at < kTileKeys * kTileRows; ++at) {
        by_row[at % kTileKeys] += by_row[at];
      }
    }
    const int64_t row_count = bias_.row == 0 ? 1 : rows.end - rows.begin;
    const int64_t column_count = bias_.column == 0 ? 1 : keys.end - keys.begin;
    const int64_t first_column = bias_.column == 0 ? 0 : keys.begin;
    for (int64_t r = 0; r < row_count; ++r) {
      store_row(bias_.dtype, bias_.data,
                row_offset(problem_, bias_, b, head, rows.begin + r) + first_column, column_count,
                by_row + r * kTileKeys);
    }
  }

  const Problem& problem_;
  const BackwardInputs& inputs_;
  const Tensor& bias_;
  const BatchGroups groups_;
  const int64_t heads_;
  const int64_t row_tiles_;
  const int64_t key_tiles_;
};

template <class T>
inline bool backward(const Problem& problem, const BackwardInputs& inputs,
                     const BackwardResults& results, Executor& executor) {
  const bool wants_query = results.query.data != nullptr || results.scale.data != nullptr;
  const bool wants_main =
      wants_query || results.key.data != nullptr || results.value.data != nullptr;
  if (wants_main && !MainPass<T>(problem, inputs, results).run(executor)) return false;
  if (wants_query && !finish_query<T>(problem, results, executor)) return false;
  if (results.bias.data == nullptr) return true;
  return BiasPass<T>(problem, inputs, results.bias).run(executor);
}

}  // namespace jaxflash::cpu::JAXFLASH_ISA
