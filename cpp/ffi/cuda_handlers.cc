#include "ffi/cuda_handlers.h"

#include <string>

#include "cuda/launch.h"
#include "ffi/decode.h"

namespace jaxflash::ffi {
namespace {

using xla::ffi::AnyBuffer;
using xla::ffi::Error;
using xla::ffi::ErrorOr;
using xla::ffi::PlatformStream;
using xla::ffi::RemainingArgs;
using xla::ffi::RemainingRets;
using xla::ffi::Unexpected;

cuda::Workspace workspace_at(RemainingRets returns, size_t index) {
  auto buffer = returns.get<AnyBuffer>(index);
  if (!buffer.has_value()) return {};
  return {(*buffer)->untyped_data(), (*buffer)->size_bytes()};
}

cuda::Precision precision_of(Decoder& decoder, int64_t precision) {
  if (precision != 0 && precision != 1) {
    decoder.fail("precision is " + std::to_string(precision) + ", expected 0 or 1");
  }
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
  results.statistics = decoder.statistics(problem, 1);
  results.workspace = workspace_at(returns, 3);
  const cuda::Precision products = precision_of(decoder, precision);
  if (!decoder.ok()) return decoder.error();
  return error_of(cuda::forward(problem, results, products, stream));
}

cuda::BackwardResults backward_results(Decoder& decoder, const Problem& problem,
                                       bool deterministic) {
  cuda::BackwardResults results{decoder.cotangents(problem)};
  results.deterministic = deterministic;
  return results;
}

Error backward(cuda::Stream stream, RemainingArgs operands, RemainingRets returns,
               int64_t window_left, int64_t window_right, double soft_cap,
               int64_t dropout_threshold, int64_t precision, int64_t deterministic) {
  Decoder decoder(operands, returns);
  const Problem problem = decoder.problem({window_left, window_right, soft_cap, dropout_threshold});
  if (!decoder.ok()) return decoder.error();
  const BackwardInputs inputs = decoder.backward_inputs(problem);
  cuda::BackwardResults results = backward_results(decoder, problem, deterministic != 0);
  results.workspace = workspace_at(returns, 5);
  const cuda::Precision products = precision_of(decoder, precision);
  if (!decoder.ok()) return decoder.error();
  return error_of(cuda::backward(problem, inputs, results, products, stream));
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

// Buffers of which only dtype and shape count, as the decoder takes them.
class ShapeBuffers {
 public:
  explicit ShapeBuffers(const std::vector<BufferShape>& shapes)
      : buffers_(shapes.size()),
        argument_types_(shapes.size(), XLA_FFI_ArgType_BUFFER),
        result_types_(shapes.size(), XLA_FFI_RetType_BUFFER) {
    // The decoder refuses arrays without memory. As aligned as XLA's, on which the choice of
    // kernels depends.
    alignas(256) static char nothing[64];
    for (size_t i = 0; i < shapes.size(); ++i) {
      buffers_[i].struct_size = sizeof(XLA_FFI_Buffer);
      buffers_[i].dtype = shapes[i].dtype;
      buffers_[i].data = nothing;
      buffers_[i].rank = static_cast<int64_t>(shapes[i].dims.size());
      buffers_[i].dims = const_cast<int64_t*>(shapes[i].dims.data());
      pointers_.push_back(&buffers_[i]);
    }
    const auto size = static_cast<int64_t>(shapes.size());
    arguments_ = {sizeof(XLA_FFI_Args), nullptr, size, argument_types_.data(), pointers_.data()};
    results_ = {sizeof(XLA_FFI_Rets), nullptr, size, result_types_.data(), pointers_.data()};
  }

  RemainingArgs as_operands() const { return RemainingArgs(&arguments_, 0); }
  RemainingRets as_results() const { return RemainingRets(&results_, 0); }

 private:
  std::vector<XLA_FFI_Buffer> buffers_;
  std::vector<void*> pointers_;
  std::vector<XLA_FFI_ArgType> argument_types_;
  std::vector<XLA_FFI_RetType> result_types_;
  XLA_FFI_Args arguments_;
  XLA_FFI_Rets results_;
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

namespace {

// `of(problem)` of a forward call, and `of(problem, results)` of a backward call.
template <class Of>
auto of_forward(const std::vector<BufferShape>& operands, const Attributes& attributes,
                const Of& of) -> ErrorOr<decltype(of(Problem()))> {
  const ShapeBuffers operand_buffers(operands), result_buffers({});
  Decoder decoder(operand_buffers.as_operands(), result_buffers.as_results());
  const Problem problem = decoder.problem(attributes);
  if (!decoder.ok()) return Unexpected(decoder.error());
  return of(problem);
}
template <class Of>
auto of_backward(const std::vector<BufferShape>& operands, const std::vector<BufferShape>& results,
                 const Attributes& attributes, bool deterministic, const Of& of)
    -> ErrorOr<decltype(of(Problem(), cuda::BackwardResults()))> {
  const ShapeBuffers operand_buffers(operands), result_buffers(results);
  Decoder decoder(operand_buffers.as_operands(), result_buffers.as_results());
  const Problem problem = decoder.problem(attributes);
  if (!decoder.ok()) return Unexpected(decoder.error());
  const cuda::BackwardResults wanted = backward_results(decoder, problem, deterministic);
  if (!decoder.ok()) return Unexpected(decoder.error());
  return of(problem, wanted);
}

}  // namespace

ErrorOr<int64_t> cuda_forward_workspace(const std::vector<BufferShape>& operands,
                                        const Attributes& attributes) {
  return of_forward(operands, attributes, [](const Problem& problem) {
    return static_cast<int64_t>(cuda::forward_workspace_bytes(problem));
  });
}

ErrorOr<int64_t> cuda_backward_workspace(const std::vector<BufferShape>& operands,
                                         const std::vector<BufferShape>& results,
                                         const Attributes& attributes, bool deterministic) {
  return of_backward(operands, results, attributes, deterministic,
                     [](const Problem& problem, const cuda::BackwardResults& wanted) {
                       return static_cast<int64_t>(cuda::backward_workspace_bytes(problem, wanted));
                     });
}

ErrorOr<std::string> cuda_forward_kernel(const std::vector<BufferShape>& operands,
                                         const Attributes& attributes, int capability) {
  return of_forward(operands, attributes, [&](const Problem& problem) {
    return cuda::forward_kernel(problem, capability);
  });
}

ErrorOr<std::string> cuda_backward_kernel(const std::vector<BufferShape>& operands,
                                          const std::vector<BufferShape>& results,
                                          const Attributes& attributes, bool deterministic,
                                          int capability) {
  return of_backward(operands, results, attributes, deterministic,
                     [&](const Problem& problem, const cuda::BackwardResults& wanted) {
                       return cuda::backward_kernel(problem, wanted, capability);
                     });
}

}  // namespace jaxflash::ffi
