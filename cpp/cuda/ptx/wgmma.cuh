// Products of a warpgroup, PTX ISA section "Asynchronous Warpgroup Level Matrix Multiply-Accumulate
// Instructions: wgmma". d[64][N] (+)= a[64][16] b[16][N], sums in f32. sm_90a.
//
// Of d a thread holds rows 16 * warp + lane / 4 + {0, 0, 8, 8}, columns 8 * j + 2 * (lane % 4) +
// {0, 1, 0, 1} in d[4 * j ..], "Register Fragments for wgmma.mma_async.m64nNk16"; of a, in
// registers, what mma.m16n8k16 wants of each warp's 16 rows.
//
// Products run asynchronously: from wgmma_fence to wgmma_wait no other instruction may touch their
// registers.
#pragma once

#include <cstdint>

namespace jaxflash::cuda::ptx {

// A matrix in shared memory, PTX ISA "Matrix descriptor": bits 0-13 the address, 16-29 the leading
// and 32-45 the stride byte offset, in units of 16 bytes; bits 62-63 = 1 the swizzle of 128 bytes,
// which all tiles here have, in panels of rows of 128 bytes: 8 rows, one period of the swizzle, are
// the stride of 1024 bytes. `leading_bytes`: of operands that are walked down their rows
// (transposed b), from one panel to the next. Addresses in a cluster of blocks have the block's
// rank in their upper bits.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t leading_bytes) {
  constexpr uint64_t kStride = 1024 >> 4, kSwizzle128 = 1;
  return (address & 0x3ffff) >> 4 | static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         kStride << 32 | kSwizzle128 << 62;
}

// wgmma.fence.sync.aligned: registers written so far may be read by products.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// wgmma.commit_group.sync.aligned: the products so far are a group.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// wgmma.wait_group.sync.aligned: waits until at most kPending groups are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// No instruction: holds uses of results that a wait has made valid behind the wait.
template <int kCount>
__device__ __forceinline__ void pin_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Likewise of operands: holds them in their registers until the wait.
template <int kCount>
__device__ __forceinline__ void pin_registers(uint32_t (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

enum class WgmmaType { kBF16, kF16 };

// of_shared: a and b in shared memory, both with the summed dim contiguous; d = a b where
// `accumulate` is false. of_registers: a in registers, b with its columns contiguous; d += a b.
// of_transposed: as of_shared, but a with its rows and b with its columns contiguous: the transpose
// flags, the last two operands of the instruction, are 1.
template <WgmmaType kType, int N>
struct Wgmma;

// Registers of d, as text and as operands.
#define JAXFLASH_R8(a, b, c, d, e, f, g, h) \
  "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define JAXFLASH_R16                  \
  JAXFLASH_R8(0, 1, 2, 3, 4, 5, 6, 7) \
  "," JAXFLASH_R8(8, 9, 10, 11, 12, 13, 14, 15)
#define JAXFLASH_R32                                                                               \
  JAXFLASH_R16 "," JAXFLASH_R8(16, 17, 18, 19, 20, 21, 22, 23) "," JAXFLASH_R8(24, 25, 26, 27, 28, \
                                                                               29, 30, 31)
#define JAXFLASH_R40 JAXFLASH_R32 "," JAXFLASH_R8(32, 33, 34, 35, 36, 37, 38, 39)
#define JAXFLASH_R48 JAXFLASH_R40 "," JAXFLASH_R8(40, 41, 42, 43, 44, 45, 46, 47)
#define JAXFLASH_R56 JAXFLASH_R48 "," JAXFLASH_R8(48, 49, 50, 51, 52, 53, 54, 55)
#define JAXFLASH_R64 JAXFLASH_R56 "," JAXFLASH_R8(56, 57, 58, 59, 60, 61, 62, 63)
#define JAXFLASH_R72 JAXFLASH_R64 "," JAXFLASH_R8(64, 65, 66, 67, 68, 69, 70, 71)
#define JAXFLASH_R80 JAXFLASH_R72 "," JAXFLASH_R8(72, 73, 74, 75, 76, 77, 78, 79)
#define JAXFLASH_R88 JAXFLASH_R80 "," JAXFLASH_R8(80, 81, 82, 83, 84, 85, 86, 87)
#define JAXFLASH_R96 JAXFLASH_R88 "," JAXFLASH_R8(88, 89, 90, 91, 92, 93, 94, 95)
#define JAXFLASH_R128                                                  \
  JAXFLASH_R96                                                         \
  "," JAXFLASH_R8(96, 97, 98, 99, 100, 101, 102, 103) "," JAXFLASH_R8( \
      104, 105, 106, 107, 108, 109, 110,                               \
      111) "," JAXFLASH_R8(112, 113, 114, 115, 116, 117, 118,          \
                           119) "," JAXFLASH_R8(120, 121, 122, 123, 124, 125, 126, 127)
#define JAXFLASH_D8(i)                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define JAXFLASH_D16 JAXFLASH_D8(0), JAXFLASH_D8(8)
#define JAXFLASH_D32 JAXFLASH_D16, JAXFLASH_D8(16), JAXFLASH_D8(24)
#define JAXFLASH_D40 JAXFLASH_D32, JAXFLASH_D8(32)
#define JAXFLASH_D48 JAXFLASH_D40, JAXFLASH_D8(40)
#define JAXFLASH_D56 JAXFLASH_D48, JAXFLASH_D8(48)
#define JAXFLASH_D64 JAXFLASH_D56, JAXFLASH_D8(56)
#define JAXFLASH_D72 JAXFLASH_D64, JAXFLASH_D8(64)
#define JAXFLASH_D80 JAXFLASH_D72, JAXFLASH_D8(72)
#define JAXFLASH_D88 JAXFLASH_D80, JAXFLASH_D8(80)
#define JAXFLASH_D96 JAXFLASH_D88, JAXFLASH_D8(88)
#define JAXFLASH_D128 \
  JAXFLASH_D96, JAXFLASH_D8(96), JAXFLASH_D8(104), JAXFLASH_D8(112), JAXFLASH_D8(120)

// `count` registers of d, N / 2 of them; then the numbers of the operands that follow them.
#define JAXFLASH_WGMMA_TYPE(kTag, type, N, count, n0, n1, n2, n3, n4)                            \
  template <>                                                                                    \
  struct Wgmma<WgmmaType::kTag, N> {                                                             \
    static __device__ __forceinline__ void of_shared(float (&d)[count], uint64_t a, uint64_t b,  \
                                                     bool accumulate) {                          \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #n2                                        \
                   ", 0;\n"                                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type               \
                   " {" JAXFLASH_R##count "}, %" #n0 ", %" #n1 ", p, 1, 1, 0, 0; }"              \
                   : JAXFLASH_D##count                                                           \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                         \
    }                                                                                            \
    static __device__ __forceinline__ void of_transposed(float (&d)[count], uint64_t a,          \
                                                         uint64_t b, bool accumulate) {          \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #n2                                        \
                   ", 0;\n"                                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type               \
                   " {" JAXFLASH_R##count "}, %" #n0 ", %" #n1 ", p, 1, 1, 1, 1; }"              \
                   : JAXFLASH_D##count                                                           \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                         \
    }                                                                                            \
    static __device__ __forceinline__ void of_registers(float (&d)[count], uint32_t a0,          \
                                                        uint32_t a1, uint32_t a2, uint32_t a3,   \
                                                        uint64_t b) {                            \
      asm volatile(                                                                              \
          "{ .reg .pred p; setp.eq.b32 p, 0, 0;\n"                                               \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" JAXFLASH_R##count \
          "}, {%" #n0 ",%" #n1 ",%" #n2 ",%" #n3 "}, %" #n4 ", p, 1, 1, 1; }"                    \
          : JAXFLASH_D##count                                                                    \
          : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));                                         \
    }                                                                                            \
  };
#define JAXFLASH_WGMMA(N, count, n0, n1, n2, n3, n4)               \
  JAXFLASH_WGMMA_TYPE(kBF16, "bf16", N, count, n0, n1, n2, n3, n4) \
  JAXFLASH_WGMMA_TYPE(kF16, "f16", N, count, n0, n1, n2, n3, n4)

JAXFLASH_WGMMA(32, 16, 16, 17, 18, 19, 20)
JAXFLASH_WGMMA(64, 32, 32, 33, 34, 35, 36)
JAXFLASH_WGMMA(80, 40, 40, 41, 42, 43, 44)
JAXFLASH_WGMMA(96, 48, 48, 49, 50, 51, 52)
JAXFLASH_WGMMA(112, 56, 56, 57, 58, 59, 60)
JAXFLASH_WGMMA(128, 64, 64, 65, 66, 67, 68)
JAXFLASH_WGMMA(176, 88, 88, 89, 90, 91, 92)
JAXFLASH_WGMMA(192, 96, 96, 97, 98, 99, 100)
JAXFLASH_WGMMA(256, 128, 128, 129, 130, 131, 132)

#undef JAXFLASH_R8
#undef JAXFLASH_R16
#undef JAXFLASH_R32
#undef JAXFLASH_R40
#undef JAXFLASH_R48
#undef JAXFLASH_R56
#undef JAXFLASH_R64
#undef JAXFLASH_R72
#undef JAXFLASH_R80
#undef JAXFLASH_R88
#undef JAXFLASH_R96
#undef JAXFLASH_R128
#undef JAXFLASH_D8
#undef JAXFLASH_D16
#undef JAXFLASH_D32
#undef JAXFLASH_D40
#undef JAXFLASH_D48
#undef JAXFLASH_D56
#undef JAXFLASH_D64
#undef JAXFLASH_D72
#undef JAXFLASH_D80
#undef JAXFLASH_D88
#undef JAXFLASH_D96
#undef JAXFLASH_D128
#undef JAXFLASH_WGMMA_TYPE
#undef JAXFLASH_WGMMA

}  // namespace jaxflash::cuda::ptx
