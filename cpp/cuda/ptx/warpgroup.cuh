// What warpgroups and clusters of blocks need beside products: registers and barriers.
#pragma once

#include <cstdint>

namespace jaxflash::cuda::ptx {

// setmaxnreg, PTX ISA section "Miscellaneous Instructions: setmaxnreg": each thread of the
// warpgroup gives registers back, or waits until it has got more. sm_90a.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// barrier.sync and barrier.arrive, PTX ISA section "Parallel Synchronization and Communication
// Instructions: barrier": named barriers, which end a phase when `threads` have arrived. Only
// barrier_sync waits for that.
__device__ __forceinline__ void barrier_sync(int name, int threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int name, int threads) {
  asm volatile("barrier.arrive.aligned %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// barrier.cluster.arrive and barrier.cluster.wait, PTX ISA section "barrier.cluster": all threads
// of the cluster wait for one another. sm_90.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// %cluster_ctarank, PTX ISA section "Special Registers": this block's number in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// mapa.shared::cluster.u32 and st.async.shared::cluster.mbarrier::complete_tx::bytes.b32, PTX ISA
// sections "mapa" and "st.async": stores a word to block `rank` of the cluster, at the address that
// `to` has here; its four bytes are counted on the barrier at `barrier` there. sm_90.
__device__ __forceinline__ void store_async_at(uint32_t to, uint32_t word, uint32_t barrier,
                                               uint32_t rank) {
  asm volatile(
      "{ .reg .b32 to, barrier;\n"
      "mapa.shared::cluster.u32 to, %0, %3;\n"
      "mapa.shared::cluster.u32 barrier, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %1, [barrier]; }" ::"r"(to),
      "r"(word), "r"(barrier), "r"(rank)
      : "memory");
}

}  // namespace jaxflash::cuda::ptx
