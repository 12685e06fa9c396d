// Softmax of a row that a quad of lanes holds, in base 2.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/sm80/element.cuh"

namespace jaxflash::cuda::sm80 {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Where logits become exponents of 2: `factor` a unit that logits are held in. A row's exponents
// are relative to a reference, the maximum of its logits at some time. With 16-bit operands that is
// an exponent itself, and the rest one multiply-add, x * factor - reference; with floats it is a
// logit: (x - reference) * factor is exact where logits are huge.
template <class T>
struct Exponent {
  float factor;

  // A reference moves on to a maximum that is more than 2^kStays above it: numerator and
  // denominator share references, so the result is the same, and sums are seldom multiplied.
  static constexpr float kStays = 8.f;
  // Of a row that saw nothing yet: below any logit's, and finite, so that hidden keys get 0.
  static constexpr float kNothing = -3.402823466e38f;

  __device__ __forceinline__ float reference(float logit) const {
    return kIsFloat<T> ? logit : logit * factor;
  }
  __device__ __forceinline__ float of(float x, float reference) const {
    return kIsFloat<T> ? (x - reference) * factor : fmaf(x, factor, -reference);
  }
  __device__ __forceinline__ float difference(float reference, float from) const {
    return kIsFloat<T> ? (reference - from) * factor : reference - from;
  }
  // The log-sum-exp in two parts: the reference in nats, and the log of the sum relative to it,
  // which makes good for the rounding of the first.
  static __device__ __forceinline__ float logit_max(float reference) {
    return kIsFloat<T> ? reference : reference * kLn2;
  }
  static __device__ __forceinline__ float log_sum(float reference, float sum) {
    constexpr float kRest = 7.3486931e-9f;  // 1 / kLog2E = kLn2 + kRest
    const float rounding = fmaf(reference, kLn2, -logit_max(reference)) + reference * kRest;
    return logf(sum) + (kIsFloat<T> ? 0.f : rounding);
  }
};

// What a row's softmax starts from: nothing, or a sink, which is a logit that is there before any
// key.
template <class T>
struct SoftmaxStart {
  float reference;
  float sum;  // this thread's share: one of a quad counts the sink
};
template <class T>
__device__ __forceinline__ SoftmaxStart<T> softmax_start(float sink) {
  if (sink == minus_infinity()) return {Exponent<T>::kNothing, 0.f};
  return {Exponent<T>{kLog2E}.reference(sink), (threadIdx.x & 3) == 0 ? 1.f : 0.f};
}

}  // namespace jaxflash::cuda::sm80
