#include "ffi/decode.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>

namespace jaxflash::ffi {
namespace {

using xla::ffi::AnyBuffer;
using xla::ffi::DataType;

std::string to_text(AnyBuffer::Dimensions dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i > 0 ? "," : "") + std::to_string(dims[i]);
  return text + "]";
}

// The buffer that stands for an absent operand or an unwanted result.
bool is_absent(AnyBuffer buffer) {
  return buffer.element_type() == DataType::U8 && buffer.dimensions().size() == 1 &&
         buffer.dimensions()[0] == 0;
}

bool dtype_of(DataType type, DType& dtype) {
  switch (type) {
    case DataType::BF16:
      dtype = DType::kBF16;
      return true;
    case DataType::F16:
      dtype = DType::kF16;
      return true;
    case DataType::F32:
      dtype = DType::kF32;
      return true;
    case DataType::F64:
      dtype = DType::kF64;
      return true;
    case DataType::PRED:
      dtype = DType::kBool;
      return true;
    case DataType::S32:
      dtype = DType::kS32;
      return true;
    case DataType::U32:
      dtype = DType::kU32;
      return true;
    default:
      return false;
  }
}

bool is_of_kind(DType dtype, Kind kind, DType query) {
  switch (kind) {
    case Kind::kQuery:
      return dtype == query;
    case Kind::kCompute:
      return dtype == (query == DType::kF64 ? DType::kF64 : DType::kF32);
    case Kind::kFloat:
      return dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32 ||
             dtype == DType::kF64;
    case Kind::kBool:
      return dtype == DType::kBool;
    case Kind::kS32:
      return dtype == DType::kS32;
    case Kind::kU32:
      return dtype == DType::kU32;
  }
  return false;
}

// Positions are int32 in the kernels, their sums and differences int64.
constexpr int64_t kLongestAxis = int64_t{1} << 31;
constexpr int64_t kWidestWindow = int64_t{1} << 32;

bool is_window(int64_t side) { return side >= kUnlimited && side <= kWidestWindow; }

int64_t axis_size(const Problem& problem, char axis) {
  switch (std::toupper(axis)) {
    case 'T':
      return problem.query_length;
    case 'S':
      return problem.key_length;
    case 'N':
      return problem.query_heads;
    case 'K':
      return problem.key_heads;
    case 'H':
      return problem.head_dim;
    case 'V':
      return problem.value_dim;
    default:
      return axis - '0';
  }
}

int64_t& axis_stride(Tensor& tensor, char axis) {
  switch (axis) {
    case 'N':
    case 'K':
    case 'n':
      return tensor.head;
    case 'T':
    case 'S':
    case 't':
      return tensor.row;
    default:
      return tensor.column;
  }
}

}  // namespace

Decoder::Decoder(xla::ffi::RemainingArgs operands, xla::ffi::RemainingRets results)
    : operands_(operands), results_(results) {}

void Decoder::fail(const std::string& message) {
  if (ok()) error_ = xla::ffi::Error::InvalidArgument("jaxflash: " + message);
}

AnyBuffer Decoder::buffer(size_t index, bool is_result) {
  static constexpr int64_t kNoDims[] = {0};
  static XLA_FFI_Buffer absent = [] {
    XLA_FFI_Buffer buffer = {};
    buffer.dtype = XLA_FFI_DataType_U8;
    buffer.rank = 1;
    buffer.dims = const_cast<int64_t*>(kNoDims);
    return buffer;
  }();
  if (is_result) {
    auto result = results_.get<AnyBuffer>(index);
    if (result.has_value()) return **result;
  } else {
    const auto operand = operands_.get<AnyBuffer>(index);
    if (operand.has_value()) return *operand;
  }
  fail(std::string(is_result ? "result " : "operand ") + std::to_string(index) + " is missing");
  return AnyBuffer(&absent);
}

Tensor Decoder::tensor(const Problem& problem, AnyBuffer buffer, int64_t leading,
                       const ArraySpec& spec) {
  Tensor tensor;
  if (is_absent(buffer)) {
    if (!spec.optional) fail(std::string(spec.name) + " is absent");
    return tensor;
  }
  const AnyBuffer::Dimensions dims = buffer.dimensions();
  const int64_t axes = static_cast<int64_t>(std::strlen(spec.axes));
  const auto refuse = [&](const std::string& expected) {
    fail(std::string(spec.name) + " of shape " + to_text(dims) + ": expected " + expected);
    return Tensor();
  };
  if (!dtype_of(buffer.element_type(), tensor.dtype) ||
      !is_of_kind(tensor.dtype, spec.kind, problem.query.dtype)) {
    return refuse("another dtype than XLA's number " +
                  std::to_string(static_cast<int>(buffer.element_type())));
  }
  if (static_cast<int64_t>(dims.size()) != leading + problem.batch_rank + axes) {
    return refuse(std::to_string(leading + problem.batch_rank + axes) + " dims");
  }
  int64_t stride = 1;
  for (int64_t i = axes - 1; i >= 0; --i) {
    const char axis = spec.axes[i];
    const int64_t size = dims[leading + problem.batch_rank + i];
    const bool broadcast = std::islower(axis) && size == 1;
    if (!broadcast && size != axis_size(problem, axis)) {
      return refuse(std::to_string(axis_size(problem, axis)) + " for axis " + axis);
    }
    axis_stride(tensor, axis) = broadcast ? 0 : stride;
    stride *= size;
  }
  for (int dim = problem.batch_rank - 1; dim >= 0; --dim) {
    const int64_t size = dims[leading + dim];
    if (size != 1 && size != problem.batch_size[dim]) {
      return refuse("1 or " + std::to_string(problem.batch_size[dim]) + " for batch dim " +
                    std::to_string(dim));
    }
    tensor.batch[dim] = size == 1 ? 0 : stride;
    stride *= size;
  }
  tensor.data = buffer.untyped_data();
  if (tensor.data == nullptr) {
    if (buffer.element_count() != 0) return refuse("memory");
    // A zero-size array may come without memory, and is there all the same.
    static char nothing[64];
    tensor.data = nothing;
  }
  return tensor;
}

Tensor Decoder::operand(const Problem& problem, size_t index, const ArraySpec& spec) {
  return tensor(problem, buffer(index, false), 0, spec);
}

Tensor Decoder::result(const Problem& problem, size_t index, const ArraySpec& spec) {
  return tensor(problem, buffer(index, true), 0, spec);
}

constexpr ArraySpec kLogitMax = {"logit_max", "TN", Kind::kCompute, false};
constexpr ArraySpec kLogSum = {"log_sum", "TN", Kind::kCompute, false};

Statistics Decoder::statistics(const Problem& problem, size_t first) {
  return {result(problem, first, kLogitMax), result(problem, first + 1, kLogSum)};
}

BackwardInputs Decoder::backward_inputs(const Problem& problem) {
  const size_t first = kOperandCount;
  BackwardInputs inputs;
  inputs.output_cotangent =
      operand(problem, first, {"output_cotangent", "TNV", Kind::kQuery, false});
  inputs.statistics = {operand(problem, first + 1, kLogitMax),
                       operand(problem, first + 2, kLogSum)};
  inputs.delta = operand(problem, first + 3, {"delta", "TN", Kind::kCompute, false});
  return inputs;
}

Cotangents Decoder::cotangents(const Problem& problem) {
  Cotangents cotangents;
  cotangents.query = result(problem, 0, {"query cotangent", "TNH", Kind::kQuery, true});
  cotangents.key = result(problem, 1, {"key cotangent", "SKH", Kind::kQuery, true});
  cotangents.value = result(problem, 2, {"value cotangent", "SKV", Kind::kQuery, true});
  cotangents.bias = result(problem, 3, {"bias cotangent", "nts", Kind::kFloat, true});
  cotangents.scale = result(problem, 4, {"scale cotangent", "TN", Kind::kCompute, true});
  check_summed_batches(problem, cotangents);
  return cotangents;
}

void Decoder::check_summed_batches(const Problem& problem, const Cotangents& cotangents) {
  const Tensor* const arrays[] = {&problem.key, &problem.value, &cotangents.key, &cotangents.value};
  for (int dim = 0; dim < problem.batch_rank; ++dim) {
    bool summed = false, differs = false;
    for (const Tensor* array : arrays) {
      if (array->data == nullptr) continue;
      const bool cotangent = array == &cotangents.key || array == &cotangents.value;
      summed |= cotangent && array->batch[dim] == 0 && problem.batch_size[dim] > 1;
      differs |= array->batch[dim] != 0;
    }
    if (summed && differs) {
      fail("batch dim " + std::to_string(dim) +
           " is summed over, but key, value or another cotangent differ along it");
    }
  }
}

Tensor Decoder::stacked_result(const Problem& problem, size_t index, const ArraySpec& spec,
                               int64_t& count, int64_t& stride) {
  const AnyBuffer stacked = buffer(index, true);
  count = 1;
  stride = 0;
  const Tensor result = tensor(problem, stacked, 1, spec);
  if (result.data == nullptr || !ok()) return result;
  count = stacked.dimensions()[0];
  if (count < 1) fail(std::string(spec.name) + ": expected at least one");
  stride = static_cast<int64_t>(stacked.element_count()) / std::max<int64_t>(count, 1);
  return result;
}

Problem Decoder::problem(const Attributes& attributes) {
  Problem problem;
  const AnyBuffer::Dimensions query = buffer(0, false).dimensions();
  const AnyBuffer::Dimensions key = buffer(1, false).dimensions();
  const AnyBuffer::Dimensions value = buffer(2, false).dimensions();
  const size_t rank = query.size();
  if (rank < 3 || rank > 3 + kMaxBatchDims || key.size() != rank || value.size() != rank) {
    fail("query, key and value of " + std::to_string(rank) + ", " + std::to_string(key.size()) +
         " and " + std::to_string(value.size()) + " dims: expected equal numbers from 3 to " +
         std::to_string(3 + kMaxBatchDims));
    return problem;
  }
  problem.batch_rank = static_cast<int>(rank - 3);
  for (int dim = 0; dim < problem.batch_rank; ++dim) {
    problem.batch_size[dim] = query[dim];
    problem.batches *= query[dim];
  }
  problem.query_length = query[rank - 3];
  problem.query_heads = query[rank - 2];
  problem.head_dim = query[rank - 1];
  problem.key_length = key[rank - 3];
  problem.key_heads = key[rank - 2];
  problem.value_dim = value[rank - 1];
  if (problem.key_heads < 1 || problem.query_heads % problem.key_heads != 0) {
    fail(std::to_string(problem.query_heads) + " query heads are no multiple of " +
         std::to_string(problem.key_heads) + " key heads");
  }
  if (std::max(problem.query_length, problem.key_length) >= kLongestAxis) {
    fail("lengths " + std::to_string(problem.query_length) + " and " +
         std::to_string(problem.key_length) + ": expected below " + std::to_string(kLongestAxis));
  }

  problem.window_left = attributes.window_left;
  problem.window_right = attributes.window_right;
  problem.soft_cap = attributes.soft_cap;
  problem.dropout_threshold = attributes.dropout_threshold;
  if (attributes.dropout_threshold < 0 || attributes.dropout_threshold >= 65536) {
    fail("dropout_threshold " + std::to_string(attributes.dropout_threshold) +
         ": expected 0 to 65535");
  }
  if (!is_window(attributes.window_left) || !is_window(attributes.window_right)) {
    fail("window " + std::to_string(attributes.window_left) + ", " +
         std::to_string(attributes.window_right) + ": expected -1 to " +
         std::to_string(kWidestWindow));
  }
  if (!(attributes.soft_cap >= 0 && std::isfinite(attributes.soft_cap))) {
    fail("soft_cap " + std::to_string(attributes.soft_cap) + ": expected 0 or a positive number");
  }

  Tensor* const tensors[] = {&problem.query,
                             &problem.key,
                             &problem.value,
                             &problem.bias,
                             &problem.mask,
                             &problem.sinks,
                             &problem.scale,
                             &problem.query_lengths,
                             &problem.key_value_lengths,
                             &problem.query_offset,
                             &problem.query_segment_ids,
                             &problem.key_value_segment_ids,
                             &problem.dropout_stream};
  static_assert(sizeof(tensors) / sizeof(tensors[0]) == kOperandCount);
  for (size_t i = 0; i < kOperandCount; ++i) *tensors[i] = operand(problem, i, kOperands[i]);

  if (problem.dropout_threshold != 0 && problem.dropout_stream.data == nullptr) {
    fail("dropout without a dropout_stream");
  }
  if ((problem.query_segment_ids.data == nullptr) !=
      (problem.key_value_segment_ids.data == nullptr)) {
    fail("segment ids of only one side");
  }
  return problem;
}

}  // namespace jaxflash::ffi
