// SIMD vectors as the compiler's own vector types, and the functions the kernels need of them.
//
// This header and the kernels over it are compiled once for each instruction set, in a namespace
// named after it (JAXFLASH_ISA), so that no code of one set can be linked in place of another's.
#pragma once

#include <cstdint>
#include <utility>

#include "attention/config.h"

namespace jaxflash::cpu::JAXFLASH_ISA {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
inline constexpr int kVectorRegisters = 32;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
inline constexpr int kVectorRegisters = 16;
#else
inline constexpr int kVectorBytes = 16;
#if defined(__aarch64__)
inline constexpr int kVectorRegisters = 32;
#else
inline constexpr int kVectorRegisters = 16;
#endif
#endif

template <class T, int kCount>
struct VectorOf {
  typedef T type __attribute__((vector_size(sizeof(T) * kCount)));
};

template <class T>
inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <class T>
using Vec = typename VectorOf<T, kLanes<T>>::type;

// The signed integer as wide as T: what comparisons of Vec<T> yield and select by.
template <class T>
struct IntOfSize;
template <>
struct IntOfSize<float> {
  using type = int32_t;
};
template <>
struct IntOfSize<double> {
  using type = int64_t;
};
template <class T>
using Int = typename IntOfSize<T>::type;
template <class T>
using IntVec = Vec<Int<T>>;

template <class T>
JAXFLASH_INLINE Vec<T> load(const T* from) {
  Vec<T> v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

template <class T>
JAXFLASH_INLINE void store(T* to, Vec<T> v) {
  __builtin_memcpy(to, &v, sizeof v);
}

template <class T>
JAXFLASH_INLINE Vec<T> broadcast(T x) {
  return x - Vec<T>{};
}

template <class V>
JAXFLASH_INLINE V greater_of(V a, V b) {
  return a > b ? a : b;
}

// The lesser of the two; NaN where `a` is NaN.
template <class V>
JAXFLASH_INLINE V min_keeping_nan(V a, V b) {
  return a > b ? b : a;
}

template <class To, class From>
JAXFLASH_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// exp(r) = 1 + r + r^2 q(r) for |r| <= log(2) / 2, with q interpolated at Chebyshev nodes: relative
// error 1e-8 in float, 2e-17 in double.
template <class T>
struct ExpTable;

template <>
struct ExpTable<float> {
  static constexpr float kQ[] = {0.5f, 0.166665770255979882f, 0.041666554662050534f,
                                 0.0083631730745137109f, 0.00139261761199355789f};
  static constexpr float kLog2e = 1.44269504088896341f;
  static constexpr float kLn2High = 0.693359375f;  // few bits, so that n * kLn2High is exact
  static constexpr float kLn2Low = -0.000212194440055f;
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float kLeast = -87.33654f;   // below, exp is subnormal and is flushed to zero
  static constexpr float kGreatest = 88.02969f;
  static constexpr int kMantissaBits = 23;
  static constexpr int32_t kExponentBias = 127;
};

template <>
struct ExpTable<double> {
  static constexpr double kQ[] = {0.500000000000000102,     0.166666666666666675,
                                  0.0416666666666241619,    0.00833333333333006445,
                                  0.00138888889171967191,   0.000198412698630405453,
                                  0.0000248015213223686933, 2.75572684803100255e-6,
                                  2.76200758799833666e-7,   2.51003758325612337e-8};
  static constexpr double kLog2e = 1.4426950408889634074;
  static constexpr double kLn2High = 0.6931467056274414;
  static constexpr double kLn2Low = 4.7493250390316723212e-7;
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLeast = -708.396418532264;
  static constexpr double kGreatest = 709.0;
  static constexpr int kMantissaBits = 52;
  static constexpr int64_t kExponentBias = 1023;
};

// exp(x) = power * (1 + tail), power = 2^n.
template <class T>
struct ReducedExp {
  Vec<T> power;
  Vec<T> tail;
};

// Needs x within kLeast .. kGreatest, or NaN.
template <class T>
JAXFLASH_INLINE ReducedExp<T> reduced_exp(Vec<T> x) {
  using Table = ExpTable<T>;
  const Vec<T> shifted = x * Table::kLog2e + Table::kRound;
  const Vec<T> n = shifted - Table::kRound;
  const Vec<T> r = (x - n * Table::kLn2High) - n * Table::kLn2Low;
  constexpr int kTerms = sizeof(Table::kQ) / sizeof(Table::kQ[0]);
  Vec<T> q = broadcast<T>(Table::kQ[kTerms - 1]);
#pragma GCC unroll 16
  for (int term = kTerms - 2; term >= 0; --term) q = q * r + Table::kQ[term];
  const IntVec<T> exponent = bit_cast<IntVec<T>>(shifted) - bit_cast<Int<T>>(Table::kRound);
  const IntVec<T> bits = (exponent + Table::kExponentBias) << Table::kMantissaBits;
  return {bit_cast<Vec<T>>(bits), r * r * q + r};
}

// exp(x); 0 where the result would be subnormal; NaN stays NaN.
template <class T>
JAXFLASH_INLINE Vec<T> exp(Vec<T> x) {
  using Table = ExpTable<T>;
  const Vec<T> clamped = x < Table::kLeast ? broadcast<T>(Table::kLeast) : x;
  const ReducedExp<T> e = reduced_exp<T>(min_keeping_nan(clamped, broadcast<T>(Table::kGreatest)));
  const Vec<T> value = e.power * e.tail + e.power;
  return x < Table::kLeast ? Vec<T>{} : value;
}

// tanh(x), accurate relative to its own size near 0: expm1(2|x|) / (expm1(2|x|) + 2).
template <class T>
struct Tanh {
  JAXFLASH_INLINE Vec<T> operator()(Vec<T> x) const {
    const Vec<T> magnitude = x < T(0) ? -x : x;
    const ReducedExp<T> e = reduced_exp<T>(min_keeping_nan(magnitude * T(2), broadcast<T>(40)));
    const Vec<T> expm1 = e.power * e.tail + (e.power - T(1));
    const Vec<T> t = expm1 / (expm1 + T(2));
    return x < T(0) ? -t : t;
  }
};

// Lanes of a (from 0 on) and b (from kLanes<T> on) by constant indices.
template <class T, int... kIndex>
JAXFLASH_INLINE Vec<T> shuffle(Vec<T> a, Vec<T> b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kIndex...);
#else
  return __builtin_shuffle(a, b, IntVec<T>{kIndex...});
#endif
}

// One step of a square transposition: a and b trade the lanes in which they differ by kStep.
template <class T, int kStep, int... kLane>
JAXFLASH_INLINE void trade_lanes(Vec<T>& a, Vec<T>& b, std::integer_sequence<int, kLane...>) {
  constexpr int kCount = sizeof...(kLane);
  const Vec<T> low = shuffle<T, ((kLane & kStep) == 0 ? kLane : kLane - kStep + kCount)...>(a, b);
  const Vec<T> high = shuffle<T, ((kLane & kStep) == 0 ? kLane + kStep : kLane + kCount)...>(a, b);
  a = low;
  b = high;
}

template <class T, int kStep>
JAXFLASH_INLINE void trade_blocks(Vec<T> (&rows)[kLanes<T>]) {
  if constexpr (kStep > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<T>; ++i) {
      if ((i & kStep) == 0) {
        trade_lanes<T, kStep>(rows[i], rows[i + kStep],
                              std::make_integer_sequence<int, kLanes<T>>());
      }
    }
    trade_blocks<T, kStep / 2>(rows);
  }
}

// to[c][r] = from[r][c]; both sizes multiples of kLanes<T>.
template <class T>
inline void transpose(const T* from, int64_t from_stride, int64_t rows, int64_t columns, T* to,
                      int64_t to_stride) {
  constexpr int kSide = kLanes<T>;
  for (int64_t r = 0; r < rows; r += kSide) {
    for (int64_t c = 0; c < columns; c += kSide) {
      Vec<T> block[kSide];
#pragma GCC unroll 16
      for (int i = 0; i < kSide; ++i) block[i] = load(from + (r + i) * from_stride + c);
      trade_blocks<T, kSide / 2>(block);
#pragma GCC unroll 16
      for (int i = 0; i < kSide; ++i) store(to + (c + i) * to_stride + r, block[i]);
    }
  }
}

}  // namespace jaxflash::cpu::JAXFLASH_ISA
