// What the CUDA part was built with and for.
#pragma once

namespace jaxflash::cuda {

struct BuildFacts {
  const char* compiler;       // e.g. "nvcc 13.0.88"
  int cuda_version;           // 1000 * major + 10 * minor, as CUDART_VERSION
  const char* architectures;  // as in CMAKE_CUDA_ARCHITECTURES; 90a-real: the Hopper kernels
};

BuildFacts build_facts();

}  // namespace jaxflash::cuda
