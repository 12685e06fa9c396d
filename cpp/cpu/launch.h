// Entry points of the CPU kernels. Knows neither XLA nor Python.
#pragma once

#include <cstdint>

#include "attention/problem.h"
#include "cpu/executor.h"

namespace jaxflash::cpu {

// Keys of a tile. Parallel tasks of the backward pass take whole tiles.
inline constexpr int64_t kTileKeys = 128;

// What the forward pass writes.
struct ForwardResults {
  Tensor output;  // [*B, T, N, Hv], the query's dtype
  Statistics statistics;
};

// What the backward pass writes.
struct BackwardResults : Cotangents {
  // Sums of the query cotangent before it is scaled, [chunks, *B, T, N, H] in the compute type: one
  // for each chunk of key tiles that run in parallel. Absent where the query cotangent itself can
  // hold them (one chunk, compute dtype) or none are needed.
  Tensor workspace = {};
  int64_t chunks = 1;
  int64_t chunk_stride = 0;  // elements
};

// The instruction set that the kernels run with, chosen once, and the null-terminated list of those
// that were built.
const char* instruction_set();
const char* const* instruction_sets();

// Both return false where scratch memory (about 2 MiB a thread at most) cannot be had.
bool forward(const Problem& problem, const ForwardResults& results, Executor& executor);
bool backward(const Problem& problem, const BackwardInputs& inputs, const BackwardResults& results,
              Executor& executor);

}  // namespace jaxflash::cpu
