// What launchers of kernels that apply all rules share.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/common/maps.cuh"
#include "cuda/sm90/params.h"
#include "cuda/sm90/tensor_map.h"

namespace jaxflash::cuda::sm90 {

// Which of bias and mask are copied in tiles of 64 rows, as far as a stage has `room` bytes for
// them.
inline sm80::ArrayStaging stage_arrays(const Problem& problem, int keys, int room) {
  const auto stage = [&](const Tensor& array) {
    const int size = array_bytes(array.dtype), bytes = 64 * keys * size;
    const bool copied = array.data != nullptr && can_map(array, problem.key_length, size);
    if (!copied || bytes > room) return 0;
    room -= bytes;
    return bytes;
  };
  sm80::ArrayStaging staging;
  staging.bias_bytes = stage(problem.bias);
  staging.mask_bytes = stage(problem.mask);
  return staging;
}

// What the rules beyond ranges need, for tiles of `rows` times `keys`. Arrays that the driver makes
// no map of are read from global memory, as those are that are not copied anyway.
template <class Params>
Error prepare_rules(int rows, int keys, int room, Params& params, Stream stream) {
  const Problem& problem = params.problem;
  launch_maps(problem, rows, keys, params.maps, stream);
  params.staging = stage_arrays(problem, keys, room);
  const auto make = [&](const Tensor& array, TileMap& map, int& bytes) {
    if (bytes != 0 && make_array_map(problem, array, keys, map) != nullptr) bytes = 0;
  };
  make(problem.bias, params.bias, params.staging.bias_bytes);
  make(problem.mask, params.mask, params.staging.mask_bytes);
  return text_of(cudaGetLastError());
}

}  // namespace jaxflash::cuda::sm90
