// What one attention call is: sizes, operands and where their elements lie.
//
// Every operand has the same number of leading batch dims, each of full size or broadcast; a
// broadcast dim has stride 0, so that nothing is ever repeated in memory. The same holds for the
// head, row and column dims of bias and mask.
#pragma once

#include <cstdint>

#include "attention/config.h"

namespace jaxflash {

inline constexpr int kMaxBatchDims = 4;

// No bound on one side of the window.
inline constexpr int64_t kUnlimited = -1;

enum class DType : uint8_t { kBF16, kF16, kF32, kF64, kBool, kS32, kU32 };

// A dense array. Strides count elements; 0 means broadcast. "Row" is a position on the query or the
// key axis, "column" a channel of query, key and value, or a key of bias and mask.
struct Tensor {
  void* data = nullptr;  // nullptr: the operand is absent, or the result unwanted
  DType dtype = DType::kF32;
  int64_t batch[kMaxBatchDims] = {};
  int64_t head = 0;
  int64_t row = 0;
  int64_t column = 0;
};

// One attention call. Letters as in design.md: B batch, T query length, S key length, N query
// heads, K key/value heads, H query/key head dim, Hv value head dim.
struct Problem {
  int batch_rank = 0;
  int64_t batch_size[kMaxBatchDims] = {};
  int64_t batches = 1;  // product of batch_size
  int64_t query_length = 0;
  int64_t key_length = 0;
  int64_t query_heads = 0;
  int64_t key_heads = 0;
  int64_t head_dim = 0;
  int64_t value_dim = 0;

  // Query i, at position p = i + query_offset of the key axis, sees keys p - left .. p + right.
  int64_t window_left = kUnlimited;
  int64_t window_right = kUnlimited;
  double soft_cap = 0;            // 0: none
  int64_t dropout_threshold = 0;  // of 65536; 0: none

  Tensor query;                  // [*B, T, N, H]
  Tensor key;                    // [*B, S, K, H]
  Tensor value;                  // [*B, S, K, Hv]
  Tensor bias;                   // [*B, N, T, S], any of them broadcast
  Tensor mask;                   // [*B, N, T, S], any of them broadcast; true = visible
  Tensor sinks;                  // [*B, N]
  Tensor scale;                  // [*B]
  Tensor query_lengths;          // [*B], within 0..T
  Tensor key_value_lengths;      // [*B], within 0..S
  Tensor query_offset;           // [*B], within -2^30..2^30
  Tensor query_segment_ids;      // [*B, T]
  Tensor key_value_segment_ids;  // [*B, S]
  Tensor dropout_stream;         // [*B, N, 4]: Philox key (2 words), batch index, head index
};

// What the forward pass leaves behind. The log-sum-exp is logit_max + log_sum: in one float32 the
// probabilities exp(logit - lse) would be lost where logits are large.
struct Statistics {
  Tensor logit_max;  // [*B, T, N]; -inf where a query sees nothing
  Tensor log_sum;  // [*B, T, N]; log of the sum of exp(logit - logit_max); 0 where nothing is seen
};

// What the backward pass reads beside the problem.
struct BackwardInputs {
  Tensor output_cotangent;  // [*B, T, N, Hv], the query's dtype
  Statistics statistics;
  Tensor delta;  // [*B, T, N]: rowsum(output * output_cotangent) - cotangent of the log-sum-exp
};

// What the backward pass computes; absent cotangents are not wanted.
//
// Batch dims in which a cotangent of key, value or bias has stride 0 are summed over. Key, value
// and their cotangents are all broadcast along the dims in which one of these cotangents is summed.
struct Cotangents {
  Tensor query;  // [*B, T, N, H]
  Tensor key;    // [*B, S, K, H]
  Tensor value;  // [*B, S, K, Hv]
  Tensor bias;   // the bias's own shape
  Tensor scale;  // [*B, T, N]: each query's share of the scale's cotangent
};

// Batch `b` as one index a batch dim, worth keeping where several operands are addressed.
struct BatchIndex {
  int rank;
  int64_t at[kMaxBatchDims];
};

JAXFLASH_INLINE BatchIndex batch_index(const Problem& problem, int64_t b) {
  BatchIndex index = {problem.batch_rank, {}};
  for (int dim = kMaxBatchDims - 1; dim > 0; --dim) {  // constant bounds: `at` stays in registers
    if (dim >= problem.batch_rank) continue;
    index.at[dim] = b % problem.batch_size[dim];
    b /= problem.batch_size[dim];
  }
  index.at[0] = b;
  return index;
}

// Element offset of a batch in an operand.
JAXFLASH_INLINE int64_t batch_offset(const Tensor& tensor, const BatchIndex& index) {
  int64_t offset = 0;
  for (int dim = 0; dim < kMaxBatchDims; ++dim) {  // constant bounds, as above
    if (dim >= index.rank) break;
    offset += index.at[dim] * tensor.batch[dim];
  }
  return offset;
}
JAXFLASH_INLINE int64_t batch_offset(const Problem& problem, const Tensor& tensor, int64_t b) {
  return batch_offset(tensor, batch_index(problem, b));
}

// The element that a per-batch operand (lengths, offset, scale) holds for batch `b`.
template <class T>
JAXFLASH_INLINE T batch_value(const Tensor& tensor, const BatchIndex& index, T absent) {
  if (tensor.data == nullptr) return absent;
  return static_cast<const T*>(tensor.data)[batch_offset(tensor, index)];
}
template <class T>
JAXFLASH_INLINE T batch_value(const Problem& problem, const Tensor& tensor, int64_t b, T absent) {
  return batch_value<T>(tensor, batch_index(problem, b), absent);
}

}  // namespace jaxflash
