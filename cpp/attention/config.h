// How a function of cpp/attention is compiled: inlined everywhere, on the host and on the device.
//
// Inlining is a matter of correctness on the CPU: the kernels are compiled once for each
// instruction set, and an out-of-line copy compiled for AVX-512 must never be linked into the
// baseline kernels.
#pragma once

#if defined(__CUDACC__)
#define JAXFLASH_INLINE __host__ __device__ __forceinline__
#else
#define JAXFLASH_INLINE inline __attribute__((always_inline))
#endif
