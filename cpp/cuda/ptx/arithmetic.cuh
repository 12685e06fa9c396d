// Single instructions on floats and shared or global words.
#pragma once

#include <cstdint>

namespace jaxflash::cuda::ptx {

// ex2.approx.ftz.f32, PTX ISA "Floating Point Instructions: ex2": 2^x; 2^-inf = 0.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// rcp.approx.ftz.f32, PTX ISA "Floating Point Instructions: rcp".
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// cvt.rn.bf16x2.f32, PTX ISA "Data Movement and Conversion Instructions: cvt": `low` in the lower
// half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// cvt.rn.f16x2.f32, likewise.
__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// ld.shared.u8, ld.shared.u16, ld.shared.b32, ld.shared.v2.b32, ld.shared.v4.b32, PTX ISA "Data
// Movement: ld".
__device__ __forceinline__ uint32_t load_shared_byte(uint32_t address) {
  uint32_t byte;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(address) : "memory");
  return byte;
}
__device__ __forceinline__ uint32_t load_shared_half(uint32_t address) {
  uint16_t half;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(address) : "memory");
  return half;
}
__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}
__device__ __forceinline__ uint2 load_shared_2(uint32_t address) {
  uint2 words;
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];"
               : "=r"(words.x), "=r"(words.y)
               : "r"(address)
               : "memory");
  return words;
}
__device__ __forceinline__ uint4 load_shared_4(uint32_t address) {
  uint4 words;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address)
               : "memory");
  return words;
}

// st.shared.b32, st.shared.v2.b32, st.shared.v4.b32, PTX ISA "Data Movement: st".
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}
__device__ __forceinline__ void store_shared_2(uint32_t address, uint2 words) {
  asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(address), "r"(words.x), "r"(words.y)
               : "memory");
}
__device__ __forceinline__ void store_shared_4(uint32_t address, uint4 words) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w)
               : "memory");
}

// st.global.v4.b32, PTX ISA "Data Movement: st"; `to` is aligned to 16 bytes.
__device__ __forceinline__ void store_global_4(void* to, uint4 words) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w)
               : "memory");
}

// red.global.add.f32, PTX ISA "Parallel Synchronization: red"; one vector from sm_90 on. `to` is
// aligned to 16 bytes.
__device__ __forceinline__ void add_global_4(float* to, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
#else
  for (int i = 0; i < 4; ++i) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to + i), "f"(x[i]) : "memory");
  }
#endif
}

// Likewise two; `to` is aligned to 8 bytes.
__device__ __forceinline__ void add_global_2(float* to, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1,%2};" ::"l"(to), "f"(x), "f"(y) : "memory");
#else
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to + 1), "f"(y) : "memory");
#endif
}

// ld.acquire.gpu.global.u32, PTX ISA "Data Movement: ld".
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
  uint32_t word;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return word;
}

// red.release.gpu.global.add.u32, PTX ISA "Parallel Synchronization: red".
__device__ __forceinline__ void add_release(uint32_t* to, uint32_t count) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(count) : "memory");
}

// prefetch.global.L2, PTX ISA "Data Movement: prefetch": the line at `from`.
__device__ __forceinline__ void prefetch_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// threadIdx.x, read anew at each call: what is computed from it cannot be kept in registers from
// one turn of a loop to the next. PTX ISA, special registers, %tid.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

}  // namespace jaxflash::cuda::ptx
