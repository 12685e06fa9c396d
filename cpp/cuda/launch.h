// Entry points of the CUDA kernels. Knows neither XLA nor Python, and no kernel.
//
// Everything runs on the given stream; nothing is allocated and nothing waits for the device. What
// a call needs beside its operands and results is one workspace, whose size is asked for
// beforehand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "attention/problem.h"

struct CUstream_st;

namespace jaxflash::cuda {

using Stream = CUstream_st*;

// What went wrong, as a static text; nullptr where nothing did.
using Error = const char*;

struct Workspace {
  void* data = nullptr;  // aligned to 256 bytes
  size_t bytes = 0;
};

// What the forward pass writes.
struct ForwardResults {
  Tensor output;  // [*B, T, N, Hv], the query's dtype
  Statistics statistics;
  Workspace workspace;
};

// What the backward pass writes.
struct BackwardResults : Cotangents {
  Workspace workspace = {};
  bool deterministic = false;  // bitwise equal from run to run
};

// How the products of float operands are computed.
enum class Precision : uint8_t { kFloat, kTF32 };

// Bytes of workspace that a call needs at most, on any device. Only sizes, dtypes and which
// operands are there count, no addresses.
size_t forward_workspace_bytes(const Problem& problem);
size_t backward_workspace_bytes(const Problem& problem, const BackwardResults& results);

// What computes a call on GPUs of a compute capability, 10 * major + minor, that there is code for,
// in words; empty where no kernel does. Arrays are taken for dense, and as aligned as XLA's.
std::string forward_kernel(const Problem& problem, int capability);
std::string backward_kernel(const Problem& problem, const BackwardResults& results, int capability);

Error forward(const Problem& problem, const ForwardResults& results, Precision precision,
              Stream stream);
Error backward(const Problem& problem, const BackwardInputs& inputs, const BackwardResults& results,
               Precision precision, Stream stream);

}  // namespace jaxflash::cuda
