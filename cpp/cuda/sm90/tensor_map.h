// Descriptions of operands for the tensor memory accelerator.
#pragma once

#include "attention/problem.h"
#include "cuda/common/launch.cuh"
#include "cuda/sm90/params.h"

namespace jaxflash::cuda::sm90 {

// Whether the accelerator can read `tensor`, of elements of `size` bytes: addresses and strides are
// multiples of 16 bytes.
inline bool can_map(const Tensor& tensor, int64_t columns, int size = 2) {
  return tensor.column == 1 && allows_vectors(tensor, columns, size);
}

// Of one element of bias or mask.
constexpr int array_bytes(DType dtype) {
  return dtype == DType::kF32 ? 4 : dtype == DType::kBool ? 1 : 2;
}

// What is copied at a time: `box_rows` rows of one head, 64 columns.
Error make_map(const Problem& problem, const Tensor& tensor, int64_t columns, int64_t heads,
               int64_t rows, int box_rows, TileMap& map);

// Of bias or mask, for tiles of 64 rows and `keys` keys: as many columns at a time as make 128
// bytes of a row, or all.
Error make_array_map(const Problem& problem, const Tensor& array, int keys, TileMap& map);

}  // namespace jaxflash::cuda::sm90
