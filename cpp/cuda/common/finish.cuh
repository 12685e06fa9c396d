// Turns the sums of the query cotangent, f32 in the order of accumulators, into results.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/combine.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/sm80/forward.cuh"
#include "cuda/sm80/params.h"
#include "cuda/sm80/schedule.cuh"

namespace jaxflash::cuda::sm80 {

inline constexpr int kFinishBlocks = 4;  // every padded dim has a multiple of so many blocks

// Of the columns column, column + 1, column + 8, column + 9 .. of a row those before `columns`.
template <class T>
__device__ __forceinline__ float product_with_sums(const typename T::Bits* query,
                                                   const float (&sums)[2 * kFinishBlocks],
                                                   int column, int columns) {
  float product = 0.f;
#pragma unroll
  for (int i = 0; i < 2 * kFinishBlocks; ++i) {
    const int at = column + 8 * (i / 2) + i % 2;
    if (at < columns && sums[i] != 0.f) product += float_of(T(), query[at]) * sums[i];
  }
  return product;
}
template <class T>
__device__ __forceinline__ void store_sums(typename T::Bits* to,
                                           const float (&x)[2 * kFinishBlocks], int column,
                                           int columns, bool vectors) {
  if constexpr (!kIsFloat<T>) {
    if (vectors) {
      // From words of two columns, 8 apart, to eight neighbours.
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = pack(T(), x[2 * i], x[2 * i + 1]);
      const uint4 neighbours = transpose_quad(words);
      const int first = column + 6 * (threadIdx.x % 4);
      if (first < columns) ptx::store_global_4(to + first, neighbours);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kFinishBlocks; ++i) {
    const int at = column + 8 * i;
    if (at < columns) {
      store_pair(T(), to + at, x[2 * i], x[2 * i + 1], at + 1 < columns, vectors);
    }
  }
}

// One warp a strip of 16 rows of one head. Of each 8-column block a thread holds four consecutive
// floats: rows lane / 4 (two) and lane / 4 + 8 (two), columns 2 * (lane % 4) and the next.
template <class T>
__global__ void query_finish_kernel(const __grid_constant__ QueryFinishParams params) {
  const Problem& problem = params.problem;
  const int64_t strip = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  if (strip >= problem.batches * problem.query_heads * params.strips) return;
  const int lane = threadIdx.x % 32;
  const int64_t hb = strip / params.strips;
  const int64_t head = hb % problem.query_heads;
  const BatchIndex index = batch_index(problem, hb / problem.query_heads);
  const int64_t first_row = strip % params.strips * 16 + lane / 4;
  const float scale = batch_value<float>(problem.scale, index, 1.f);
  const int blocks = params.padded_dim / 8;
  const auto offset = [&](const Tensor& tensor) {
    return batch_offset(tensor, index) + head * tensor.head;
  };
  using Bits = typename T::Bits;
  const Bits* const query = static_cast<const Bits*>(problem.query.data) + offset(problem.query);
  Bits* const cotangent =
      static_cast<Bits*>(params.query_cotangent.data) + offset(params.query_cotangent);
  const auto* sums =
      reinterpret_cast<const float4*>(params.query_sums) + strip * blocks * 32 + lane;
  const Extent extent = extent_of(problem, index);
  float scale_cotangent[2] = {};
  for (int first_block = 0; first_block < blocks; first_block += kFinishBlocks) {
    float4 sum[kFinishBlocks];
#pragma unroll
    for (int i = 0; i < kFinishBlocks; ++i) sum[i] = sums[(first_block + i) * 32];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[2 * kFinishBlocks];
#pragma unroll
      for (int i = 0; i < kFinishBlocks; ++i) {
        x[2 * i] = half == 0 ? sum[i].x : sum[i].z;
        x[2 * i + 1] = half == 0 ? sum[i].y : sum[i].w;
      }
      const int64_t row = first_row + 8 * half;
      const int column = 8 * first_block + 2 * (lane % 4);
      // A row that sees nothing has sums of 0, and its query may be NaN.
      if (params.scale_cotangent.data != nullptr && row < extent.query_length) {
        scale_cotangent[half] += product_with_sums<T>(query + row * problem.query.row, x, column,
                                                      static_cast<int>(problem.head_dim));
      }
      if (params.query_cotangent.data == nullptr) continue;
      // Padding stays 0 whatever the scale.
#pragma unroll
      for (float& y : x) y = y == 0.f ? 0.f : y * scale;
      const bool exists = row < problem.query_length;
      store_sums<T>(cotangent + row * params.query_cotangent.row, x, column,
                    exists ? static_cast<int>(problem.head_dim) : 0, params.vectors);
    }
  }
  if (params.scale_cotangent.data == nullptr) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(scale_cotangent[half]);
    const int64_t row = first_row + 8 * half;
    if (lane % 4 == 0 && row < problem.query_length) {
      static_cast<float*>(params.scale_cotangent.data)[offset(params.scale_cotangent) +
                                                       row * params.scale_cotangent.row] = sum;
    }
  }
}

// One thread an element of the cotangent of key or value, of which each split has made a part.
template <class T, int D>
__global__ void key_finish_kernel(const __grid_constant__ BackwardParams params, Tensor cotangent,
                                  const float* sums, int columns) {
  const Problem& problem = params.problem;
  const int64_t elements = params.schedule.heads * problem.key_length * D;
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int column = static_cast<int>(at % D);
  if (at >= elements || column >= columns) return;
  float sum = 0.f;
  for (int split = 0; split < params.splits; ++split) sum += sums[split * elements + at];
  const int64_t row = at / D % problem.key_length, unit = at / D / problem.key_length;
  const BatchIndex index = batch_index(problem, batch_of(params, unit / problem.key_heads, 0));
  auto* const to = static_cast<typename T::Bits*>(cotangent.data) + batch_offset(cotangent, index) +
                   unit % problem.key_heads * cotangent.head + row * cotangent.row;
  store_element(T(), to + column, sum);
}

static __global__ void bias_finish_kernel(const float* sums, BiasFinishParams params) {
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at >= params.elements) return;
  void* const to = params.cotangent.data;
  switch (params.cotangent.dtype) {
    case DType::kBF16:
      return store_element(BF16(), static_cast<uint16_t*>(to) + at, sums[at]);
    case DType::kF16:
      return store_element(F16(), static_cast<uint16_t*>(to) + at, sums[at]);
    default:
      return store_element(F32(), static_cast<uint32_t*>(to) + at, sums[at]);
  }
}

// What the kernel adds to, or stores to, if it is wanted: sums start from zero, and hidden tiles
// are not visited.
inline Error clear_bias(const Problem& problem, const Tensor& cotangent, bool sums,
                        const BiasFinishParams& bias, Stream stream) {
  if (!sums && rows_see_all_keys(problem)) return nullptr;
  const DType dtype = sums ? DType::kF32 : bias.cotangent.dtype;
  const int64_t size = dtype == DType::kF32 ? 4 : 2;
  if (cotangent.data == nullptr || bias.elements == 0) return nullptr;
  return text_of(cudaMemsetAsync(cotangent.data, 0, bias.elements * size, stream));
}

inline void finish_bias(const Tensor& sums, const BiasFinishParams& bias, Stream stream) {
  if (bias.elements == 0) return;
  bias_finish_kernel<<<tiles_of(bias.elements, 256), 256, 0, stream>>>(
      static_cast<const float*>(sums.data), bias);
}

template <class T, int D>
void finish_keys(const BackwardParams& params, Stream stream) {
  const Problem& problem = params.problem;
  const int64_t blocks = tiles_of(params.schedule.heads * problem.key_length * D, 256);
  const auto finish = [&](const Tensor& cotangent, const float* sums, int64_t columns) {
    if (sums == nullptr) return;
    key_finish_kernel<T, D><<<static_cast<unsigned>(blocks), 256, 0, stream>>>(
        params, cotangent, sums, static_cast<int>(columns));
  };
  finish(params.key_cotangent, params.split_key, problem.head_dim);
  finish(params.value_cotangent, params.split_value, problem.value_dim);
}

template <class T>
void finish_query(const QueryFinishParams& params, Stream stream) {
  const int64_t strips = params.problem.batches * params.problem.query_heads * params.strips;
  query_finish_kernel<T><<<tiles_of(strips, 4), 128, 0, stream>>>(params);
}

}  // namespace jaxflash::cuda::sm80
