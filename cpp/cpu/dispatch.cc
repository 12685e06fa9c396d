#include "cpu/kernels.h"

namespace jaxflash::cpu {
namespace {

const Kernels& choose() {
#if defined(JAXFLASH_HAS_AVX512)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("fma")) {
    return avx512::kKernels;
  }
#endif
#if defined(JAXFLASH_HAS_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::kKernels;
#endif
  return baseline::kKernels;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace

const char* instruction_set() { return kernels().instruction_set; }

const char* const* instruction_sets() {
  static const char* const sets[] = {"baseline",
#if defined(JAXFLASH_HAS_AVX2)
                                     "avx2",
#endif
#if defined(JAXFLASH_HAS_AVX512)
                                     "avx512",
#endif
                                     nullptr};
  return sets;
}

bool forward(const Problem& problem, const ForwardResults& results, Executor& executor) {
  return kernels().forward(problem, results, executor);
}

bool backward(const Problem& problem, const BackwardInputs& inputs, const BackwardResults& results,
              Executor& executor) {
  return kernels().backward(problem, inputs, results, executor);
}

}  // namespace jaxflash::cpu
