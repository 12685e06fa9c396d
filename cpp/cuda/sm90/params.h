// What the launchers hand to the Hopper kernels.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/problem.h"
#include "cuda/sm80/params.h"

namespace jaxflash::cuda::sm90 {

using sm80::Schedule;

// An operand [*B, rows, heads, columns], dims in any order, as the tensor memory accelerator reads
// it: four dims (columns, heads, rows, batches), of which the last has as stride what all batch
// strides are multiples of.
struct TileMap {
  CUtensorMap map;
  int32_t batch[kMaxBatchDims];  // of a step along each batch dim, in the map's last dim
};

struct ForwardParams {
  TileMap query;
  TileMap key;
  TileMap value;
  Problem problem;
  Tensor output;
  Statistics statistics;
  Schedule schedule;   // tiles: of the rows of a cluster
  uint32_t group = 1;  // query heads a key head
  // How many tiles were dealt out beside the first ones, 0 at first; nullptr: in a fixed order.
  uint32_t* next_unit = nullptr;

  // Everything only.
  sm80::TileMaps maps;
  sm80::ArrayStaging staging;  // bytes of a warpgroup's tile
  TileMap bias;
  TileMap mask;
};

// What the backward pass needs of rows, each [batches, N, T]: a head's rows side by side.
struct GatheredRows {
  float* logit_max = nullptr;
  float* log_sum = nullptr;
  float* delta = nullptr;
};

struct BackwardParams {
  TileMap query;
  TileMap cotangent;  // of the output
  TileMap key;
  TileMap value;
  Problem problem;
  Statistics statistics;
  Tensor output_cotangent;
  Tensor delta;
  GatheredRows rows;              // the same once more
  Tensor key_cotangent;           // data nullptr: not wanted
  Tensor value_cotangent;         // likewise
  Schedule schedule;              // tiles of keys, key heads
  uint32_t* next_unit = nullptr;  // how many tiles of keys were dealt out; gather_rows sets it to 0
  uint32_t group = 1;             // query heads a key head
  // As sm80::BackwardParams has them.
  float* query_sums = nullptr;
  int64_t strips = 0;
  // Query sums are to be bitwise equal from run to run, ranges only: of each kTurnRows rows,
  // `turns[head][rows][warpgroup]` counts the tiles of keys that have been added.
  static constexpr int kTurnRows = 128;
  bool deterministic = false;
  uint32_t* turns = nullptr;
  int64_t turns_a_head = 0;

  // Everything only; the cotangent as sm80::BackwardParams has it.
  sm80::TileMaps maps;
  sm80::ArrayStaging staging;  // bytes of a tile
  TileMap bias;
  TileMap mask;
  Tensor bias_cotangent;  // data nullptr: not wanted
  bool bias_sums = false;
};

}  // namespace jaxflash::cuda::sm90
