// From a block's index to its tile, head and batch.
#pragma once

#include <cstdint>

#include "cuda/sm80/params.h"

namespace jaxflash::cuda::sm80 {

struct Work {
  uint32_t tile;
  uint32_t head;  // in all batches
};

__device__ __forceinline__ Work work_of(const Schedule& schedule, uint32_t block) {
  const uint32_t section_blocks = schedule.section_heads * schedule.tiles;
  const uint32_t section = block / section_blocks;
  const uint32_t in_section = block - section * section_blocks;
  const uint32_t first_head = section * schedule.section_heads;
  const uint32_t heads = min(schedule.section_heads, schedule.heads - first_head);
  const uint32_t tile = in_section / heads;
  return {schedule.last_first ? schedule.tiles - 1 - tile : tile,
          first_head + in_section - tile * heads};
}

// A backward block's key heads may be shared by batches: `unit` numbers those that do not share
// them, and `repeat` those that do. The batch of both: its index is the unit's in the dims that are
// kept, the repeat's in those that are summed.
__device__ __forceinline__ int64_t batch_of(const BackwardParams& params, int64_t unit,
                                            int64_t repeat) {
  const Problem& problem = params.problem;
  int64_t batch = 0, step = 1;
  for (int dim = problem.batch_rank - 1; dim >= 0; --dim) {
    const int64_t size = problem.batch_size[dim];
    const bool summed = params.summed[dim];
    const int64_t index = summed ? repeat : unit;
    batch += index % size * step;
    repeat = summed ? index / size : repeat;
    unit = summed ? unit : index / size;
    step *= size;
  }
  return batch;
}

}  // namespace jaxflash::cuda::sm80
