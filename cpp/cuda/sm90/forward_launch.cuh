// Definition of launch_forward, for the files that instantiate it.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/sm90/forward.cuh"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/tensor_map.h"

namespace jaxflash::cuda::sm90 {

// Heads whose keys and values share the L2 cache: sections of them run together. As many as take half
// of it, and at least enough for two turns of all blocks.
inline uint32_t section_heads(const Problem& problem, int64_t tiles, int64_t clusters) {
  const int64_t group = problem.query_heads / problem.key_heads;
  const int64_t head_bytes = problem.key_length * (problem.head_dim + problem.value_dim) * 2;
  const int64_t key_heads = std::max<int64_t>((24 << 20) / std::max<int64_t>(head_bytes, 1), 1);
  const int64_t heads = std::max(key_heads * group, tiles_of(2 * clusters, tiles));
  return static_cast<uint32_t>(
      std::min(tiles_of(heads, group) * group, problem.batches * problem.query_heads));
}

template <class T, int D, int V>
Error launch_forward(ForwardParams params, Stream stream) {
  static KernelCache cache;
  using F = Forward<T, D, V>;
  constexpr ForwardTile kTile = F::kTile;
  const auto kernel = forward_kernel<T, D, V>;
  constexpr int kShared = sizeof(typename F::Shared);
  int arch = 0;
  if (const Error error = prepare_kernel(kernel, cache, [](int) { return kShared; }, arch)) {
    return error;
  }
  const Problem& problem = params.problem;
  const int64_t heads = problem.batches * problem.query_heads;
  const int64_t tiles = tiles_of(problem.query_length, kTile.rows() * kTile.cluster);
  if (heads * tiles == 0) return nullptr;
  if (heads * tiles > INT32_MAX) return "jaxflash: more than 2^31 tiles";

  Error error = make_map(problem, problem.query, problem.head_dim, problem.query_heads,
                         problem.query_length, 64, params.query);
  if (error == nullptr) {
    error = make_map(problem, problem.key, problem.head_dim, problem.key_heads, problem.key_length,
                     kTile.keys, params.key);
  }
  if (error == nullptr) {
    error = make_map(problem, problem.value, problem.value_dim, problem.key_heads,
                     problem.key_length, kTile.keys, params.value);
  }
  if (error != nullptr) return error;

  params.group = static_cast<uint32_t>(problem.query_heads / problem.key_heads);
  params.schedule.tiles = static_cast<uint32_t>(tiles);
  params.schedule.heads = static_cast<uint32_t>(heads);
  params.schedule.last_first = problem.window_right != kUnlimited;
  int device = 0, processors = 0;
  error = text_of(cudaGetDevice(&device));
  if (error == nullptr) {
    error = text_of(
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  }
  if (error != nullptr) return error;
  const int64_t clusters = std::min<int64_t>(heads * tiles, processors / kTile.cluster);
  params.schedule.section_heads = section_heads(problem, tiles, clusters);

  if (params.next_unit != nullptr) {
    error = text_of(cudaMemsetAsync(params.next_unit, 0, sizeof(uint32_t), stream));
    if (error != nullptr) return error;
  }
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = kTile.cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(clusters * kTile.cluster));
  config.blockDim = dim3(kTile.threads());
  config.dynamicSmemBytes = kShared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return text_of(cudaLaunchKernelEx(&config, kernel, params));
}

}  // namespace jaxflash::cuda::sm90
