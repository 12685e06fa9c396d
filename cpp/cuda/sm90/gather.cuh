// Puts what the backward pass needs of rows, [*B, T, N] in JAX, in an order in which the lanes of a
// warp read neighbours. Sets the count of tiles that were dealt out to 0, too.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "attention/problem.h"
#include "cuda/common/launch.cuh"
#include "cuda/sm90/params.h"

namespace jaxflash::cuda::sm90 {

inline constexpr int kGatherTile = 32;  // rows and heads of a block: a warp reads heads of a row
inline constexpr int kGatherWarps = 8;  // and writes rows of a head
inline constexpr int kGatherArrays = 3;

static __global__ void gather_rows_kernel(const __grid_constant__ BackwardParams params) {
  if (blockIdx.x == 0 && threadIdx.x == 0 && threadIdx.y == 0) *params.next_unit = 0;
  __shared__ float tiles[kGatherArrays][kGatherTile][kGatherTile + 1];  // no two rows in one bank
  const Problem& problem = params.problem;
  const auto row_tiles = static_cast<unsigned>(tiles_of(problem.query_length, kGatherTile));
  const auto head_tiles = static_cast<unsigned>(tiles_of(problem.query_heads, kGatherTile));
  const int64_t first_row = int64_t{blockIdx.x % row_tiles} * kGatherTile;
  const int64_t first_head = int64_t{blockIdx.x / row_tiles % head_tiles} * kGatherTile;
  const int64_t batch = blockIdx.x / row_tiles / head_tiles;
  const BatchIndex index = batch_index(problem, batch);
  const Tensor* const from[] = {&params.statistics.logit_max, &params.statistics.log_sum,
                                &params.delta};
  float* const to[] = {params.rows.logit_max, params.rows.log_sum, params.rows.delta};
  const int lane = static_cast<int>(threadIdx.x), warp = static_cast<int>(threadIdx.y);

  for (int i = warp; i < kGatherTile; i += kGatherWarps) {
    const int64_t row = first_row + i, head = first_head + lane;
    if (row >= problem.query_length || head >= problem.query_heads) continue;
#pragma unroll
    for (int array = 0; array < kGatherArrays; ++array) {
      const Tensor& x = *from[array];
      tiles[array][i][lane] =
          static_cast<const float*>(x.data)[batch_offset(x, index) + row * x.row + head * x.head];
    }
  }
  __syncthreads();  // all threads wait for the tiles
  for (int i = warp; i < kGatherTile; i += kGatherWarps) {
    const int64_t row = first_row + lane, head = first_head + i;
    if (row >= problem.query_length || head >= problem.query_heads) continue;
    const int64_t at = (batch * problem.query_heads + head) * problem.query_length + row;
#pragma unroll
    for (int array = 0; array < kGatherArrays; ++array) to[array][at] = tiles[array][lane][i];
  }
}

inline void gather_rows(const BackwardParams& params, Stream stream) {
  const Problem& problem = params.problem;
  const int64_t blocks = problem.batches * tiles_of(problem.query_length, kGatherTile) *
                         tiles_of(problem.query_heads, kGatherTile);
  gather_rows_kernel<<<static_cast<unsigned>(blocks), dim3(kGatherTile, kGatherWarps), 0, stream>>>(
      params);
}

}  // namespace jaxflash::cuda::sm90
