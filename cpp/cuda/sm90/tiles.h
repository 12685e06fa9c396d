// Tile sizes, as data. A multiprocessor has 227 KB of shared memory for a block and 65536
// registers; a consumer thread gets 232 of them where there are two consumer warpgroups, 160 where
// three.
#pragma once

#include <cstdint>

namespace jaxflash::cuda::sm90 {

struct ForwardTile {
  int warpgroups;  // of consumers, each with 64 rows
  int keys;
  int query_stages;
  int stages;            // of key and value tiles
  int cluster;           // blocks that share their keys and values
  int array_stages = 0;  // of tiles of bias and mask

  constexpr int rows() const { return 64 * warpgroups; }
  constexpr int threads() const { return 128 * (warpgroups + 1); }
  // Of a thread; together no more than the kernel starts with, 168 or 128 for each thread.
  constexpr int producer_registers() const { return warpgroups == 2 ? 40 : 32; }
  constexpr int consumer_registers() const { return warpgroups == 2 ? 232 : 160; }
  // Of shared memory for tiles of bias and mask, a stage and warpgroup: one of floats, or of 16-bit
  // types and a mask.
  constexpr int array_bytes() const { return 64 * keys * 4; }
};

// How many keys a kernel is meant for, of those that a row sees on average.
enum class Reach { kShort, kLong };
inline constexpr int64_t kShortKeys = 1024;

constexpr ForwardTile forward_tile(int dim, int value_dim, Reach reach) {
  // Registers a thread: output value_dim / 2, logits keys / 2, probabilities keys / 4.
  if (dim <= 64 && value_dim <= 64) return {3, 128, 2, 2, 1};
  if (dim <= 128 && value_dim <= 128) {
    // Few keys: tiles that divide them, and no rows of a neighbour to wait for.
    return reach == Reach::kShort ? ForwardTile{2, 128, 1, 3, 1} : ForwardTile{2, 176, 1, 2, 2};
  }
  if (dim <= 192 && value_dim <= 128) return {2, 128, 1, 2, 2};
  if (dim <= 192 && value_dim <= 192) return {2, 112, 1, 2, 2};
  return {2, 80, 1, 2, 2};
}

// Of kernels that apply all rules.
constexpr ForwardTile everything_tile(int dim, int value_dim) {
  if (dim <= 64 && value_dim <= 64) return {2, 128, 2, 2, 1, 2};
  if (dim <= 128 && value_dim <= 128) return {2, 128, 1, 2, 1, 1};
  return {2, 64, 1, 2, 1, 1};
}

// Two consumer warpgroups.
struct BackwardTile {
  int keys;    // of a block, at a time
  int rows;    // of queries, at a time
  int stages;  // of tiles of rows
  // Of tiles of bias and mask, and bytes of one.
  int array_stages = 1;
  int array_bytes = 0;
  int plans = 2;  // of units: with one, for want of shared memory, the next waits for the last

  static constexpr int kWarpgroups = 2;
  constexpr int threads() const { return 128 * (kWarpgroups + 1); }
  // Of a thread; together no more than the kernel starts with, 168 for each thread.
  constexpr int producer_registers() const { return 40; }
  constexpr int consumer_registers() const { return 232; }
  // Whether a warpgroup has both sums of 64 keys, and hands query sums to a warp that adds them by
  // bulk copies, which may wait for its turn. Else it has one of the two, of the block's 64 keys,
  // and its threads add query sums: there is no shared memory for bulk copies.
  constexpr bool owns_keys() const { return keys == 64 * kWarpgroups; }
};

// backward.cuh says what limits each, and what was tried.
constexpr BackwardTile backward_tile(int dim) {
  // Registers a thread: sums of 64 keys, dim with 128 keys and dim / 2 with 64; s and g, rows / 2
  // each, which half as many words of operands take the place of.
  if (dim <= 64) return {128, 128, 2};
  if (dim <= 128) return {128, 64, 2};
  return {64, 64, 2};
}

// Of kernels that apply all rules, whose tiles of bias and mask have 64 rows. Room for these is
// what shared memory has left: for a bias of floats and a mask, for one of 16-bit types and a mask,
// for one of 16-bit types or a mask. With dim 64, 128 rows compile too, probabilities kept in
// shared memory, but leave no room for a bias.
//
// How many times as fast as the portable kernels they first were, on an H200 on 2026-11-30, 4096
// keys, hidden size 2048, 16384 tokens; not timed with dim 256:
//
//                                dim 64   dim 128
//   soft cap                      1.26      1.68
//   dropout                       1.46      1.98
//   8 documents                   1.30      1.63
//   random segment ids            1.23
//   dense mask                    1.38      1.75
//   bias, 16 bits                 1.30      1.72
//   bias, floats                  1.9
//   gradient of a bias            1.16      1.56   [1, N, T, S]
//                                 1.0              [B, N, T, S]
constexpr BackwardTile everything_backward_tile(int dim) {
  if (dim <= 64) return {128, 64, 2, 2, 64 * 128 * 5};
  if (dim <= 128) return {128, 64, 2, 1, 64 * 128 * 3};
  return {64, 64, 2, 1, 64 * 64 * 2, 1};
}

}  // namespace jaxflash::cuda::sm90
