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

// fence.proxy.async.shared::cta, "Memory Consistency Model: Proxies": orders this thread's own
// writes to shared memory before reads by wgmma and bulk copies.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace jaxflash::cuda::ptx
