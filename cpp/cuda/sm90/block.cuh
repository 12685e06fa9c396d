// What the Hopper kernels share: barriers, rings of stages, places in maps, and stores.
#pragma once

#include <cstdint>

#include "attention/visibility.h"
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

// Positions at + begin .. at + end within the length, in 32 bits.
struct Neighbours {
  int begin, end, length;

  __device__ __forceinline__ int first_of(int at) const { return clamped(at + begin); }
  __device__ __forceinline__ int end_of(int at) const { return clamped(at + end); }

 private:
  __device__ __forceinline__ int clamped(int position) const {
    return max(0, min(position, length));
  }
};

// Those from `left` before `center` to `right` after it.
__device__ __forceinline__ Neighbours neighbours(int64_t center, int64_t left, int64_t right,
                                                 int64_t length) {
  constexpr int64_t kFar = 1 << 30;  // beyond any position, and one more is still within 32 bits
  return {static_cast<int>(left == kUnlimited ? -kFar : clamp_to(center - left, -kFar, kFar)),
          static_cast<int>(right == kUnlimited ? kFar : clamp_to(center + right + 1, -kFar, kFar)),
          static_cast<int>(length)};
}
// Keys in the range of an existing row, and rows that have an existing key in theirs.
__device__ __forceinline__ Neighbours keys_near_rows(const Extent& extent) {
  return neighbours(extent.query_offset, extent.window_left, extent.window_right,
                    extent.key_length);
}
__device__ __forceinline__ Neighbours rows_near_keys(const Extent& extent) {
  return neighbours(-extent.query_offset, extent.window_right, extent.window_left,
                    extent.query_length);
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
