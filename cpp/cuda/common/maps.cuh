// What is known of tiles before the main kernels: bounds of segment ids, and what a mask shows.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#include "attention/problem.h"
#include "attention/visibility.h"
#include "cuda/common/launch.cuh"
#include "cuda/sm80/params.h"

namespace jaxflash::cuda {

// One warp a tile of one batch. Positions past the length do not count; a tile without any gets
// bounds that meet no others.
static __global__ void segment_bounds_kernel(const __grid_constant__ Problem problem, bool of_keys,
                                             int tile_size, int64_t tiles, SegmentBounds* bounds) {
  const int64_t warp = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  if (warp >= problem.batches * tiles) return;
  const BatchIndex index = batch_index(problem, warp / tiles);
  const Extent extent = extent_of(problem, index);
  const Tensor& ids = of_keys ? problem.key_value_segment_ids : problem.query_segment_ids;
  const auto* from = static_cast<const int32_t*>(ids.data) + batch_offset(ids, index);
  const int64_t first = warp % tiles * tile_size;
  const int64_t end = min_of(first + tile_size, of_keys ? extent.key_length : extent.query_length);
  int32_t least = INT_MAX, greatest = INT_MIN;
  for (int64_t i = first + threadIdx.x % 32; i < end; i += 32) {
    least = min(least, from[i]);
    greatest = max(greatest, from[i]);
  }
  least = __reduce_min_sync(0xffffffffu, least);
  greatest = __reduce_max_sync(0xffffffffu, greatest);
  if (threadIdx.x % 32 == 0) bounds[warp] = {least, greatest};
}

// One block a tile of the mask, as far as it is not broadcast. `map` is addressed as
// TileMaps::mask.
static __global__ void mask_map_kernel(const __grid_constant__ Problem problem,
                                       const __grid_constant__ Tensor map, int tile_rows,
                                       int tile_keys, int64_t heads, int64_t row_tiles,
                                       int64_t key_tiles) {
  const Tensor& mask = problem.mask;
  int64_t at = blockIdx.x;
  const int64_t key_tile = at % key_tiles;
  at /= key_tiles;
  const int64_t row_tile = at % row_tiles;
  at /= row_tiles;
  const int64_t head = at % heads;
  at /= heads;
  BatchIndex index = {problem.batch_rank, {}};
  for (int dim = kMaxBatchDims - 1; dim >= 0; --dim) {
    if (dim >= problem.batch_rank || mask.batch[dim] == 0) continue;
    index.at[dim] = at % problem.batch_size[dim];
    at /= problem.batch_size[dim];
  }
  const int64_t first_row = row_tile * tile_rows, first_key = key_tile * tile_keys;
  const int rows = mask.row == 0 ? 1 : min_of(tile_rows, problem.query_length - first_row);
  const int keys = mask.column == 0 ? 1 : min_of(tile_keys, problem.key_length - first_key);
  const auto* from = static_cast<const uint8_t*>(mask.data) + batch_offset(mask, index) +
                     head * mask.head + first_row * mask.row + first_key * mask.column;
  uint32_t shown = 0, hidden = 0;
  const auto look = [&](uint32_t four) {
    shown |= four;
    hidden |= __vcmpeq4(four, 0);
  };
  const bool vectors = mask.column == 1 && keys % 16 == 0 &&
                       (reinterpret_cast<uintptr_t>(from) | mask.row) % 16 == 0;
  if (vectors) {
    const int chunks = keys / 16;
    for (int i = threadIdx.x; i < rows * chunks; i += blockDim.x) {
      const auto chunk =
          *reinterpret_cast<const uint4*>(from + i / chunks * mask.row + i % chunks * 16);
      look(chunk.x), look(chunk.y), look(chunk.z), look(chunk.w);
    }
  } else {
    for (int i = threadIdx.x; i < rows * keys; i += blockDim.x) {
      const uint32_t visible = from[i / keys * mask.row + i % keys * mask.column];
      look(visible * 0x01010101);
    }
  }
  shown = __syncthreads_or(shown != 0);
  hidden = __syncthreads_or(hidden != 0);
  if (threadIdx.x == 0) {
    static_cast<TileVisibility*>(map.data)[batch_offset(map, index) + head * map.head +
                                           row_tile * map.row + key_tile * map.column] =
        shown == 0    ? TileVisibility::kNone
        : hidden != 0 ? TileVisibility::kSome
                      : TileVisibility::kAll;
  }
}

// Takes memory for the maps that a problem needs, with tiles of `rows` times `keys`.
inline sm80::TileMaps take_maps(const Problem& problem, int rows, int keys, Cursor& cursor) {
  sm80::TileMaps maps;
  maps.row_tiles = tiles_of(problem.query_length, rows);
  maps.key_tiles = tiles_of(problem.key_length, keys);
  if (problem.query_segment_ids.data != nullptr) {
    maps.key_segments = cursor.take<SegmentBounds>(problem.batches * maps.key_tiles);
    maps.query_segments = cursor.take<SegmentBounds>(problem.batches * maps.row_tiles);
  }
  const Tensor& mask = problem.mask;
  if (mask.data == nullptr) return maps;
  int64_t count = 1;
  const auto stride = [&count](bool broadcast, int64_t size) -> int64_t {
    if (broadcast) return 0;
    const int64_t step = count;
    count *= size;
    return step;
  };
  maps.mask.column = stride(mask.column == 0, maps.key_tiles);
  maps.mask.row = stride(mask.row == 0, maps.row_tiles);
  maps.mask.head = stride(mask.head == 0, problem.query_heads);
  for (int dim = problem.batch_rank - 1; dim >= 0; --dim) {
    maps.mask.batch[dim] = stride(mask.batch[dim] == 0, problem.batch_size[dim]);
  }
  maps.mask_tiles = count;
  maps.mask.data = cursor.take<TileVisibility>(count);
  return maps;
}

inline void launch_maps(const Problem& problem, int rows, int keys, const sm80::TileMaps& maps,
                        Stream stream) {
  if (maps.query_segments != nullptr) {
    const auto launch = [&](bool of_keys, int tile, int64_t tiles, SegmentBounds* bounds) {
      const int64_t blocks = tiles_of(problem.batches * tiles, 4);
      if (blocks == 0) return;
      segment_bounds_kernel<<<blocks, 128, 0, stream>>>(problem, of_keys, tile, tiles, bounds);
    };
    launch(true, keys, maps.key_tiles, maps.key_segments);
    launch(false, rows, maps.row_tiles, maps.query_segments);
  }
  if (maps.mask_tiles > 0) {
    mask_map_kernel<<<maps.mask_tiles, 128, 0, stream>>>(
        problem, maps.mask, rows, keys, maps.mask.head == 0 ? 1 : problem.query_heads,
        maps.mask.row == 0 ? 1 : maps.row_tiles, maps.mask.column == 0 ? 1 : maps.key_tiles);
  }
}

}  // namespace jaxflash::cuda
