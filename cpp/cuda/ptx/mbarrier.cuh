// Barriers in shared memory that count arrivals, PTX ISA section "Parallel Synchronization and
// Communication Instructions: mbarrier". A phase ends when the expected arrivals have come; waiting
// for the parity of a phase leaves threads free to run ahead of one another.
#pragma once

#include <cstdint>

namespace jaxflash::cuda::ptx {

// mbarrier.init.shared.b64: `arrivals` end a phase.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// mbarrier.arrive.shared.b64: releases what the thread wrote before.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier)
               : "memory");
}

// cp.async.mbarrier.arrive.noinc.shared.b64: the thread arrives once all its cp.async so far are
// done.
__device__ __forceinline__ void cp_async_mbarrier_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// mbarrier.test_wait.parity.shared.b64, until the phase of that parity has ended.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, int parity) {
  uint32_t ended;
  do {
    asm volatile(
        "{ .reg .pred p;\n"
        "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p; }"
        : "=r"(ended)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (ended == 0);
}

// mbarrier.try_wait.parity.shared::cta.b64, likewise; the thread may sleep meanwhile. sm_90.
__device__ __forceinline__ void mbarrier_sleep(uint32_t barrier, int parity) {
  uint32_t ended;
  do {
    asm volatile(
        "{ .reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p; }"
        : "=r"(ended)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (ended == 0);
}

// mbarrier.arrive.expect_tx.shared::cta.b64: arrives, and the phase ends no sooner than `bytes`
// more have been copied. sm_90.
__device__ __forceinline__ void mbarrier_arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// mapa.shared::cluster.u32 and mbarrier.arrive.shared::cluster.b64: arrives at the same barrier of
// block `rank` of the cluster. Releases no writes to it, which would cost a fence of all memory:
// for who has only read. sm_90.
__device__ __forceinline__ void mbarrier_arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{ .reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// fence.mbarrier_init.release.cluster: initial values become visible to the cluster and to bulk
// copies. sm_90.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

}  // namespace jaxflash::cuda::ptx
