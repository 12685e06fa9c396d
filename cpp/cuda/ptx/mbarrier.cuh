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

}  // namespace jaxflash::cuda::ptx
