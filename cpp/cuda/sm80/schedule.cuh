// From a block's index to its tile and head.
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

}  // namespace jaxflash::cuda::sm80
