// What the launchers hand to the kernels.
#pragma once

#include <cstdint>

#include "attention/problem.h"
#include "attention/visibility.h"

namespace jaxflash::cuda::sm80 {

// How one dimension of the grid is dealt to tiles and heads: sections of heads whose keys and
// values fit in the L2 cache together, and in a section all heads of a tile before the next tile.
struct Schedule {
  uint32_t tiles = 0;          // of rows or keys, for each head
  uint32_t heads = 0;          // in all batches
  uint32_t section_heads = 1;  // in a section; the last may have fewer
  bool last_first = false;     // tiles in descending order
};

// Which of the operands that are copied in tiles allow aligned 16-byte pieces.
struct Vectors {
  bool query = false;
  bool key = false;
  bool value = false;
  bool output = false;  // or its cotangent
};

// What hides whole tiles, computed before the main kernel.
struct TileMaps {
  SegmentBounds* query_segments = nullptr;  // [*B, row tiles]
  SegmentBounds* key_segments = nullptr;    // [*B, key tiles]
  Tensor mask;  // TileVisibility of each tile, a byte: [*B, N, row tiles, key tiles], broadcast as
                // the mask is
  int64_t mask_tiles = 0;  // of all of the map
  int64_t row_tiles = 0;
  int64_t key_tiles = 0;
};

// Bytes of a tile [rows][keys] of bias and mask in shared memory, a stage; 0: there is none, or it
// is read from global memory.
struct ArrayStaging {
  int bias_bytes = 0;
  int mask_bytes = 0;
};

struct ForwardParams {
  Problem problem;
  Tensor output;
  Statistics statistics;
  Schedule schedule;
  Vectors vectors;
  TileMaps maps;
  ArrayStaging staging;
  bool precise = true;  // float products to float accuracy
  int group = 1;        // query heads a key head

  // Keys dealt to several blocks, each with results of its own to be combined: outputs
  // [splits, heads, T, D], statistics [splits, heads, T].
  int splits = 1;
  float* split_output = nullptr;
  float* split_logit_max = nullptr;
  float* split_log_sum = nullptr;
};

struct BackwardParams {
  Problem problem;
  Tensor output_cotangent;
  Statistics statistics;
  Tensor delta;
  Tensor key_cotangent;
  Tensor value_cotangent;
  // Of a bias that is broadcast, f32 sums of its shape, zero at first; else the result itself.
  Tensor bias_cotangent;
  bool bias_sums = false;
  Schedule schedule;  // heads: key heads in all batch units
  Vectors vectors;
  bool vector_key_cotangent = false;
  bool vector_value_cotangent = false;
  TileMaps maps;
  ArrayStaging staging;
  bool bias_by_tiles = false;  // its cotangent is stored from tiles of gradients of logits
  bool precise = true;

  // Batch dims that the key and value cotangents are summed over.
  bool summed[kMaxBatchDims] = {};
  int64_t repeats = 1;
  int group = 1;  // query heads a key head
  int heads = 1;  // that a block takes its keys past: repeats * group

  bool dead_rows = true;  // whether a row may see nothing

  // Tiles of rows of a head, and how many of those of all its heads, one after the other, a block
  // takes. Where there are several splits, they leave sums of their own to be added up:
  // [splits, key heads in all batch units, S, D].
  int64_t row_tiles = 1;
  int64_t split_tiles = 1;
  int splits = 1;
  float* split_key = nullptr;
  float* split_value = nullptr;

  // Sums of the query cotangent before it is scaled, in the order of accumulators: [heads in all
  // batches, strips of 16 rows, D / 8, 32 lanes, 4]. Absent where not wanted.
  float* query_sums = nullptr;
  int64_t strips = 0;

  // Deterministic sums: how many key tiles have added to a query tile, [heads, row tiles].
  uint32_t* turns = nullptr;
};

// From the sums of a broadcast bias's cotangent to the result, of the same shape.
struct BiasFinishParams {
  Tensor cotangent;
  int64_t elements = 0;
};

struct QueryFinishParams {
  Problem problem;
  Tensor query_cotangent;
  Tensor scale_cotangent;
  bool vectors = false;  // of the query cotangent
  const float* query_sums = nullptr;
  int64_t strips = 0;
  int padded_dim = 0;
};

}  // namespace jaxflash::cuda::sm80
