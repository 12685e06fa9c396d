// Asynchronous copies from global to shared memory, PTX ISA section "Data Movement and Conversion
// Instructions: Asynchronous copy", non-bulk.
#pragma once

#include <cstdint>

namespace jaxflash::cuda::ptx {

// cp.async.cg.shared.global, 16 bytes past the L1 cache; zeros instead where `exists` is false.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(exists ? 16 : 0)
               : "memory");
}

// cp.async.ca.shared.global, 4 bytes; zeros instead where `exists` is false.
__device__ __forceinline__ void cp_async_4(uint32_t to, const void* from, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(exists ? 4 : 0)
               : "memory");
}

// cp.async.commit_group
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// cp.async.wait_group: waits until at most kPending of this thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// cp.async.wait_all: waits for all of this thread's copies.
__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace jaxflash::cuda::ptx
