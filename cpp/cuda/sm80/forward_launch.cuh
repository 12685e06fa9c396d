// Definition of launch_forward, for the files that instantiate it.
#pragma once

#include "cuda/common/combine.cuh"
#include "cuda/common/maps.cuh"
#include "cuda/sm80/forward.cuh"
#include "cuda/sm80/launch.cuh"

namespace jaxflash::cuda::sm80 {

template <class T, int D, class Policy>
Error launch_forward(ForwardParams params, Cursor& cursor, bool launch, int arch, Stream stream) {
  static KernelCache cache;
  const auto kernel = forward_kernel<T, D, Policy>;
  if (launch) {
    if (const Error error = prepare_kernel(kernel, cache, most_shared_bytes, arch)) return error;
  }
  const ForwardTile tile = forward_tile(kIsFloat<T>, D, Policy::kEverything, arch);
  const Problem& problem = params.problem;
  const int64_t heads = problem.batches * problem.query_heads;
  const int64_t tiles = tiles_of(problem.query_length, tile.rows());
  if (heads * tiles == 0) return nullptr;
  if (heads * tiles > INT32_MAX) return "jaxflash: more than 2^31 blocks";

  if (Policy::kEverything) params.maps = take_maps(problem, tile.rows(), tile.keys, cursor);
  params.splits = splits_of(heads * tiles, tiles_of(problem.key_length, tile.keys));
  if (params.splits > 1) {
    const int64_t rows = params.splits * heads * problem.query_length;
    params.split_output = cursor.take<float>(rows * D);
    params.split_logit_max = cursor.take<float>(rows);
    params.split_log_sum = cursor.take<float>(rows);
  }
  if (!launch) return nullptr;
  if (!cursor.fits()) return "jaxflash: the workspace is too small";

  if (Policy::kEverything) launch_maps(problem, tile.rows(), tile.keys, params.maps, stream);
  params.schedule.tiles = static_cast<uint32_t>(tiles);
  params.schedule.heads = static_cast<uint32_t>(heads);
  params.schedule.section_heads = section_heads(problem, tiles, kSize<T>);
  params.schedule.last_first = problem.window_right != kUnlimited;
  int shared = tile.shared_bytes(D, kSize<T>);
  if (Policy::kEverything) {
    params.staging = stage_arrays(problem, tile.rows() * tile.keys, tile.stages,
                                  most_shared_bytes(arch), shared);
  }
  const dim3 grid(static_cast<unsigned>(heads * tiles), params.splits);
  kernel<<<grid, tile.threads(), shared, stream>>>(params);
  if (params.splits > 1) combine_splits<T, D>(params, stream);
  return text_of(cudaGetLastError());
}

}  // namespace jaxflash::cuda::sm80
