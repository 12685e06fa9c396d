#include "ffi/cpu_handlers.h"

#include <exception>
#include <functional>
#include <string>
#include <utility>

#include "cpu/launch.h"
#include "ffi/decode.h"

namespace jaxflash::ffi {
namespace {

using xla::ffi::Error;
using xla::ffi::ErrorCode;
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

// Calls `handle`. Nothing may leave a handler as an exception: XLA is compiled without them.
template <class Handle>
Error guarded(const Handle& handle) {
  try {
    return handle();
  } catch (const std::exception& error) {
    return Error(ErrorCode::kResourceExhausted, std::string("jaxflash: ") + error.what());
  }
}

Error status_of(bool had_memory) {
  if (had_memory) return Error::Success();
  return Error(ErrorCode::kResourceExhausted, "jaxflash: no memory for scratch arrays");
}

Error forward(ThreadPool pool, Decoder decoder, const Attributes& attributes) {
  const Problem problem = decoder.problem(attributes);
  if (!decoder.ok()) return decoder.error();
  cpu::ForwardResults results;
  results.output = decoder.result(problem, 0, {"output", "TNV", Kind::kQuery, false});
  results.statistics = decoder.statistics(problem, 1);
  if (!decoder.ok()) return decoder.error();
  XlaExecutor executor(pool);
  return status_of(cpu::forward(problem, results, executor));
}

cpu::BackwardResults decode_results(Decoder& decoder, const Problem& problem) {
  cpu::BackwardResults results{decoder.cotangents(problem)};
  results.workspace = decoder.stacked_result(problem, 5, {"workspace", "TNH", Kind::kCompute, true},
                                             results.chunks, results.chunk_stride);
  return results;
}

// What the kernel relies on beyond the single arrays' shapes.
void check_results(Decoder& decoder, const Problem& problem, const cpu::BackwardResults& results) {
  const bool wants_query = results.query.data != nullptr || results.scale.data != nullptr;
  const bool query_can_sum = results.query.data != nullptr && (problem.query.dtype == DType::kF32 ||
                                                               problem.query.dtype == DType::kF64);
  if (wants_query && results.workspace.data == nullptr && !query_can_sum) {
    decoder.fail("the query cotangent needs a workspace");
  }
  if (problem.batches == 0) decoder.fail("an empty batch has no cotangents to compute");
}

Error backward(ThreadPool pool, Decoder decoder, const Attributes& attributes) {
  const Problem problem = decoder.problem(attributes);
  if (!decoder.ok()) return decoder.error();
  const BackwardInputs inputs = decoder.backward_inputs(problem);
  const cpu::BackwardResults results = decode_results(decoder, problem);
  check_results(decoder, problem, results);
  if (!decoder.ok()) return decoder.error();
  XlaExecutor executor(pool);
  return status_of(cpu::backward(problem, inputs, results, executor));
}

template <Error (*kHandle)(ThreadPool, Decoder, const Attributes&)>
XLA_FFI_Error* call(XLA_FFI_CallFrame* frame) {
  static const auto handler =
      xla::ffi::Ffi::Bind()
          .Ctx<ThreadPool>()
          .RemainingArgs()
          .RemainingRets()
          .Attr<int64_t>("window_left")
          .Attr<int64_t>("window_right")
          .Attr<double>("soft_cap")
          .Attr<int64_t>("dropout_threshold")
          .To([](ThreadPool pool, RemainingArgs operands, RemainingRets results,
                 int64_t window_left, int64_t window_right, double soft_cap,
                 int64_t dropout_threshold) {
            return guarded([&] {
              return kHandle(pool, Decoder(operands, results),
                             {window_left, window_right, soft_cap, dropout_threshold});
            });
          });
  return handler->Call(frame);
}

}  // namespace

XLA_FFI_Error* cpu_forward(XLA_FFI_CallFrame* frame) { return call<forward>(frame); }

XLA_FFI_Error* cpu_backward(XLA_FFI_CallFrame* frame) { return call<backward>(frame); }

}  // namespace jaxflash::ffi
