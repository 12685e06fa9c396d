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

}  // namespace

Error make_map(const Problem& problem, const Tensor& tensor, int64_t columns, int64_t heads,
               int64_t rows, int box_rows, TileMap& map) {
  static const Encode encode = find_encode();
  if (encode == nullptr) return "jaxflash: the driver has no cuTensorMapEncodeTiled";

  // All batch dims as one, in steps that each dim's stride is a multiple of.
  int64_t step = 0, last = 0;
  for (int dim = 0; dim < problem.batch_rank; ++dim) {
    step = std::gcd(step, tensor.batch[dim]);
    last += (problem.batch_size[dim] - 1) * tensor.batch[dim];
  }
  step = std::max<int64_t>(step, 8);
  for (int dim = 0; dim < kMaxBatchDims; ++dim) {
    map.batch[dim] = static_cast<int32_t>(tensor.batch[dim] / step);
  }
  const auto size = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  const auto stride = [](int64_t x) {
    return static_cast<cuuint64_t>(std::max<int64_t>(x, 8) * 2);
  };
  const cuuint64_t sizes[] = {size(columns), size(heads), size(rows), size(last / step + 1)};
  const cuuint64_t strides[] = {stride(tensor.head), stride(tensor.row), stride(step)};
  const cuuint32_t box[] = {64, 1, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t each[] = {1, 1, 1, 1};
  const CUresult result =
      encode(&map.map,
             problem.query.dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
             4, tensor.data, sizes, strides, box, each, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "jaxflash: cuTensorMapEncodeTiled refused an operand";
}

}  // namespace jaxflash::cuda::sm90
