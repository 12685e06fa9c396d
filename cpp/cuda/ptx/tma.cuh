// Copies of tiles by the tensor memory accelerator, PTX ISA section "Data Movement and Conversion
// Instructions: Tensor copy". Elements outside the array arrive as zeros. sm_90.
#pragma once

#include <cstdint>

namespace jaxflash::cuda::ptx {

// cp.async.bulk.tensor.4d.shared::cluster.global.tile: the box at the coordinates, innermost first.
// Its bytes are counted on `barrier`.
__device__ __forceinline__ void tma_load(uint32_t to, const void* map, uint32_t barrier, int c0,
                                         int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// The same to every block of the cluster whose bit is set in `blocks`, each with its own barrier at
// that address.
__device__ __forceinline__ void tma_load_multicast(uint32_t to, const void* map, uint32_t barrier,
                                                   uint16_t blocks, int c0, int c1, int c2,
                                                   int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(to),
      "l"(map), "r"(barrier), "h"(blocks), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32, PTX ISA section "Data Movement and
// Conversion Instructions: cp.reduce.async.bulk": adds `bytes` of floats at `from` to those at
// `to`. Both are aligned to 16 bytes. The thread's own groups count them: see bulk_wait.
__device__ __forceinline__ void bulk_add(float* to, uint32_t from, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}

// cp.async.bulk.commit_group: the thread's bulk operations so far are a group.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// cp.async.bulk.wait_group.read: waits until shared memory has been read by all of them.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// cp.async.bulk.wait_group: waits until they are done.
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// fence.proxy.async.shared::cta, "Memory Consistency Model: Proxies": orders writes to shared
// memory, this thread's own and those it has waited for, before reads by wgmma and bulk copies.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace jaxflash::cuda::ptx
