// From XLA's buffers to a Problem, with every size checked.
//
// The calls take their operands and results in a fixed order (kOperands below, then what each call
// adds); an operand that is absent, or a result that is not wanted, is a u8[0] buffer. The Python
// side (jaxflash/_native.py) has checked everything already; a mismatch here means that the two
// sides differ in version, and is reported, not trusted.
#pragma once

#include <cstdint>
#include <string>

#include "attention/problem.h"
#include "xla/ffi/api/ffi.h"

namespace jaxflash::ffi {

enum class Kind {
  kQuery,    // the query's dtype
  kCompute,  // of sums and statistics: float, or double where the query is double
  kFloat,    // any float dtype
  kBool,
  kS32,
  kU32,
};

// An array's name, its axes behind the batch dims, and its dtype. T, S, N, K, H, V: design.md's
// letters (V is Hv); 4: the words of a dropout stream. Small letters may be broadcast.
struct ArraySpec {
  const char* name;
  const char* axes;
  Kind kind;
  bool optional;
};

inline constexpr ArraySpec kOperands[] = {
    {"query", "TNH", Kind::kFloat, false},        {"key", "SKH", Kind::kQuery, false},
    {"value", "SKV", Kind::kQuery, false},        {"bias", "nts", Kind::kFloat, true},
    {"mask", "nts", Kind::kBool, true},           {"sinks", "N", Kind::kCompute, true},
    {"scale", "", Kind::kCompute, true},          {"query_lengths", "", Kind::kS32, true},
    {"key_value_lengths", "", Kind::kS32, true},  {"query_offset", "", Kind::kS32, true},
    {"query_segment_ids", "T", Kind::kS32, true}, {"key_value_segment_ids", "S", Kind::kS32, true},
    {"dropout_stream", "N4", Kind::kU32, true},
};
inline constexpr size_t kOperandCount = sizeof(kOperands) / sizeof(kOperands[0]);

// Attributes that both calls take.
struct Attributes {
  int64_t window_left;
  int64_t window_right;
  double soft_cap;
  int64_t dropout_threshold;
};

// Decodes the operands and results of one call; keeps the first error.
class Decoder {
 public:
  Decoder(xla::ffi::RemainingArgs operands, xla::ffi::RemainingRets results);

  // Reads sizes, the operands of kOperands and the attributes.
  Problem problem(const Attributes& attributes);

  // The operand or result at `index`, laid out as `spec` says for `problem`.
  Tensor operand(const Problem& problem, size_t index, const ArraySpec& spec);
  Tensor result(const Problem& problem, size_t index, const ArraySpec& spec);

  // Results logit_max and log_sum, at `first` and behind it.
  Statistics statistics(const Problem& problem, size_t first);

  // The operands behind kOperands, and the first five results, of a backward call.
  BackwardInputs backward_inputs(const Problem& problem);
  Cotangents cotangents(const Problem& problem);

  // A result with one more dim in front, whose size and stride come back by reference.
  Tensor stacked_result(const Problem& problem, size_t index, const ArraySpec& spec, int64_t& count,
                        int64_t& stride);

  // Reports an error, unless there is one already.
  void fail(const std::string& message);

  xla::ffi::Error error() const { return error_; }
  bool ok() const { return error_.success(); }

 private:
  xla::ffi::AnyBuffer buffer(size_t index, bool is_result);

  Tensor tensor(const Problem& problem, xla::ffi::AnyBuffer buffer, int64_t leading,
                const ArraySpec& spec);

  // Where a cotangent of key or value is summed over a batch dim, key, value and both cotangents
  // must be the same along it: the kernels take one key and one value for the whole sum.
  void check_summed_batches(const Problem& problem, const Cotangents& cotangents);

  xla::ffi::RemainingArgs operands_;
  xla::ffi::RemainingRets results_;
  xla::ffi::Error error_;
};

}  // namespace jaxflash::ffi
