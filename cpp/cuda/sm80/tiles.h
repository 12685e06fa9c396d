// Tile sizes, as data. `arch` is that of the code that runs, as in __CUDA_ARCH__ / 10: the host
// asks the loaded kernel for it, so that both sides see the same row.
//
// Shared memory of a block is at most 99 KB on 8.6, 8.9 and 12.x, which run code for 8.0 and 12.0;
// 227 KB on 9.0 and 10.0. Registers: 65536 a multiprocessor, 255 a thread.
#pragma once

#include "attention/problem.h"

#if defined(__CUDA_ARCH__)
#define JAXFLASH_ARCH (__CUDA_ARCH__ / 10)
#else
#define JAXFLASH_ARCH 80
#endif

namespace jaxflash::cuda::sm80 {

constexpr bool has_large_shared_memory(int arch) { return arch >= 90 && arch < 120; }

// Dynamic shared memory that a block can have, beside 1 KB of static.
constexpr int most_shared_bytes(int arch) {
  return (has_large_shared_memory(arch) ? 226 : 98) * 1024;
}

struct ForwardTile {
  int warps;
  int strips;  // of 16 rows, for each warp
  int keys;
  int stages;               // of key and value tiles
  bool query_in_registers;  // its A operands, for all of the loop
  int blocks;               // a multiprocessor, as a register limit

  constexpr int rows() const { return warps * strips * 16; }
  constexpr int threads() const { return warps * 32; }
  constexpr int shared_bytes(int dim, int size) const {
    return (rows() + 2 * stages * keys) * dim * size;
  }
};

constexpr ForwardTile forward_tile(bool is_float, int dim, bool everything, int arch) {
  const bool large = has_large_shared_memory(arch);
  if (is_float) {
    // Two words an element and both halves of three products: registers.
    if (dim <= 64) return {4, 1, 32, 2, false, 2};
    if (dim <= 128) return {4, 1, 32, large ? 2 : 1, false, 1};
    return {4, 1, 16, 1, false, 1};
  }
  if (everything) {
    // The rules need registers of their own, and more warps hide what they wait for.
    if (dim <= 64) return {4, 2, 64, 2, large, 2};
    if (dim <= 96) return {4, 1, 64, 2, false, 2};
    if (dim <= 128) return {4, 2, 32, 2, false, 2};
    return {8, 1, large ? 64 : 32, large && dim <= 192 ? 2 : 1, false, 1};
  }
  if (dim <= 64) return {4, 2, 128, 2, false, 2};
  if (dim <= 128) return {4, 2, 64, 2, false, 2};  // 96 KB at 128
  return {8, 1, large ? 64 : 32, large ? 2 : 1, false, 1};
}

// A grid of warps over a product's result: `rows` times `columns` warps.
struct WarpGrid {
  int rows;
  int columns;
};

struct BackwardTile {
  int rows;
  int keys;
  int stages;           // of query and cotangent tiles
  int pair_stages;      // of probabilities and gradients of logits
  WarpGrid logits;      // over [rows][keys]
  WarpGrid key_sums;    // over [keys][dim]
  WarpGrid query_sums;  // over [rows][dim]
  int blocks;

  constexpr int warps() const { return logits.rows * logits.columns; }
  constexpr int threads() const { return warps() * 32; }
  // Whether the logits of a key and its sums belong to the same warp.
  constexpr bool owns_keys() const {
    return logits.rows == 1 && key_sums.columns == 1 && warps() > 1;
  }
  constexpr int chunk_rows() const { return owns_keys() ? 32 : rows; }
  // Key, value, query and cotangent tiles; gradients of logits, and probabilities where they leave
  // their warp; three statistics a row.
  constexpr int shared_bytes(int dim, int size) const {
    return (2 * keys + 2 * stages * rows) * dim * size +
           (owns_keys() ? 1 : 2) * pair_stages * rows * keys * size + 3 * stages * rows * 4;
  }
};

constexpr BackwardTile backward_tile(bool is_float, int dim, bool everything, int arch) {
  const bool large = has_large_shared_memory(arch);
  if (is_float) {
    if (dim <= 64) return {64, large ? 64 : 32, 1, 1, {4, 2}, {2, 4}, {4, 2}, 1};
    if (large) return {64, 32, 1, 1, {4, 2}, {2, 4}, {4, 2}, 1};
    if (dim <= 128) return {32, 32, 1, 1, {2, 2}, {2, 2}, {2, 2}, 1};
    return {16, 16, 1, 1, {1, 1}, {1, 1}, {1, 1}, 1};
  }
  if (large) {
    if (dim <= 64 && !everything) return {64, 128, 2, 2, {1, 4}, {4, 1}, {2, 2}, 2};
    if (dim <= 64) return {64, 64, 2, 2, {2, 2}, {2, 2}, {2, 2}, 2};
    // The rules need registers of their own.
    if (dim <= 96 && everything) return {64, 64, 2, 2, {1, 4}, {4, 1}, {2, 2}, 2};
    if (dim <= 128 && everything) return {32, 64, 2, 2, {1, 4}, {4, 1}, {2, 2}, 2};
    // A warp of query_sums takes a multiple of 16 columns: not a quarter of 96.
    if (dim <= 96) return {64, 128, 2, 2, {2, 4}, {4, 2}, {4, 2}, 1};
    if (dim <= 128) return {64, 128, 2, 2, {2, 4}, {4, 2}, {2, 4}, 1};
    if (dim > 192 && everything) return {64, 32, 2, 2, {4, 2}, {2, 4}, {4, 2}, 1};
    return {64, 64, 2, 2, {4, 2}, {2, 4}, {2, 4}, 1};
  }
  if (dim <= 64) return {64, 64, 2, 2, {4, 2}, {4, 2}, {4, 2}, 1};
  if (dim <= 128) return {64, 64, 1, 1, {4, 2}, {4, 2}, {4, 2}, 1};
  if (dim > 192 && everything) return {64, 16, 1, 1, {4, 1}, {1, 4}, {4, 1}, 1};
  return {32, 32, 1, 1, {2, 2}, {2, 2}, {2, 2}, 1};
}

}  // namespace jaxflash::cuda::sm80
