// What a kernel must know about an element type: its products and its conversions.
//
// A k-step of a product is 32 bytes of a row, 16 elements of a 16-bit type and 8 of float, so that
// tiles are walked in the same way for both.
#pragma once

#include <cstdint>

#include "attention/problem.h"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/mma.cuh"

namespace jaxflash::cuda::sm80 {

// Element types as tags; elements are handled as raw bits of this size.
struct BF16 {
  using Bits = uint16_t;
  static constexpr DType kDType = DType::kBF16;
};
struct F16 {
  using Bits = uint16_t;
  static constexpr DType kDType = DType::kF16;
};
struct F32 {
  using Bits = uint32_t;
  static constexpr DType kDType = DType::kF32;
};
struct Bool {
  using Bits = uint8_t;
  static constexpr DType kDType = DType::kBool;
};

template <class T>
inline constexpr int kSize = sizeof(typename T::Bits);
template <class T>
inline constexpr bool kIsFloat = T::kDType == DType::kF32;
template <class T>
inline constexpr int kStep = 32 / kSize<T>;  // elements of a k-step

__device__ __forceinline__ uint32_t pack(BF16, float low, float high) {
  return ptx::pack_bf16(low, high);
}
__device__ __forceinline__ uint32_t pack(F16, float low, float high) {
  return ptx::pack_f16(low, high);
}

__device__ __forceinline__ float float_of(BF16, uint32_t bits) {
  return __uint_as_float(bits << 16);
}
__device__ __forceinline__ float float_of(F16, uint32_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<uint16_t>(bits)));
  return x;
}
__device__ __forceinline__ float float_of(F32, uint32_t bits) { return __uint_as_float(bits); }

__device__ __forceinline__ void store_element(BF16, uint16_t* to, float x) {
  *to = static_cast<uint16_t>(pack(BF16(), x, 0.f));
}
__device__ __forceinline__ void store_element(F16, uint16_t* to, float x) {
  *to = static_cast<uint16_t>(pack(F16(), x, 0.f));
}
__device__ __forceinline__ void store_element(F32, uint32_t* to, float x) {
  *to = __float_as_uint(x);
}

// Two neighbours of a row, or only the first; `aligned`: they may be stored as one.
template <class T>
__device__ __forceinline__ void store_pair(T, typename T::Bits* to, float x, float y, bool both,
                                           bool aligned) {
  if (both && aligned) {
    if constexpr (kIsFloat<T>) {
      *reinterpret_cast<float2*>(to) = {x, y};
    } else {
      *reinterpret_cast<uint32_t*>(to) = pack(T(), x, y);
    }
    return;
  }
  store_element(T(), to, x);
  if (both) store_element(T(), to + 1, y);
}

// Transposes 4x4 words of a quad: from word b of lane q to word q of lane b.
__device__ __forceinline__ uint4 transpose_quad(uint32_t (&w)[4]) {
  const int lane = threadIdx.x & 3;
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = lane & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t sent = upper ? w[i] : w[i | bit];
      const uint32_t got = __shfl_xor_sync(0xffffffffu, sent, bit);
      (upper ? w[i] : w[i | bit]) = got;
    }
  }
  return {w[0], w[1], w[2], w[3]};
}

// One operand of a product as it lies in registers: kWords 32-bit words of elements. Floats are
// split into two TF32 numbers whose sum they are to within 2^-22.
template <class T, int kWords>
struct Operand {
  uint32_t word[kWords];

  __device__ __forceinline__ void split() {}
};

template <int kWords>
struct Operand<F32, kWords> {
  uint32_t word[kWords];
  uint32_t rest[kWords];

  __device__ __forceinline__ void split() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const float x = __uint_as_float(word[i]);
      word[i] = ptx::tf32_from_float(x);
      rest[i] = ptx::tf32_from_float(x - __uint_as_float(word[i]));
    }
  }
};

template <class T>
using OperandA = Operand<T, 4>;  // [16][kStep]
template <class T>
using OperandB = Operand<T, 4>;  // [kStep][16]: two blocks of 8 columns, two words each

// d[16][8] += a b[., 8 * block ..]. `precise`: floats to about 2^-21 instead of TF32's 2^-11.
__device__ __forceinline__ void multiply_add(float (&d)[4], const OperandA<BF16>& a,
                                             const OperandB<BF16>& b, int block, bool) {
  ptx::mma_bf16(d, a.word, b.word[2 * block], b.word[2 * block + 1]);
}
__device__ __forceinline__ void multiply_add(float (&d)[4], const OperandA<F16>& a,
                                             const OperandB<F16>& b, int block, bool) {
  ptx::mma_f16(d, a.word, b.word[2 * block], b.word[2 * block + 1]);
}
__device__ __forceinline__ void multiply_add(float (&d)[4], const OperandA<F32>& a,
                                             const OperandB<F32>& b, int block, bool precise) {
  // Tensor cores round sums toward zero: long ones would drift, so each k-step has its own. The
  // small products have another: after the large one they would be lost, and before it an infinity
  // of theirs would outlast it. In float32, infinities of both signs make NaN.
  float sum[4] = {};
  ptx::mma_tf32(sum, a.word, b.word[2 * block], b.word[2 * block + 1]);
  if (precise) {
    float small[4] = {};
    ptx::mma_tf32(small, a.rest, b.word[2 * block], b.word[2 * block + 1]);
    ptx::mma_tf32(small, a.word, b.rest[2 * block], b.rest[2 * block + 1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += small[i];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] += sum[i];
}

}  // namespace jaxflash::cuda::sm80
