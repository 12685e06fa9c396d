// Definition of launch_backward, for the files that instantiate it.
#pragma once

#include "cuda/common/finish.cuh"
#include "cuda/common/maps.cuh"
#include "cuda/sm80/backward.cuh"
#include "cuda/sm80/launch.cuh"

namespace jaxflash::cuda::sm80 {

// Blocks of a section. Every block of a head walks the same queries, cotangents and sums: the fewer
// heads are under way, the better these stay in the L2 cache. So no more heads than it takes to
// have a block for each place: at most two on each of the 188 multiprocessors of the largest GPU,
// and some for those that are done early.
inline constexpr int64_t kSectionBlocks = 512;

template <class T, int D, class Policy>
Error launch_backward(BackwardParams params, QueryFinishParams finish, BiasFinishParams bias,
                      bool deterministic, Cursor& cursor, bool launch, int arch, Stream stream) {
  static KernelCache cache;
  const auto kernel = backward_kernel<T, D, Policy>;
  if (launch) {
    if (const Error error = prepare_kernel(kernel, cache, most_shared_bytes, arch)) return error;
  }
  const BackwardTile tile = backward_tile(kIsFloat<T>, D, Policy::kEverything, arch);
  const Problem& problem = params.problem;
  const int64_t query_heads = problem.batches * problem.query_heads;
  const int64_t key_heads = problem.batches / params.repeats * problem.key_heads;
  const int64_t key_tiles = tiles_of(problem.key_length, tile.keys);
  const int64_t row_tiles = tiles_of(problem.query_length, tile.rows);
  const bool wants_query =
      finish.query_cotangent.data != nullptr || finish.scale_cotangent.data != nullptr;
  if (key_heads * key_tiles > INT32_MAX) return "jaxflash: more than 2^31 blocks";

  params.maps = take_maps(problem, tile.rows, tile.keys, cursor);
  params.strips = tiles_of(problem.query_length, 16);
  params.dead_rows = rows_may_see_nothing(problem);
  const int64_t sums = query_heads * params.strips * 16 * D;
  const int64_t turns = query_heads * row_tiles;
  if (wants_query) params.query_sums = cursor.take<float>(sums);
  if (wants_query && deterministic) params.turns = cursor.take<uint32_t>(turns);
  if (params.bias_sums) {
    params.bias_cotangent.data = cursor.take<float>(bias.elements);
    if (deterministic) return "jaxflash: deterministic gradients of a broadcast bias";
  }
  params.row_tiles = std::max<int64_t>(row_tiles, 1);
  params.splits = splits_of(key_heads * key_tiles, params.heads * row_tiles);
  params.split_tiles = tiles_of(params.heads * params.row_tiles, params.splits);
  if (params.splits > 1) {
    const int64_t sums_of_keys = params.splits * key_heads * problem.key_length * D;
    if (params.key_cotangent.data != nullptr) params.split_key = cursor.take<float>(sums_of_keys);
    if (params.value_cotangent.data != nullptr) {
      params.split_value = cursor.take<float>(sums_of_keys);
    }
  }
  if (!launch) return nullptr;
  if (!cursor.fits()) return "jaxflash: the workspace is too small";

  if (Policy::kEverything) launch_maps(problem, tile.rows, tile.keys, params.maps, stream);
  if (wants_query && sums > 0) {
    cudaMemsetAsync(params.query_sums, 0, sums * sizeof(float), stream);
    if (deterministic) cudaMemsetAsync(params.turns, 0, turns * sizeof(uint32_t), stream);
  }
  if (const Error error =
          clear_bias(problem, params.bias_cotangent, params.bias_sums, bias, stream)) {
    return error;
  }
  params.schedule.tiles = static_cast<uint32_t>(key_tiles);
  params.schedule.heads = static_cast<uint32_t>(key_heads);
  const int64_t filling = tiles_of(kSectionBlocks, std::max<int64_t>(key_tiles, 1));
  params.schedule.section_heads =
      static_cast<uint32_t>(std::min(filling, std::max<int64_t>(key_heads, 1)));
  // Turns are waited for: what a block waits for must have started before it.
  params.schedule.last_first = deterministic;
  int shared = tile.shared_bytes(D, kSize<T>);
  if (Policy::kEverything) {
    params.staging =
        stage_arrays(problem, tile.rows * tile.keys, tile.stages, most_shared_bytes(arch), shared);
    // Tiles of gradients of logits are those of the bias, but for a soft cap's slope.
    params.bias_by_tiles = !params.bias_sums && bias.cotangent.dtype == T::kDType &&
                           problem.soft_cap == 0 &&
                           allows_vectors(params.bias_cotangent, problem.key_length, kSize<T>);
  }
  if (key_heads * key_tiles > 0) {
    const dim3 grid(static_cast<unsigned>(key_heads * key_tiles), params.splits);
    kernel<<<grid, tile.threads(), shared, stream>>>(params);
    if (params.splits > 1) finish_keys<T, D>(params, stream);
  }
  if (wants_query && query_heads * params.strips > 0) {
    finish.query_sums = params.query_sums;
    finish.strips = params.strips;
    finish.padded_dim = D;
    finish_query<T>(finish, stream);
  }
  if (params.bias_sums) finish_bias(params.bias_cotangent, bias, stream);
  return text_of(cudaGetLastError());
}

}  // namespace jaxflash::cuda::sm80
