// Rows of elements between memory (any float dtype) and the compute type (float or double).
#pragma once

#include <cstdint>

#include "attention/problem.h"
#include "cpu/vector.h"

namespace jaxflash::cpu::JAXFLASH_ISA {

JAXFLASH_INLINE float float_from_bf16(uint16_t x) {
  return bit_cast<float>(static_cast<uint32_t>(x) << 16);
}

// Rounds to nearest, ties to even; NaN stays NaN.
JAXFLASH_INLINE uint16_t bf16_from_float(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>(x == x ? rounded : nan);
}

// Subnormals are made and read through an addition to 0.5, whose last bit is theirs: XLA's threads
// treat subnormal operands as zero.
JAXFLASH_INLINE float float_from_f16(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
  const uint32_t magnitude = x & 0x7fffu;
  const uint32_t rebias = magnitude >= 0x7c00u ? 224u << 23 : 112u << 23;  // 224: inf and NaN
  const uint32_t normal = (magnitude << 13) + rebias;
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(0x3f000000u | magnitude) - 0.5f);
  return bit_cast<float>(sign | (magnitude < 0x0400u ? subnormal : normal));
}

// Rounds to nearest, ties to even; overflows to infinity; NaN stays NaN.
JAXFLASH_INLINE uint16_t f16_from_float(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;  // 2^-14
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const bool overflows = magnitude >= 0x477ff000u;  // 65520 rounds to infinity
  return static_cast<uint16_t>(sign | (overflows ? special : finite));
}

// to[0 .. count) = from[0 .. count).
template <class T>
inline void load_row(DType dtype, const void* data, int64_t offset, int64_t count, T* to) {
  switch (dtype) {
    case DType::kBF16: {
      const auto* from = static_cast<const uint16_t*>(data) + offset;
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(float_from_bf16(from[i]));
      break;
    }
    case DType::kF16: {
      const auto* from = static_cast<const uint16_t*>(data) + offset;
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(float_from_f16(from[i]));
      break;
    }
    case DType::kF32: {
      const auto* from = static_cast<const float*>(data) + offset;
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(from[i]);
      break;
    }
    case DType::kF64: {
      const auto* from = static_cast<const double*>(data) + offset;
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(from[i]);
      break;
    }
    default:
      break;
  }
}

// to[0 .. count) = from[0 .. count).
template <class T>
inline void store_row(DType dtype, void* data, int64_t offset, int64_t count, const T* from) {
  switch (dtype) {
    case DType::kBF16: {
      auto* to = static_cast<uint16_t*>(data) + offset;
      for (int64_t i = 0; i < count; ++i) to[i] = bf16_from_float(static_cast<float>(from[i]));
      break;
    }
    case DType::kF16: {
      auto* to = static_cast<uint16_t*>(data) + offset;
      for (int64_t i = 0; i < count; ++i) to[i] = f16_from_float(static_cast<float>(from[i]));
      break;
    }
    case DType::kF32: {
      auto* to = static_cast<float*>(data) + offset;
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]);
      break;
    }
    case DType::kF64: {
      auto* to = static_cast<double*>(data) + offset;
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<double>(from[i]);
      break;
    }
    default:
      break;
  }
}

}  // namespace jaxflash::cpu::JAXFLASH_ISA
