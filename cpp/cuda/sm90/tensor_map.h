// Descriptions of operands for the tensor memory accelerator.
#pragma once

#include "attention/problem.h"
#include "cuda/common/launch.cuh"
#include "cuda/sm90/params.h"

namespace jaxflash::cuda::sm90 {

// Whether the accelerator can read `tensor`, of 16-bit elements: addresses and strides are
// multiples of 16 bytes.
inline bool can_map(const Tensor& tensor, int64_t columns) {
  return tensor.column == 1 && allows_vectors(tensor, columns, 2);
}

// What is copied at a time: `box_rows` rows of one head, 64 columns.
Error make_map(const Problem& problem, const Tensor& tensor, int64_t columns, int64_t heads,
               int64_t rows, int box_rows, TileMap& map);

}  // namespace jaxflash::cuda::sm90
