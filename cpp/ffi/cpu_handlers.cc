#include "ffi/cpu_handlers.h"

#include <functional>
#include <utility>

#include "cpu/launch.h"
#include "ffi/decode.h"

namespace jaxflash::ffi {
namespace {

using xla::ffi::Error;
using xla::ffi::RemainingArgs;
using xla::ffi::RemainingRets;
using xla::ffi::ThreadPool;

class XlaExecutor : public cpu::Executor {
 public:
  explicit XlaExecutor(ThreadPool& pool) : pool_(pool) {}

  int64_t thread_count() const override { return pool_.num_threads(); }
  void schedule(std::function<void()> work) override { pool_.Schedule(std::move(work)); }

 private:
  ThreadPool& pool_;
};

// Runs `launch`, which returns whether it had the memory it needs. Nothing may leave a handler as
// an exception: XLA is compiled without them.
template <class Launch>
Error run(const Launch& launch) {
  try {
    if (launch()) return Error::Success();
  } catch (const std::exception&) {
    // std::bad_alloc from the closures given to the thread pool; reported below.
  }
  return Error(xla::ffi::ErrorCode::kResourceExhausted, "jaxflash: no memory for scratch arrays");
}

// Sums and statistics are in the compute type: float, or double for double.
void require_compute_type(Decoder& decoder, const Problem& problem, const Tensor& tensor,
                          const char* name) {
  const DType compute = problem.query.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  decoder.require(tensor.data == nullptr || tensor.dtype == compute,
                  std::string(name) + ": expected the compute dtype");
}

void require_common_types(Decoder& decoder, const Problem& problem, const Statistics& statistics) {
  require_compute_type(decoder, problem, problem.sinks, "sinks");
  require_compute_type(decoder, problem, problem.scale, "scale");
  require_compute_type(decoder, problem, statistics.logit_max, "logit_max");
  require_compute_type(decoder, problem, statistics.log_sum, "log_sum");
}

Error forward(ThreadPool pool, RemainingArgs operands, RemainingRets returns, int64_t window_left,
              int64_t window_right, double soft_cap, int64_t dropout_threshold) {
  Decoder decoder(operands, returns);
  const Problem problem = decoder.problem({window_left, window_right, soft_cap, dropout_threshold});
  if (!decoder.ok()) return decoder.error();
  cpu::ForwardResults results;
  results.output = decoder.result(problem, 0, {"output", "TNV", false});
  results.statistics.logit_max = decoder.result(problem, 1, {"logit_max", "TN", false});
  results.statistics.log_sum = decoder.result(problem, 2, {"log_sum", "TN", false});
  require_common_types(decoder, problem, results.statistics);
  if (!decoder.ok()) return decoder.error();
  XlaExecutor executor(pool);
  return run([&] { return cpu::forward(problem, results, executor); });
}

Error backward(ThreadPool pool, RemainingArgs operands, RemainingRets returns, int64_t window_left,
               int64_t window_right, double soft_cap, int64_t dropout_threshold) {
  Decoder decoder(operands, returns);
  const Problem problem = decoder.problem({window_left, window_right, soft_cap, dropout_threshold});
  if (!decoder.ok()) return decoder.error();

  cpu::BackwardInputs inputs;
  size_t at = kOperandCount;
  inputs.output_cotangent = decoder.operand(problem, at++, {"output_cotangent", "TNV", false});
  inputs.statistics.logit_max = decoder.operand(problem, at++, {"logit_max", "TN", false});
  inputs.statistics.log_sum = decoder.operand(problem, at++, {"log_sum", "TN", false});
  inputs.delta = decoder.operand(problem, at++, {"delta", "TN", false});
  require_common_types(decoder, problem, inputs.statistics);
  require_compute_type(decoder, problem, inputs.delta, "delta");

  cpu::BackwardResults results;
  results.query = decoder.result(problem, 0, {"query cotangent", "TNH", true});
  results.key = decoder.result(problem, 1, {"key cotangent", "SKH", true});
  results.value = decoder.result(problem, 2, {"value cotangent", "SKV", true});
  results.bias = decoder.result(problem, 3, {"bias cotangent", "nts", true});
  results.scale = decoder.result(problem, 4, {"scale cotangent", "TN", true});
  results.workspace = decoder.stacked_result(problem, 5, {"workspace", "TNH", true}, results.chunks,
                                             results.chunk_stride);
  require_compute_type(decoder, problem, results.scale, "scale cotangent");
  require_compute_type(decoder, problem, results.workspace, "workspace");
  const bool wants_query = results.query.data != nullptr || results.scale.data != nullptr;
  const bool query_can_sum =
      results.query.data != nullptr && results.query.dtype == problem.query.dtype &&
      (problem.query.dtype == DType::kF32 || problem.query.dtype == DType::kF64);
  decoder.require(!wants_query || results.workspace.data != nullptr || query_can_sum,
                  "the query cotangent needs a workspace");
  for (int dim = 0; dim < problem.batch_rank; ++dim) {
    const bool agree = (results.key.batch[dim] == 0) == (results.value.batch[dim] == 0);
    decoder.require(results.key.data == nullptr || results.value.data == nullptr || agree,
                    "cotangents of key and value are summed over different batch dims");
  }
  if (!decoder.ok()) return decoder.error();
  XlaExecutor executor(pool);
  return run([&] { return cpu::backward(problem, inputs, results, executor); });
}

auto bind_attributes() {
  return xla::ffi::Ffi::Bind()
      .Ctx<ThreadPool>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<int64_t>("window_left")
      .Attr<int64_t>("window_right")
      .Attr<double>("soft_cap")
      .Attr<int64_t>("dropout_threshold");
}

}  // namespace

XLA_FFI_Error* cpu_forward(XLA_FFI_CallFrame* frame) {
  static const auto handler = bind_attributes().To(forward);
  return handler->Call(frame);
}

XLA_FFI_Error* cpu_backward(XLA_FFI_CallFrame* frame) {
  static const auto handler = bind_attributes().To(backward);
  return handler->Call(frame);
}

}  // namespace jaxflash::ffi
