// Definition of launch_forward, for the files that instantiate it.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/sm90/forward.cuh"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/rules_launch.cuh"
#include "cuda/sm90/tensor_map.h"

namespace jaxflash::cuda::sm90 {

// Heads whose keys and values share the L2 cache: sections of them run together. As many as take
// half of it, but no fewer than give all clusters enough tiles, and no last section of a few, since
// long tiles and short ones even out within a section.
inline uint32_t section_heads(const Problem& problem, int64_t tiles, int64_t clusters) {
  const int64_t total = problem.batches * problem.query_heads;
  const int64_t group = problem.query_heads / problem.key_heads;
  const int64_t head_bytes = problem.key_length * (problem.head_dim + problem.value_dim) * 2;
  const int64_t cached = std::max<int64_t>((24 << 20) / std::max<int64_t>(head_bytes, 1), 1);
  const int64_t least = std::max(cached * group, tiles_of(3 * clusters / 2, tiles));
  int64_t heads = tiles_of(least, group) * group;
  while (heads < total && total % heads != 0 && total % heads < least) heads += group;
  return static_cast<uint32_t>(std::min(heads, total));
}

template <class T, int D, int V, Reach kReach, class Policy>
Error launch_forward(ForwardParams params, Cursor& cursor, bool launch, Stream stream) {
  static KernelCache cache;
  using F = Forward<T, D, V, kReach, Policy>;
  constexpr ForwardTile kTile = F::kTile;
  constexpr int kShared = sizeof(typename F::Shared);
  const auto kernel = forward_kernel<T, D, V, kReach, Policy>;
  const Problem& problem = params.problem;
  const int64_t heads = problem.batches * problem.query_heads;
  const int64_t tiles = tiles_of(problem.query_length, kTile.rows() * kTile.cluster);
  if (heads * tiles == 0) return nullptr;
  if (heads * tiles > INT32_MAX) return "jaxflash: more than 2^31 tiles";

  // Tiles that take equally long come in a fixed order, which needs no count.
  const bool uneven = Policy::kEverything || !rows_see_all_keys(problem);
  if (uneven) params.next_unit = cursor.take<uint32_t>(1);
  if (Policy::kEverything) params.maps = take_maps(problem, kTile.rows(), kTile.keys, cursor);
  if (!launch) return nullptr;
  if (!cursor.fits()) return "jaxflash: the workspace is too small";

  int arch = 0, processors = 0;
  Error error = prepare_kernel(kernel, cache, [](int) { return kShared; }, arch);
  if (error == nullptr) error = count_processors(processors);
  if (error == nullptr) {
    error = make_map(problem, problem.query, problem.head_dim, problem.query_heads,
                     problem.query_length, 64, params.query);
  }
  if (error == nullptr) {
    error = make_map(problem, problem.key, problem.head_dim, problem.key_heads, problem.key_length,
                     kTile.keys, params.key);
  }
  if (error == nullptr) {
    error = make_map(problem, problem.value, problem.value_dim, problem.key_heads,
                     problem.key_length, kTile.keys, params.value);
  }
  if (error == nullptr && uneven) {
    error = text_of(cudaMemsetAsync(params.next_unit, 0, sizeof(uint32_t), stream));
  }
  if (error != nullptr) return error;
  if (Policy::kEverything) {
    error = prepare_rules(kTile.rows(), kTile.keys, kTile.array_bytes(), params, stream);
  }
  if (error != nullptr) return error;

  const int64_t clusters = std::min<int64_t>(heads * tiles, processors / kTile.cluster);
  params.group = static_cast<uint32_t>(problem.query_heads / problem.key_heads);
  params.schedule.tiles = static_cast<uint32_t>(tiles);
  params.schedule.heads = static_cast<uint32_t>(heads);
  params.schedule.section_heads = section_heads(problem, tiles, clusters);
  params.schedule.last_first = problem.window_right != kUnlimited;  // the longest first

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
