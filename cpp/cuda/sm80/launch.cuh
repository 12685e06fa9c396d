// Launches of the kernels of one (dtype, padded head dim, policy).
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/sm80/params.h"

namespace jaxflash::cuda::sm80 {

// Launches the forward kernel and what belongs before and after it. With `launch` false it only
// adds up the workspace that it would take as code for `arch`.
template <class T, int D, class Policy>
Error launch_forward(ForwardParams params, Cursor& cursor, bool launch, int arch, Stream stream);

template <class T, int D, class Policy>
Error launch_backward(BackwardParams params, QueryFinishParams finish, BiasFinishParams bias,
                      bool deterministic, Cursor& cursor, bool launch, int arch, Stream stream);

// Which arrays [T, S] go through shared memory, tile by tile: those that are copied in aligned
// 16-byte pieces, as far as a block has room for their tiles of `elements` and stages. `shared`:
// the bytes that a block has of `room`, then with them.
inline ArrayStaging stage_arrays(const Problem& problem, int elements, int stages, int room,
                                 int& shared) {
  const auto stage = [&](const Tensor& array, int size) {
    const int bytes = elements * size;
    const bool copied = array.data != nullptr && array.row != 0 && array.column == 1 &&
                        allows_vectors(array, problem.key_length, size);
    if (!copied || shared + stages * bytes > room) return 0;
    shared += stages * bytes;
    return bytes;
  };
  ArrayStaging staging;
  staging.bias_bytes = stage(problem.bias, problem.bias.dtype == DType::kF32 ? 4 : 2);
  staging.mask_bytes = stage(problem.mask, 1);
  return staging;
}

// How many blocks share the work of one, so that few fill the GPU: each gets two of its `tiles` at
// least.
inline int splits_of(int64_t blocks, int64_t tiles) {
  constexpr int64_t kFewBlocks = 128, kEnoughBlocks = 256;
  if (blocks == 0 || blocks >= kFewBlocks) return 1;
  return static_cast<int>(
      std::max<int64_t>(std::min(tiles_of(kEnoughBlocks, blocks), tiles / 2), 1));
}

// Heads whose keys and values share the L2 cache: sections of them run together. Small enough for
// half of the smallest cache in question, large enough to fill the GPU with few tiles a head.
inline uint32_t section_heads(const Problem& problem, int64_t tiles, int64_t size) {
  const int64_t group = problem.query_heads / problem.key_heads;
  const int64_t head_bytes = problem.key_length * (problem.head_dim + problem.value_dim) * size;
  const int64_t key_heads = std::max<int64_t>((24 << 20) / std::max<int64_t>(head_bytes, 1), 1);
  const int64_t filling = tiles_of(1024, std::max<int64_t>(tiles, 1));
  const int64_t heads = std::max(key_heads * group, filling);
  return static_cast<uint32_t>(
      std::min(tiles_of(heads, group) * group, problem.batches * problem.query_heads));
}

}  // namespace jaxflash::cuda::sm80
