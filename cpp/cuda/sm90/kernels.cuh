// The Hopper kernels there are, as the dispatcher sees them; kernels.inc and backward_kernels.inc
// list them.
#pragma once

#include "cuda/common/rules.cuh"
#include "cuda/sm80/element.cuh"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/tensor_map.h"

namespace jaxflash::cuda::sm90 {

using sm80::BF16;
using sm80::Everything;
using sm80::F16;
using sm80::Ranges;

#define JAXFLASH_KERNEL(T, D, V, REACH, POLICY)                                               \
  extern template Error launch_forward<T, D, V, Reach::REACH, POLICY>(ForwardParams, Cursor&, \
                                                                      bool, Stream);
#include "cuda/sm90/kernels.inc"
#undef JAXFLASH_KERNEL

#define JAXFLASH_KERNEL(T, D, POLICY)                  \
  extern template Error launch_backward<T, D, POLICY>( \
      BackwardParams, sm80::QueryFinishParams, sm80::BiasFinishParams, Cursor&, bool, Stream);
#include "cuda/sm90/backward_kernels.inc"
#undef JAXFLASH_KERNEL

}  // namespace jaxflash::cuda::sm90
