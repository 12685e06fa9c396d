// What kernels that apply all rules share on Hopper: what is planned of them, and tiles of bias and
// mask.
#pragma once

#include <cstdint>

#include "cuda/common/rules.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm80/tile.cuh"
#include "cuda/sm90/block.cuh"
#include "cuda/sm90/params.h"

namespace jaxflash::cuda::sm90 {

using sm80::Everything;
using sm80::Ranges;

// What all rules need of a plan beside what ranges do.
template <class Policy>
struct PlanRules {};
template <>
struct PlanRules<Everything> {
  sm80::ScaledView view;
  int checks;  // of all tiles
  Place bias, mask;
  float sink;  // minus infinity: none
};

// A word of a head's dropout stream.
__device__ __forceinline__ uint32_t stream_word(const Tensor& stream, const BatchIndex& index,
                                                int64_t head, int word) {
  return static_cast<const uint32_t*>(
      stream.data)[batch_offset(stream, index) + head * stream.head + word];
}

// Fills in what all rules need of a head. All lanes of a warp call it, each for its part.
template <class T, class Params>
__device__ __forceinline__ void plan_rules(const Params& params, const Extent& extent,
                                           const BatchIndex& index, int64_t batch, int64_t head,
                                           PlanRules<Everything>& rules) {
  const Problem& problem = params.problem;
  const int lane = threadIdx.x & 31;
  sm80::ScaledView& view = rules.view;
  if (lane == 0) {
    view.extent = extent;
    view.index = index;
    view.head = head;
    view.batch = batch;
    sm80::find_arrays<Everything>(problem, params.maps, view);
  }
  if (lane == 1) {
    view.scale = batch_value<float>(problem.scale, index, 1.f);
    const sm80::HeadView& unscaled = view;
    view.scaling = sm80::scaling_of<T, Everything>(problem, unscaled);
    const bool changes = problem.bias.data != nullptr || view.scaling.caps;
    rules.checks = changes || view.scaling.unit.factor != 1.f ? sm80::kChangeAll : 0;
  }
  // A broadcast array has one head.
  const auto place = [&](const TileMap& map, const Tensor& array) {
    return place_of(map, index, array.head == 0 ? 0 : static_cast<int>(head));
  };
  if (lane == 2) rules.bias = place(params.bias, problem.bias);
  if (lane == 3) rules.mask = place(params.mask, problem.mask);
  if (lane == 4) rules.sink = sm80::sink_of<Everything>(problem, index, head);
  if (lane < 4 && problem.dropout_stream.data != nullptr) {
    view.stream[lane] = stream_word(problem.dropout_stream, index, head, lane);
  }
}

// Tiles of 64 rows of bias and mask as the accelerator leaves them: panels of 128 bytes a row, or
// of fewer where that is all of it, one after the other. Its swizzle is TileLayout's permutation.
template <int kKeys>
struct PanelTiles {
  template <class E>
  struct Layout
      : sm80::TileLayout<E, (kKeys * sm80::kSize<E> < 128 ? kKeys : 128 / sm80::kSize<E>)> {
    static constexpr int kSpanStride = 64 * Layout::kRowBytes;
  };
};

// Has such a tile of `bytes` copied, from (row, key) on. One lane calls it.
template <int kKeys>
__device__ __forceinline__ void copy_array(const TileMap& map, const Place& place, int bytes,
                                           int row, int key, uint32_t to, uint32_t barrier) {
  constexpr int kPanelBytes = 64 * 128;
  const int columns = bytes == 0 ? kKeys : min(kKeys, kPanelBytes * kKeys / bytes);
#pragma unroll 1
  for (int at = 0; at < bytes; at += kPanelBytes) {
    ptx::tma_load(to + at, &map.map, barrier, key + at / kPanelBytes * columns, place.head, row,
                  place.batch);
  }
}

}  // namespace jaxflash::cuda::sm90
