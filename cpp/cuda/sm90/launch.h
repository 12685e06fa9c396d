// Launches of the Hopper kernels.
#pragma once

#include "cuda/launch.h"
#include "cuda/sm90/params.h"

namespace jaxflash::cuda::sm90 {

template <class T, int D, int V>
Error launch_forward(ForwardParams params, Stream stream);

}  // namespace jaxflash::cuda::sm90
