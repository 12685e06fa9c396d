// Puts together what blocks made of different keys of the same rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/launch.cuh"
#include "cuda/sm80/element.cuh"
#include "cuda/sm80/params.h"

namespace jaxflash::cuda::sm80 {

// One warp a row. A split that saw nothing has a maximum of -inf, and weight 0.
template <class T, int D>
__global__ void combine_kernel(const __grid_constant__ ForwardParams params) {
  const Problem& problem = params.problem;
  const int64_t rows = int64_t{params.schedule.heads} * problem.query_length;
  const int64_t at = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  if (at >= rows) return;
  const int lane = threadIdx.x % 32;
  float peak = __int_as_float(0xff800000);
  for (int split = 0; split < params.splits; ++split) {
    peak = fmaxf(peak, params.split_logit_max[split * rows + at]);
  }
  const bool sees = peak != __int_as_float(0xff800000);
  float total = 0.f;
  float sum[D / 32] = {};
  for (int split = 0; split < params.splits; ++split) {
    const int64_t from = split * rows + at;
    const float maximum = params.split_logit_max[from];
    if (!sees || maximum == __int_as_float(0xff800000)) continue;
    const float weight = expf((maximum - peak) + params.split_log_sum[from]);
    total += weight;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      sum[i] += weight * params.split_output[from * D + 32 * i + lane];
    }
  }
  const int64_t hb = at / problem.query_length, row = at % problem.query_length;
  const int64_t head = hb % problem.query_heads;
  const BatchIndex index = batch_index(problem, hb / problem.query_heads);
  const auto offset = [&](const Tensor& tensor) {
    return batch_offset(tensor, index) + head * tensor.head + row * tensor.row;
  };
  auto* const output = static_cast<typename T::Bits*>(params.output.data) + offset(params.output);
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    const int column = 32 * i + lane;
    if (column < problem.value_dim) {
      store_element(T(), output + column, sees ? sum[i] / total : 0.f);
    }
  }
  if (lane == 0) {
    const Statistics& statistics = params.statistics;
    static_cast<float*>(statistics.logit_max.data)[offset(statistics.logit_max)] = peak;
    static_cast<float*>(statistics.log_sum.data)[offset(statistics.log_sum)] =
        sees ? logf(total) : 0.f;
  }
}

template <class T, int D>
void combine_splits(const ForwardParams& params, Stream stream) {
  const int64_t rows = int64_t{params.schedule.heads} * params.problem.query_length;
  combine_kernel<T, D><<<tiles_of(rows, 4), 128, 0, stream>>>(params);
}

}  // namespace jaxflash::cuda::sm80
