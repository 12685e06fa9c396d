// The CPU kernels as XLA custom calls.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jaxflash::ffi {

// Operands: kOperands. Results: output, logit_max, log_sum.
XLA_FFI_Error* cpu_forward(XLA_FFI_CallFrame* frame);

// Operands: kOperands, output_cotangent, logit_max, log_sum, delta. Results: cotangents of query,
// key, value, bias and scale (by row), workspace.
XLA_FFI_Error* cpu_backward(XLA_FFI_CallFrame* frame);

}  // namespace jaxflash::ffi
