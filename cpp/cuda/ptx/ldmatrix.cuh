// Loads and stores of 8x8 matrices of 16-bit elements in shared memory, PTX ISA section "Warp-level
// matrix load instruction: ldmatrix". Lane l gives the address of row l % 8 of matrix l / 8, 16
// bytes long; a thread gets elements 2 * (lane % 4) and the next of row lane / 4 of each matrix.
#pragma once

#include <cstdint>

namespace jaxflash::cuda::ptx {

// ldmatrix.sync.aligned.m8n8.x4.shared.b16
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16: each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// stmatrix.sync.aligned.m8n8.x4.shared.b16, PTX ISA section "Warp-level matrix store instruction:
// stmatrix": the reverse of ldmatrix_x4. sm_90.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                            uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// movmatrix.sync.aligned.m8n8.trans.b16, PTX ISA section "Warp-level matrix transpose instruction:
// movmatrix": an 8x8 matrix in registers, as ldmatrix deals it.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t fragment) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(fragment));
  return transposed;
}

}  // namespace jaxflash::cuda::ptx
