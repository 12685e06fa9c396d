#include "ffi/cuda_handlers.h"

#include "cuda/launch.h"
#include "ffi/decode.h"

namespace jaxflash::ffi {
namespace {

using xla::ffi::AnyBuffer;
using xla::ffi::Error;
using xla::ffi::PlatformStream;
using xla::ffi::RemainingArgs;
using xla::ffi::RemainingRets;

cuda::Workspace workspace_at(RemainingRets returns, size_t index) {
  auto buffer = returns.get<AnyBuffer>(index);
  if (!buffer.has_value()) return {};
  return {(*buffer)->untyped_data(), (*buffer)->size_bytes()};
}

cuda::Precision precision_of(int64_t precision) {
  return precision == 1 ? cuda::Precision::kTF32 : cuda::Precision::kFloat;
}

Error error_of(cuda::Error error) {
  return error == nullptr ? Error::Success() : Error::Internal(error);
}

Error forward(cuda::Stream stream, RemainingArgs operands, RemainingRets returns,
              int64_t window_left, int64_t window_right, double soft_cap, int64_t dropout_threshold,
              int64_t precision) {
  Decoder decoder(operands, returns);
  const Problem problem = decoder.problem({window_left, window_right, soft_cap, dropout_threshold});
  if (!decoder.ok()) return decoder.error();
  cuda::ForwardResults results;
  results.output = decoder.result(problem, 0, {"output", "TNV", Kind::kQuery, false});
  results.statistics = decoder.result_statistics(problem, 1);
  results.workspace = workspace_at(returns, 3);
  if (!decoder.ok()) return decoder.error();
  return error_of(cuda::forward(problem, results, precision_of(precision), stream));
}

cuda::BackwardResults backward_results(Decoder& decoder, const Problem& problem,
                                       bool deterministic) {
  cuda::BackwardResults results;
  results.query = decoder.result(problem, 0, {"query cotangent", "TNH", Kind::kQuery, true});
  results.key = decoder.result(problem, 1, {"key cotangent", "SKH", Kind::kQuery, true});
  results.value = decoder.result(problem, 2, {"value cotangent", "SKV", Kind::kQuery, true});
  results.bias = decoder.result(problem, 3, {"bias cotangent", "nts", Kind::kFloat, true});
  results.scale = decoder.result(problem, 4, {"scale cotangent", "TN", Kind::kCompute, true});
  results.deterministic = deterministic;
  decoder.check_summed_batches(problem, results.key, results.value);
  return results;
}

Error backward(cuda::Stream stream, RemainingArgs operands, RemainingRets returns,
               int64_t window_left, int64_t window_right, double soft_cap,
               int64_t dropout_threshold, int64_t precision, int64_t deterministic) {
  Decoder decoder(operands, returns);
  const Problem problem = decoder.problem({window_left, window_right, soft_cap, dropout_threshold});
  if (!decoder.ok()) return decoder.error();
  const size_t first = kOperandCount;
  cuda::BackwardInputs inputs;
  inputs.output_cotangent =
      decoder.operand(problem, first, {"output_cotangent", "TNV", Kind::kQuery, false});
  inputs.statistics = decoder.operand_statistics(problem, first + 1);
  inputs.delta = decoder.operand(problem, first + 3, {"delta", "TN", Kind::kCompute, false});
  cuda::BackwardResults results = backward_results(decoder, problem, deterministic != 0);
  results.workspace = workspace_at(returns, 5);
  if (!decoder.ok()) return decoder.error();
  return error_of(cuda::backward(problem, inputs, results, precision_of(precision), stream));
}

auto bind_attributes() {
  return xla::ffi::Ffi::Bind()
      .Ctx<PlatformStream<cuda::Stream>>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<int64_t>("window_left")
      .Attr<int64_t>("window_right")
      .Attr<double>("soft_cap")
      .Attr<int64_t>("dropout_threshold")
      .Attr<int64_t>("precision");
}

// Buffers without memory, as the decoder takes them.
struct FakeBuffers {
  explicit FakeBuffers(const std::vector<BufferShape>& shapes) : buffers(shapes.size()) {
    for (size_t i = 0; i < shapes.size(); ++i) {
      buffers[i] = {};
      buffers[i].struct_size = sizeof(XLA_FFI_Buffer);
      buffers[i].dtype = shapes[i].dtype;
      buffers[i].rank = static_cast<int64_t>(shapes[i].dims.size());
      buffers[i].dims = const_cast<int64_t*>(shapes[i].dims.data());
      pointers.push_back(&buffers[i]);
    }
    argument_types.assign(shapes.size(), XLA_FFI_ArgType_BUFFER);
    result_types.assign(shapes.size(), XLA_FFI_RetType_BUFFER);
    const auto size = static_cast<int64_t>(shapes.size());
    arguments = {sizeof(XLA_FFI_Args), nullptr, size, argument_types.data(), pointers.data()};
    results = {sizeof(XLA_FFI_Rets), nullptr, size, result_types.data(), pointers.data()};
  }

  std::vector<XLA_FFI_Buffer> buffers;
  std::vector<void*> pointers;
  std::vector<XLA_FFI_ArgType> argument_types;
  std::vector<XLA_FFI_RetType> result_types;
  XLA_FFI_Args arguments;
  XLA_FFI_Rets results;
};

}  // namespace

XLA_FFI_Error* cuda_forward(XLA_FFI_CallFrame* frame) {
  static const auto handler =
      bind_attributes().To(forward, {xla::ffi::Traits::kCmdBufferCompatible});
  return handler->Call(frame);
}

XLA_FFI_Error* cuda_backward(XLA_FFI_CallFrame* frame) {
  static const auto handler = bind_attributes()
                                  .Attr<int64_t>("deterministic")
                                  .To(backward, {xla::ffi::Traits::kCmdBufferCompatible});
  return handler->Call(frame);
}

int64_t cuda_forward_workspace(const std::vector<BufferShape>& operands,
                               const Attributes& attributes, std::string& message) {
  FakeBuffers fake_operands(operands), fake_results({});
  Decoder decoder(RemainingArgs(&fake_operands.arguments, 0),
                  RemainingRets(&fake_results.results, 0));
  const Problem problem = decoder.problem(attributes);
  if (decoder.ok()) return static_cast<int64_t>(cuda::forward_workspace_bytes(problem));
  message = decoder.error().message();
  return -1;
}

int64_t cuda_backward_workspace(const std::vector<BufferShape>& operands,
                                const std::vector<BufferShape>& results,
                                const Attributes& attributes, bool deterministic,
                                std::string& message) {
  FakeBuffers fake_operands(operands), fake_results(results);
  Decoder decoder(RemainingArgs(&fake_operands.arguments, 0),
                  RemainingRets(&fake_results.results, 0));
  const Problem problem = decoder.problem(attributes);
  if (decoder.ok()) {
    const cuda::BackwardResults wanted = backward_results(decoder, problem, deterministic);
    if (decoder.ok()) {
      return static_cast<int64_t>(cuda::backward_workspace_bytes(problem, wanted));
    }
  }
  message = decoder.error().message();
  return -1;
}

}  // namespace jaxflash::ffi
