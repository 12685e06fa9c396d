#include <cuda_runtime.h>

#include <algorithm>
#include <numeric>

#include "cuda/sm90/tensor_map.h"

namespace jaxflash::cuda::sm90 {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, which no library of ours is linked against: the module must load where
// there is no driver.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &result);
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess
             ? reinterpret_cast<Encode>(function)
             : nullptr;
}

CUtensorMapDataType type_of(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::kF16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kBool:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  }
}

// Sizes of an operand beside its batch dims.
struct Sizes {
  int64_t columns, heads, rows;
};

// What is copied at a time, of one head: whole swizzles, of 128 bytes a row or of 64.
struct Box {
  int columns, rows;
};

Error encode_map(const Problem& problem, const Tensor& tensor, const Sizes& of, const Box& copied,
                 TileMap& map) {
  static const Encode encode = find_encode();
  if (encode == nullptr) return "jaxflash: the driver has no cuTensorMapEncodeTiled";

  // All batch dims as one, in steps that each dim's stride is a multiple of.
  int64_t step = 0, last = 0;
  for (int dim = 0; dim < problem.batch_rank; ++dim) {
    step = std::gcd(step, tensor.batch[dim]);
    last += (problem.batch_size[dim] - 1) * tensor.batch[dim];
  }
  const int64_t bytes = array_bytes(tensor.dtype);
  step = std::max<int64_t>(step, 16 / bytes);
  for (int dim = 0; dim < kMaxBatchDims; ++dim) {
    map.batch[dim] = static_cast<int32_t>(tensor.batch[dim] / step);
  }
  const auto size = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  // Where there is one element, any stride will do; where it is 0, all rows are the same.
  const auto stride = [bytes](int64_t x, int64_t count) {
    return static_cast<cuuint64_t>(count == 1 ? std::max<int64_t>(x * bytes, 16) : x * bytes);
  };
  const cuuint64_t sizes[] = {size(of.columns), size(of.heads), size(of.rows),
                              size(last / step + 1)};
  const cuuint64_t strides[] = {stride(tensor.head, of.heads), stride(tensor.row, of.rows),
                                stride(step, 1)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(copied.columns), 1,
                            static_cast<cuuint32_t>(copied.rows), 1};
  const cuuint32_t each[] = {1, 1, 1, 1};
  const CUresult result =
      encode(&map.map, type_of(tensor.dtype), 4, tensor.data, sizes, strides, box, each,
             CU_TENSOR_MAP_INTERLEAVE_NONE,
             copied.columns * bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "jaxflash: cuTensorMapEncodeTiled refused an operand";
}

}  // namespace

Error make_map(const Problem& problem, const Tensor& tensor, int64_t columns, int64_t heads,
               int64_t rows, int box_rows, TileMap& map) {
  return encode_map(problem, tensor, {columns, heads, rows}, {64, box_rows}, map);
}

Error make_array_map(const Problem& problem, const Tensor& array, int keys, TileMap& map) {
  const int64_t heads = array.head == 0 ? 1 : problem.query_heads;
  const int columns = std::min(keys, 128 / array_bytes(array.dtype));
  return encode_map(problem, array, {problem.key_length, heads, problem.query_length},
                    {columns, 64}, map);
}

}  // namespace jaxflash::cuda::sm90
