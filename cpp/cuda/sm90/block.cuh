// What the Hopper kernels share: barriers, rings of stages, places in maps, and stores.
#pragma once

#include <cstdint>

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/sm90/params.h"

namespace jaxflash::cuda::sm90 {

// Where a head's tiles lie in a map.
struct Place {
  int head, batch;
};

__device__ __forceinline__ Place place_of(const TileMap& map, const BatchIndex& index, int head) {
  int batch = 0;
#pragma unroll
  for (int dim = 0; dim < kMaxBatchDims; ++dim) {
    batch += static_cast<int>(index.at[dim]) * map.batch[dim];
  }
  return {head, batch};
}

// A place in a ring of stages, and the parity of the phase that its barriers are in there; both in
// one register.
template <int kStages>
struct Ring {
  uint32_t position = 0;

  __device__ __forceinline__ uint32_t stage() const { return position % kStages; }
  __device__ __forceinline__ uint32_t parity() const { return position / kStages; }
  __device__ __forceinline__ void advance() { position = (position + 1) % (2 * kStages); }
};

// What all lanes of a warp hold, told to the compiler, which then keeps it in uniform registers.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

__device__ __forceinline__ uint32_t shared_address(const void* of) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(of));
}

__device__ __forceinline__ void arrive(uint64_t& barrier) {
  ptx::mbarrier_arrive(shared_address(&barrier));
}
__device__ __forceinline__ void wait(const uint64_t& barrier, int parity) {
  ptx::mbarrier_sleep(shared_address(&barrier), parity);
}

}  // namespace jaxflash::cuda::sm90
