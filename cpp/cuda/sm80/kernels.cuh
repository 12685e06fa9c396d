// The kernels there are, as the dispatcher sees them; kernels.inc lists them.
#pragma once

#include "cuda/common/rules.cuh"
#include "cuda/sm80/element.cuh"
#include "cuda/sm80/launch.cuh"

namespace jaxflash::cuda::sm80 {

#define JAXFLASH_KERNEL(T, D, Policy)                                                            \
  extern template Error launch_forward<T, D, Policy>(ForwardParams, Cursor&, bool, int, Stream); \
  extern template Error launch_backward<T, D, Policy>(                                           \
      BackwardParams, QueryFinishParams, BiasFinishParams, bool, Cursor&, bool, int, Stream);
#include "cuda/sm80/kernels.inc"
#undef JAXFLASH_KERNEL

}  // namespace jaxflash::cuda::sm80
