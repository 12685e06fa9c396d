// Launches of the Hopper kernels.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/launch.h"
#include "cuda/sm90/params.h"
#include "cuda/sm90/tiles.h"

namespace jaxflash::cuda::sm90 {

// Launches the forward kernel. With `launch` false it only adds up the workspace that it would
// take.
template <class T, int D, int V, Reach kReach, class Policy>
Error launch_forward(ForwardParams params, Cursor& cursor, bool launch, Stream stream);

// Launches the backward kernel and what belongs before and after it; likewise.
template <class T, int D, class Policy>
Error launch_backward(BackwardParams params, sm80::QueryFinishParams finish,
                      sm80::BiasFinishParams bias, Cursor& cursor, bool launch, Stream stream);

}  // namespace jaxflash::cuda::sm90
