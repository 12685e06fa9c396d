// The CUDA kernels as XLA custom calls.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ffi/decode.h"
#include "xla/ffi/api/ffi.h"

namespace jaxflash::ffi {

// Operands: kOperands. Results: output, logit_max, log_sum, workspace. Attributes: those of the CPU
// call, and `precision` (i64: 0 float, 1 TF32 products of float operands).
XLA_FFI_Error* cuda_forward(XLA_FFI_CallFrame* frame);

// Operands: kOperands, output_cotangent, logit_max, log_sum, delta. Results: cotangents of query,
// key, value, bias and scale (by row), workspace. Attributes: also `deterministic` (i64: 0 or 1).
//
// Both workspaces are u8[bytes], with `bytes` from the functions below.
XLA_FFI_Error* cuda_backward(XLA_FFI_CallFrame* frame);

// The dtype and shape of a buffer of a call.
struct BufferShape {
  XLA_FFI_DataType dtype;
  std::vector<int64_t> dims;
};

// Bytes of workspace that a call with these operands and results (without the workspace) needs; an
// error where they don't fit together.
xla::ffi::ErrorOr<int64_t> cuda_forward_workspace(const std::vector<BufferShape>& operands,
                                                  const Attributes& attributes);
xla::ffi::ErrorOr<int64_t> cuda_backward_workspace(const std::vector<BufferShape>& operands,
                                                   const std::vector<BufferShape>& results,
                                                   const Attributes& attributes,
                                                   bool deterministic);

// Likewise what would compute it on GPUs of a compute capability, see cuda::forward_kernel.
xla::ffi::ErrorOr<std::string> cuda_forward_kernel(const std::vector<BufferShape>& operands,
                                                   const Attributes& attributes, int capability);
xla::ffi::ErrorOr<std::string> cuda_backward_kernel(const std::vector<BufferShape>& operands,
                                                    const std::vector<BufferShape>& results,
                                                    const Attributes& attributes,
                                                    bool deterministic, int capability);

}  // namespace jaxflash::ffi
