#include <cuda_runtime_api.h>

#include "cuda/common/build_facts.h"

#define JAXFLASH_TEXT(x) JAXFLASH_TEXT_OF(x)
#define JAXFLASH_TEXT_OF(x) #x

namespace jaxflash::cuda {

BuildFacts build_facts() {
  return {"nvcc " JAXFLASH_TEXT(__CUDACC_VER_MAJOR__) "." JAXFLASH_TEXT(
              __CUDACC_VER_MINOR__) "." JAXFLASH_TEXT(__CUDACC_VER_BUILD__),
          CUDART_VERSION, JAXFLASH_CUDA_ARCHITECTURES};
}

}  // namespace jaxflash::cuda
