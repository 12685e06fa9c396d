// Compiled once for each instruction set, with JAXFLASH_ISA its name.
#include "cpu/kernels.h"

#include "cpu/backward.h"
#include "cpu/forward.h"

namespace jaxflash::cpu::JAXFLASH_ISA {
namespace {

#define JAXFLASH_STRING_OF(name) #name
#define JAXFLASH_STRING(name) JAXFLASH_STRING_OF(name)

bool run_forward(const Problem& problem, const ForwardResults& results, Executor& executor) {
  return problem.query.dtype == DType::kF64 ? forward<double>(problem, results, executor)
                                            : forward<float>(problem, results, executor);
}

bool run_backward(const Problem& problem, const BackwardInputs& inputs,
                  const BackwardResults& results, Executor& executor) {
  return problem.query.dtype == DType::kF64 ? backward<double>(problem, inputs, results, executor)
                                            : backward<float>(problem, inputs, results, executor);
}

}  // namespace

extern const Kernels kKernels = {JAXFLASH_STRING(JAXFLASH_ISA), run_forward, run_backward};

}  // namespace jaxflash::cpu::JAXFLASH_ISA
