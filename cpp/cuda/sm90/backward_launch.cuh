// Definition of launch_backward, for the files that instantiate it.
#pragma once

#include "cuda/common/finish.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/sm90/backward.cuh"
#include "cuda/sm90/gather.cuh"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/rules_launch.cuh"
#include "cuda/sm90/tensor_map.h"

namespace jaxflash::cuda::sm90 {

// Key heads of a section: its tiles of keys walk the same rows and add to the same sums, which the
// L2 cache holds the better the fewer heads are under way. As many as give each multiprocessor a
// tile, and one more for those that are done early, but no last section of a few, since long tiles
// and short ones even out within a section.
inline uint32_t section_key_heads(int64_t key_heads, int64_t tiles) {
  constexpr int64_t kSectionTiles = 264;
  const int64_t least = tiles_of(kSectionTiles, tiles);
  int64_t heads = least;
  while (heads < key_heads && key_heads % heads != 0 && key_heads % heads < least) ++heads;
  return static_cast<uint32_t>(std::min(heads, key_heads));
}

template <class T, int D, class Policy>
Error launch_backward(BackwardParams params, sm80::QueryFinishParams finish,
                      sm80::BiasFinishParams bias, Cursor& cursor, bool launch, Stream stream) {
  static KernelCache cache;
  using B = Backward<T, D, Policy>;
  constexpr BackwardTile kTile = B::kTile;
  constexpr int kShared = sizeof(typename B::Shared);
  const auto kernel = backward_kernel<T, D, Policy>;
  const Problem& problem = params.problem;
  const int64_t query_heads = problem.batches * problem.query_heads;
  const int64_t key_heads = problem.batches * problem.key_heads;
  const int64_t tiles = tiles_of(problem.key_length, kTile.keys);
  const bool wants_query =
      finish.query_cotangent.data != nullptr || finish.scale_cotangent.data != nullptr;
  if (key_heads * tiles > INT32_MAX) return "jaxflash: more than 2^31 tiles";

  params.strips = tiles_of(problem.query_length, 16);
  const int64_t sums = query_heads * params.strips * 16 * D;
  if (wants_query) params.query_sums = cursor.take<float>(sums);
  const int64_t rows = query_heads * problem.query_length;
  params.rows = {cursor.take<float>(rows), cursor.take<float>(rows), cursor.take<float>(rows)};
  params.next_unit = cursor.take<uint32_t>(1);
  params.turns_a_head = tiles_of(problem.query_length, BackwardParams::kTurnRows);
  const int64_t turns = query_heads * params.turns_a_head * BackwardTile::kWarpgroups;
  if (params.deterministic && wants_query) params.turns = cursor.take<uint32_t>(turns);
  if (Policy::kEverything) {
    params.maps = take_maps(problem, kTile.rows, kTile.keys, cursor);
    if (params.bias_sums) params.bias_cotangent.data = cursor.take<float>(bias.elements);
  }
  if (!launch) return nullptr;
  if (!cursor.fits()) return "jaxflash: the workspace is too small";
  if (key_heads * tiles == 0) return nullptr;

  int arch = 0, processors = 0;
  Error error = prepare_kernel(kernel, cache, [](int) { return kShared; }, arch);
  if (error == nullptr) error = count_processors(processors);
  if (error == nullptr) {
    error = make_map(problem, problem.query, problem.head_dim, problem.query_heads,
                     problem.query_length, kTile.rows, params.query);
  }
  if (error == nullptr) {
    error = make_map(problem, params.output_cotangent, problem.value_dim, problem.query_heads,
                     problem.query_length, kTile.rows, params.cotangent);
  }
  if (error == nullptr) {
    error = make_map(problem, problem.key, problem.head_dim, problem.key_heads, problem.key_length,
                     kTile.keys, params.key);
  }
  if (error == nullptr) {
    error = make_map(problem, problem.value, problem.value_dim, problem.key_heads,
                     problem.key_length, kTile.keys, params.value);
  }
  if (error == nullptr && wants_query) {
    error = text_of(cudaMemsetAsync(params.query_sums, 0, sums * sizeof(float), stream));
  }
  if (error == nullptr && params.turns != nullptr) {
    error = text_of(cudaMemsetAsync(params.turns, 0, turns * sizeof(uint32_t), stream));
  }
  if (error == nullptr && Policy::kEverything) {
    error = prepare_rules(kTile.rows, kTile.keys, kTile.array_bytes, params, stream);
  }
  if (error == nullptr) {
    error = sm80::clear_bias(problem, params.bias_cotangent, params.bias_sums, bias, stream);
  }
  if (error != nullptr) return error;

  gather_rows(params, stream);
  params.group = static_cast<uint32_t>(problem.query_heads / problem.key_heads);
  params.schedule.tiles = static_cast<uint32_t>(tiles);
  params.schedule.heads = static_cast<uint32_t>(key_heads);
  params.schedule.section_heads = section_key_heads(key_heads, tiles);
  params.schedule.last_first = params.deterministic;  // what a tile waits for was dealt out before
  const int64_t blocks = std::min<int64_t>(key_heads * tiles, processors);
  kernel<<<static_cast<unsigned>(blocks), kTile.threads(), kShared, stream>>>(params);
  if (wants_query) {
    finish.query_sums = params.query_sums;
    finish.strips = params.strips;
    finish.padded_dim = D;
    sm80::finish_query<T>(finish, stream);
  }
  if (params.bias_sums) sm80::finish_bias(params.bias_cotangent, bias, stream);
  return text_of(cudaGetLastError());
}

}  // namespace jaxflash::cuda::sm90
