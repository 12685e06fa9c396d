// Small matrix products, register-blocked: C (+)= A B.
//
// A is read one element at a time at any strides, so a transposed A costs nothing; the columns of B
// and C are contiguous and come in whole vectors.
#pragma once

#include <cstdint>

#include "cpu/vector.h"

namespace jaxflash::cpu::JAXFLASH_ISA {

enum class Store { kAssign, kAdd };

template <class T>
struct Strided {  // element (row, column) at data[row * row_stride + column * column_stride]
  const T* data;
  int64_t row_stride;
  int64_t column_stride;
};

// kRows x (kVectors vectors) of C in registers over the whole depth.
template <class T, int kRows, int kVectors, Store kStore>
JAXFLASH_INLINE void gemm_block(int64_t depth, Strided<T> a, const T* b, int64_t b_stride, T* c,
                                int64_t c_stride) {
  Vec<T> sum[kRows][kVectors] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Vec<T> row_of_b[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) row_of_b[v] = load(b + k * b_stride + v * kLanes<T>);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const T element = a.data[m * a.row_stride + k * a.column_stride];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[m][v] += element * row_of_b[v];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      T* const to = c + m * c_stride + v * kLanes<T>;
      store(to, kStore == Store::kAdd ? load(to) + sum[m][v] : sum[m][v]);
    }
  }
}

// All rows of kVectors vectors of columns: blocks of kRows, then one block of what is left.
template <class T, int kRows, int kVectors, Store kStore>
JAXFLASH_INLINE void gemm_columns(int64_t rows, int64_t depth, Strided<T> a, const T* b,
                                  int64_t b_stride, T* c, int64_t c_stride) {
  for (; rows >= kRows; rows -= kRows) {
    gemm_block<T, kRows, kVectors, kStore>(depth, a, b, b_stride, c, c_stride);
    a.data += kRows * a.row_stride;
    c += kRows * c_stride;
  }
  if constexpr (kRows > 1) {
    if (rows > 0)
      gemm_columns<T, kRows / 2, kVectors, kStore>(rows, depth, a, b, b_stride, c, c_stride);
  }
}

// C[rows][columns] (+)= A[rows][depth] B[depth][columns]; columns a multiple of kLanes<T>.
template <class T, Store kStore>
inline void gemm(int64_t rows, int64_t columns, int64_t depth, Strided<T> a, const T* b,
                 int64_t b_stride, T* c, int64_t c_stride) {
  // Accumulators, a row of B and one element of A must fit the registers; two fused multiply-adds
  // a cycle with a latency of four need at least eight accumulators.
  constexpr int kVectors = kVectorRegisters >= 32 ? 4 : 2;
  constexpr int kRows = 6;
  constexpr int64_t kWide = kVectors * kLanes<T>;
  int64_t n = 0;
  for (; n + kWide <= columns; n += kWide) {
    gemm_columns<T, kRows, kVectors, kStore>(rows, depth, a, b + n, b_stride, c + n, c_stride);
  }
  for (; n < columns; n += kLanes<T>) {
    gemm_columns<T, kRows, 1, kStore>(rows, depth, a, b + n, b_stride, c + n, c_stride);
  }
}

}  // namespace jaxflash::cpu::JAXFLASH_ISA
