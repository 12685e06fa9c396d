// Forward pass on Hopper: online softmax over tiles of keys (arXiv 1805.02867, 2307.08691), by
// warps with different roles (arXiv 2407.08608).
//
// One producer warp has tiles copied by the tensor memory accelerator; each consumer warpgroup owns
// 64 rows. The products of a warpgroup run asynchronously: Q K^T of the next tile and P V of this one
// are under way while it does the softmax, and warpgroups take turns at issuing products, so that
// the tensor cores always have some. Blocks are persistent: while consumers finish a tile of rows,
// the producer has begun the next.
#pragma once

#include <cstdint>

#include "attention/visibility.h"
#include "cuda/common/softmax.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm80/element.cuh"
#include "cuda/sm80/schedule.cuh"
#include "cuda/sm90/params.h"
#include "cuda/sm90/tiles.h"

namespace jaxflash::cuda::sm90 {

using sm80::BF16;
using sm80::Exponent;
using sm80::F16;

// Tiles of keys [begin, end); they are visited last first.
struct KeyTiles {
  int begin, end;
};

// keys_of_row of existing rows in 32 bits: row r sees keys r + begin .. r + end, within the length.
struct RowKeys {
  int begin, end, length;

  __device__ __forceinline__ int first_of(int row) const { return clamped(row + begin); }
  __device__ __forceinline__ int end_of(int row) const { return clamped(row + end); }

 private:
  __device__ __forceinline__ int clamped(int key) const { return max(0, min(key, length)); }
};

// What a block is to do with one tile of rows, as the producer tells the consumers.
template <int kWarpgroups>
struct Plan {
  int first_row;
  KeyTiles keys;                // that come by
  KeyTiles seen[kWarpgroups];   // those of them that a warpgroup sees
  KeyTiles whole[kWarpgroups];  // those of them that it need not look at key by key
  RowKeys row_keys;
  int query_length;
  float scale;
  // Element offsets of the head.
  int64_t output, logit_max, log_sum;
};

// When a plan is made, consumers may be at the last and the last but one, whose queries they have
// read.
inline constexpr int kPlans = 3;
__device__ __forceinline__ int next_plan(int plan) { return plan == kPlans - 1 ? 0 : plan + 1; }

// keys_of_row as RowKeys.
__device__ __forceinline__ RowKeys row_keys_of(const Extent& extent) {
  constexpr int64_t kFar = 1 << 30;  // beyond any key, and a row more is still within 32 bits
  const int64_t begin = extent.query_offset - extent.window_left;
  const int64_t end = extent.query_offset + extent.window_right + 1;
  return {static_cast<int>(extent.window_left == kUnlimited ? -kFar : clamp_to(begin, -kFar, kFar)),
          static_cast<int>(extent.window_right == kUnlimited ? kFar : clamp_to(end, -kFar, kFar)),
          static_cast<int>(extent.key_length)};
}

// A place in a ring of stages, and the parity of the phase that its barriers are in there.
template <int kStages>
struct Ring {
  int stage = 0;
  int parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

template <class T, int D, int V>
struct Forward {
  static constexpr ForwardTile kTile = forward_tile(D, V);
  static constexpr int kWarpgroups = kTile.warpgroups, kKeys = kTile.keys;
  static constexpr int kStages = kTile.stages, kCluster = kTile.cluster;
  static constexpr int kRows = kTile.rows(), kThreads = kTile.threads();
  static constexpr int kProducerRegisters = kTile.producer_registers();
  static constexpr int kConsumerRegisters = kTile.consumer_registers();
  // Tiles are panels of 64 columns, rows of 128 bytes each, permuted within 1024 bytes.
  static constexpr int kPanels = (D + 63) / 64, kValuePanels = (V + 63) / 64;
  static constexpr int kQueryPanelBytes = 64 * 128, kKeyPanelBytes = kKeys * 128;
  static constexpr int kQueryBytes = kPanels * kQueryPanelBytes;
  static constexpr int kKeyBytes = kPanels * kKeyPanelBytes;
  static constexpr int kValueBytes = kValuePanels * kKeyPanelBytes;
  static constexpr auto kType =
      T::kDType == DType::kBF16 ? ptx::WgmmaType::kBF16 : ptx::WgmmaType::kF16;

  // Barriers named *_full: the producer arrives and its copies are counted, consumers wait.
  // *_empty: one thread of each consumer warpgroup arrives that is done with the tile, of keys and
  // values also at the other blocks of the cluster, whose producers write here too; producers wait.
  struct Shared {
    uint8_t query[kWarpgroups][kQueryBytes];
    uint8_t key[kStages][kKeyBytes];
    uint8_t value[kStages][kValueBytes];
    uint64_t query_full[kWarpgroups], query_empty[kWarpgroups];
    uint64_t key_full[kStages], key_empty[kStages];
    uint64_t value_full[kStages], value_empty[kStages];
    uint64_t value_landed;  // as value_full, but it is the producer that waits
    Plan<kWarpgroups> plans[kPlans];
  };
  static_assert(sizeof(Shared) <= 227 * 1024);
};

__device__ __forceinline__ uint32_t shared_address(const void* of) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(of));
}

// The tile of rows and head that a cluster takes in its `turn`. Every other turn goes backwards, so
// that where tiles come longest first, no cluster gets the longer one each time.
__device__ __forceinline__ uint32_t unit_of_turn(uint32_t turn, uint32_t cluster,
                                                 uint32_t clusters) {
  return turn * clusters + (turn & 1 ? clusters - 1 - cluster : cluster);
}

// One warp.
template <class T, int D, int V>
struct Producer {
  using F = Forward<T, D, V>;
  static constexpr int kCluster = F::kCluster, kKeys = F::kKeys, kWarpgroups = F::kWarpgroups;

  const ForwardParams& params;
  typename F::Shared& shared;
  uint32_t rank;  // in the cluster
  int lane;
  Ring<F::kStages> ring_of_keys, ring_of_values;
  int query_parity = 0, landed_parity = 0;

  // Where a head's tiles lie in a map.
  struct Place {
    int head, batch;
  };
  static __device__ __forceinline__ Place place_of(const TileMap& map, const BatchIndex& index,
                                                   int head) {
    int batch = 0;
    for (int dim = 0; dim < kMaxBatchDims; ++dim) batch += index.at[dim] * map.batch[dim];
    return {head, batch};
  }

  // The blocks of a cluster each have some of the panels copied, to all of them.
  template <int kPanels>
  __device__ __forceinline__ void copy_keys(const TileMap& map, const Place& place, int tile,
                                            const void* to, uint64_t& full) const {
    if (lane != 0) return;
    const uint32_t barrier = shared_address(&full);
    ptx::mbarrier_arrive_expecting(barrier, kPanels * F::kKeyPanelBytes);
#pragma unroll
    for (int i = 0; i < kPanels; i += kCluster) {
      const int panel = i + rank;
      if (kPanels % kCluster != 0 && panel >= kPanels) break;
      const uint32_t at = shared_address(to) + panel * F::kKeyPanelBytes;
      if constexpr (kCluster > 1) {
        ptx::tma_load_multicast(at, &map.map, barrier, (1 << kCluster) - 1, 64 * panel, place.head,
                                tile * kKeys, place.batch);
      } else {
        ptx::tma_load(at, &map.map, barrier, 64 * panel, place.head, tile * kKeys, place.batch);
      }
    }
  }

  __device__ __forceinline__ void load_keys(const Place& place, int tile) {
    ptx::mbarrier_sleep(shared_address(&shared.key_empty[ring_of_keys.stage]), ring_of_keys.parity ^ 1);
    copy_keys<F::kPanels>(params.key, place, tile, shared.key[ring_of_keys.stage],
                          shared.key_full[ring_of_keys.stage]);
    ring_of_keys.advance();
  }

  // `length`: of the values that exist. What the array holds past it is replaced by zeros, since
  // its products with probabilities of 0 need not be 0.
  __device__ __forceinline__ void load_values(const Place& place, int tile, int length) {
    const int stage = ring_of_values.stage;
    ptx::mbarrier_sleep(shared_address(&shared.value_empty[stage]), ring_of_values.parity ^ 1);
    ring_of_values.advance();
    const int left = length - tile * kKeys;
    if (left >= kKeys || length == params.problem.key_length) {
      copy_keys<F::kValuePanels>(params.value, place, tile, shared.value[stage],
                                 shared.value_full[stage]);
      return;
    }
    copy_keys<F::kValuePanels>(params.value, place, tile, shared.value[stage], shared.value_landed);
    ptx::mbarrier_sleep(shared_address(&shared.value_landed), landed_parity);
    landed_parity ^= 1;
    for (int panel = 0; panel < F::kValuePanels; ++panel) {
      const uint32_t rows = shared_address(shared.value[stage]) + panel * F::kKeyPanelBytes;
      for (int i = left * 128 + 16 * lane; i < F::kKeyPanelBytes; i += 16 * 32) {
        ptx::store_shared_4(rows + i, {0, 0, 0, 0});
      }
    }
    ptx::fence_proxy_async();
    __syncwarp();  // lane 0 waits for all lanes' zeros
    if (lane == 0) ptx::mbarrier_arrive(shared_address(&shared.value_full[stage]));
  }

  __device__ __forceinline__ void load_queries(const Place& place, int first_row) const {
    if (lane != 0) return;
    for (int w = 0; w < kWarpgroups; ++w) {
      const uint32_t barrier = shared_address(&shared.query_full[w]);
      ptx::mbarrier_arrive_expecting(barrier, F::kQueryBytes);
#pragma unroll
      for (int panel = 0; panel < F::kPanels; ++panel) {
        ptx::tma_load(shared_address(shared.query[w]) + panel * F::kQueryPanelBytes,
                      &params.query.map, barrier, 64 * panel, place.head, first_row + 64 * w,
                      place.batch);
      }
    }
  }

  static __device__ __forceinline__ KeyTiles tiles_of_any(Range keys) {
    if (keys.end <= keys.begin) return {0, 0};
    return {static_cast<int>(static_cast<uint32_t>(keys.begin) / kKeys),
            static_cast<int>((static_cast<uint32_t>(keys.end) + kKeys - 1) / kKeys)};
  }
  static __device__ __forceinline__ KeyTiles tiles_of_every(Range keys) {
    return {static_cast<int>((static_cast<uint32_t>(keys.begin) + kKeys - 1) / kKeys),
            static_cast<int>(static_cast<uint32_t>(keys.end) / kKeys)};
  }

  // What to load for a tile of rows.
  struct Loads {
    int first_row, key_length;
    KeyTiles keys;
    Place query, key, value;
  };

  // Fills in the plan of a unit, each lane its part.
  __device__ __forceinline__ Loads make_plan(Plan<kWarpgroups>& plan, uint32_t unit) const {
    const Problem& problem = params.problem;
    const sm80::Work work = sm80::work_of(params.schedule, unit);
    const uint32_t batch = work.head / static_cast<uint32_t>(problem.query_heads);
    const uint32_t head = work.head - batch * static_cast<uint32_t>(problem.query_heads);
    const BatchIndex index = batch_index(problem, batch);
    const Extent extent = extent_of(problem, index);
    const int cluster_row = work.tile * (kCluster * F::kRows);
    const int first_row = cluster_row + rank * F::kRows;

    // The first lanes look at the rows of a warpgroup each, the others at those of the cluster.
    const bool of_warpgroup = lane < kWarpgroups;
    const int64_t row = of_warpgroup ? first_row + 64 * lane : cluster_row;
    const Range rows = {row, row + (of_warpgroup ? 64 : kCluster * F::kRows)};
    KeyTiles seen = tiles_of_any(keys_of_any_row(extent, rows));
    const KeyTiles all = {__shfl_sync(0xffffffffu, seen.begin, kWarpgroups),
                          __shfl_sync(0xffffffffu, seen.end, kWarpgroups)};
    if (of_warpgroup) {
      if (seen.end <= seen.begin) seen = {all.begin, all.begin};
      plan.seen[lane] = seen;
      plan.whole[lane] = tiles_of_every(keys_of_every_row(extent, rows));
    }
    if (lane == 0) {
      plan.first_row = first_row;
      plan.keys = all;
      plan.query_length = static_cast<int>(extent.query_length);
      plan.row_keys = row_keys_of(extent);
      plan.scale = batch_value<float>(problem.scale, index, 1.f);
    }
    const auto offset = [&](const Tensor& tensor) {
      return batch_offset(tensor, index) + head * tensor.head;
    };
    if (lane == 1) plan.output = offset(params.output);
    if (lane == 2) plan.logit_max = offset(params.statistics.logit_max);
    if (lane == 3) plan.log_sum = offset(params.statistics.log_sum);
    __syncwarp();  // lane 0, which tells the consumers, waits for all lanes' parts
    const int key_head = head / params.group;
    return {first_row,
            static_cast<int>(extent.key_length),
            all,
            place_of(params.query, index, head),
            place_of(params.key, index, key_head),
            place_of(params.value, index, key_head)};
  }

  __device__ __forceinline__ void run(uint32_t cluster, uint32_t clusters) {
    const uint32_t units = params.schedule.tiles * params.schedule.heads;
    int plan = 0;
    for (uint32_t turn = 0; turn * clusters < units; ++turn) {
      const uint32_t unit = unit_of_turn(turn, cluster, clusters);
      if (unit >= units) continue;
      const Loads loads = make_plan(shared.plans[plan], unit);
      plan = next_plan(plan);
      const KeyTiles keys = loads.keys;
      if (keys.begin < keys.end) load_keys(loads.key, keys.end - 1);
      for (int w = 0; w < kWarpgroups; ++w) {
        ptx::mbarrier_sleep(shared_address(&shared.query_empty[w]), query_parity ^ 1);
      }
      query_parity ^= 1;
      load_queries(loads.query, loads.first_row);
      for (int tile = keys.end - 1; tile >= keys.begin; --tile) {
        load_values(loads.value, tile, loads.key_length);
        if (tile > keys.begin) load_keys(loads.key, tile - 1);
      }
    }
  }
};

// One warpgroup.
template <class T, int D, int V>
struct Consumer {
  using F = Forward<T, D, V>;
  using LogitProduct = ptx::Wgmma<F::kType, F::kKeys>;
  using OutputProduct = ptx::Wgmma<F::kType, V>;
  static constexpr int kKeys = F::kKeys, kWarpgroups = F::kWarpgroups;
  static constexpr int kLogits = kKeys / 2;  // a thread

  const ForwardParams& params;
  typename F::Shared& shared;
  int warpgroup;
  Ring<F::kStages> keys, values;
  int query_parity = 0;

  // As ptx/wgmma.cuh says which elements a thread has; [2]: of its rows lane / 4 and + 8.
  float output[V / 2];
  float reference[2];
  float sum[2];  // this thread's share

  __device__ __forceinline__ int thread() const { return threadIdx.x & 127; }
  __device__ __forceinline__ int row() const {
    return 64 * warpgroup + (thread() >> 5) * 16 + (thread() & 31) / 4;
  }

  // Turns go round: warpgroup w waits at barrier 1 + w for the one before it to arrive there.
  __device__ __forceinline__ void take_turn() const { ptx::barrier_sync(1 + warpgroup, 256); }
  __device__ __forceinline__ void pass_turn() const {
    ptx::barrier_arrive(warpgroup == kWarpgroups - 1 ? 1 : 2 + warpgroup, 256);
  }

  __device__ __forceinline__ void release(uint64_t& empty) const {
    if (F::kCluster == 1) {
      if (thread() == 0) ptx::mbarrier_arrive(shared_address(&empty));
    } else if (thread() < F::kCluster) {
      ptx::mbarrier_arrive_at(shared_address(&empty), thread());
    }
  }
  __device__ __forceinline__ void release_queries() const {
    if (thread() == 0) ptx::mbarrier_arrive(shared_address(&shared.query_empty[warpgroup]));
  }
  __device__ __forceinline__ void release_keys() {
    release(shared.key_empty[keys.stage]);
    keys.advance();
  }
  __device__ __forceinline__ void release_values() {
    release(shared.value_empty[values.stage]);
    values.advance();
  }
  __device__ __forceinline__ void wait_for_keys() const {
    ptx::mbarrier_sleep(shared_address(&shared.key_full[keys.stage]), keys.parity);
  }
  __device__ __forceinline__ void wait_for_values() const {
    ptx::mbarrier_sleep(shared_address(&shared.value_full[values.stage]), values.parity);
  }

  // Lets tiles [begin, end) go by that others see.
  __device__ __forceinline__ void skip_tiles(int begin, int end) {
    for (int tile = begin; tile < end; ++tile) {
      take_turn();
      pass_turn();
      wait_for_keys();
      release_keys();
      wait_for_values();
      release_values();
    }
  }

  // Starts s = query key^T. Both operands have their k-steps of 16 columns 32 bytes apart within a
  // panel's rows.
  __device__ __forceinline__ void multiply_keys(float (&s)[kLogits]) const {
    const uint64_t query = ptx::matrix_descriptor(shared_address(shared.query[warpgroup]), 0);
    const uint64_t key = ptx::matrix_descriptor(shared_address(shared.key[keys.stage]), 0);
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      const int panel = step / 4, bytes = 32 * (step % 4);
      LogitProduct::of_shared(s, query + ((panel * F::kQueryPanelBytes + bytes) >> 4),
                              key + ((panel * F::kKeyPanelBytes + bytes) >> 4), step != 0);
    }
    ptx::wgmma_commit();
  }

  // Starts output += p value. k-steps of 16 keys are 16 rows apart.
  __device__ __forceinline__ void multiply_values(const uint32_t (&p)[kLogits / 2]) {
    const uint64_t value = ptx::matrix_descriptor(shared_address(shared.value[values.stage]),
                                                  F::kKeyPanelBytes);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      OutputProduct::of_registers(output, p[4 * step], p[4 * step + 1], p[4 * step + 2],
                                  p[4 * step + 3], value + (step * 16 * 128 >> 4));
    }
    ptx::wgmma_commit();
  }

  // Minus infinity where a key is outside the row's range.
  __device__ __forceinline__ void hide_outside(const RowKeys& row_keys, int first_row, int tile,
                                               float (&s)[kLogits]) const {
    const int first_key = tile * kKeys + 2 * (thread() & 3);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = first_row + row() + 8 * half;
      const int begin = row_keys.first_of(at);
      const uint32_t count = max(row_keys.end_of(at) - begin, 0);
      const int column = first_key - begin;
#pragma unroll
      for (int i = 0; i < kLogits / 2; ++i) {
        const uint32_t key = column + 8 * (i / 2) + i % 2;
        float& x = s[4 * (i / 2) + 2 * half + i % 2];
        if (key >= count) x = sm80::minus_infinity();
      }
    }
  }

  // Logits to probabilities relative to the references, which move on to the maxima; `shrink`: what
  // was summed before is to be multiplied by it.
  __device__ __forceinline__ void softmax(float (&s)[kLogits], const Exponent<T>& exponent,
                                          float (&shrink)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float peak[2] = {s[2 * half], s[2 * half + 1]};
#pragma unroll
      for (int i = 4; i < kLogits; i += 4) {
        peak[0] = fmaxf(peak[0], s[i + 2 * half]);
        peak[1] = fmaxf(peak[1], s[i + 2 * half + 1]);
      }
      const float old = reference[half];
      const float now =
          fmaxf(old, exponent.reference(sm80::quad_max(fmaxf(peak[0], peak[1]))));
      reference[half] = now;
      shrink[half] = ptx::ex2(exponent.difference(old, now));
      sum[half] *= shrink[half];
    }
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
      s[i] = ptx::ex2(exponent.of(s[i], reference[i / 2 % 2]));
      sum[i / 2 % 2] += s[i];
    }
  }

  // From elements 4j .. 4j + 3 of accumulators, columns 8j .. of rows lane / 4 (+ 8), to what the
  // product wants of its operand a of 16 columns: the same elements, of one row and two columns a
  // word.
  static __device__ __forceinline__ void pack(const float (&s)[kLogits],
                                              uint32_t (&p)[kLogits / 2]) {
#pragma unroll
    for (int i = 0; i < kLogits / 2; ++i) p[i] = sm80::pack(T(), s[2 * i], s[2 * i + 1]);
  }

  __device__ __forceinline__ void start_rows() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      reference[half] = Exponent<T>::kNothing;
      sum[half] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < V / 2; ++i) output[i] = 0.f;
  }

  // A unit of logits in nats, and what products are multiplied by to be in it: without a
  // multiplication but where the scale is zero or negative.
  struct Unit {
    float nats, factor;
  };
  static __device__ __forceinline__ Unit unit_of(float scale) {
    return scale == 0.f ? Unit{1.f, 0.f} : Unit{fabsf(scale), copysignf(1.f, scale)};
  }

  // From products to hidden logits.
  __device__ __forceinline__ void apply_rules(const Plan<kWarpgroups>& plan, const Unit& unit,
                                              const KeyTiles& whole, int tile,
                                              float (&s)[kLogits]) const {
    if (unit.factor != 1.f) {
#pragma unroll
      for (int i = 0; i < kLogits; ++i) s[i] *= unit.factor;
    }
    if (tile < whole.begin || tile >= whole.end) {
      hide_outside(plan.row_keys, plan.first_row, tile, s);
    }
  }

  __device__ __forceinline__ void visit_tiles(const Plan<kWarpgroups>& plan) {
    const KeyTiles seen = plan.seen[warpgroup], whole = plan.whole[warpgroup];
    const Unit unit = unit_of(plan.scale);
    const Exponent<T> exponent = {unit.nats * sm80::kLog2E};
    float s[kLogits], shrink[2];
    uint32_t p[kLogits / 2];

    take_turn();
    wait_for_keys();
    ptx::wgmma_fence();
    multiply_keys(s);
    pass_turn();
    ptx::wgmma_wait<0>();
    ptx::pin_registers(s);
    release_keys();
    apply_rules(plan, unit, whole, seen.end - 1, s);
    softmax(s, exponent, shrink);
    pack(s, p);
    if (seen.end - 2 >= seen.begin) wait_for_keys();

    for (int tile = seen.end - 2; tile >= seen.begin; --tile) {
      take_turn();
      ptx::wgmma_fence();
      multiply_keys(s);
      wait_for_values();
      ptx::wgmma_fence();
      multiply_values(p);
      pass_turn();
      ptx::wgmma_wait<1>();
      ptx::pin_registers(s);
      release_keys();
      apply_rules(plan, unit, whole, tile, s);
      softmax(s, exponent, shrink);
      ptx::pin_registers(s);
      if (tile > seen.begin) wait_for_keys();
      ptx::wgmma_wait<0>();
      ptx::pin_registers(output);
      release_values();
      pack(s, p);
#pragma unroll
      for (int i = 0; i < V / 2; ++i) output[i] *= shrink[i / 2 % 2];
    }

    release_queries();
    wait_for_values();
    ptx::wgmma_fence();
    multiply_values(p);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(output);
    release_values();
  }

  // Transposes 4x4 words of a quad: from word b of lane q to word q of lane b.
  static __device__ __forceinline__ uint4 transpose_quad(uint32_t (&w)[4]) {
    const int lane = threadIdx.x & 3;
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
      const bool upper = lane & bit;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i & bit) continue;
        const uint32_t sent = upper ? w[i] : w[i | bit];
        const uint32_t got = __shfl_xor_sync(0xffffffffu, sent, bit);
        (upper ? w[i] : w[i | bit]) = got;
      }
    }
    return {w[0], w[1], w[2], w[3]};
  }

  // Turns sums into results.
  __device__ __forceinline__ void finish(const Plan<kWarpgroups>& plan) {
    const Problem& problem = params.problem;
    const Statistics& statistics = params.statistics;
    const int lane = threadIdx.x & 3;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = plan.first_row + row() + 8 * half;
      const float total = sm80::quad_sum(sum[half]);
      const bool sees = total != 0.f && at < plan.query_length;
      const float normalise = sees ? 1.f / total : 0.f;
      const bool exists = at < problem.query_length;
      if (exists && lane == 0) {
        static_cast<float*>(statistics.logit_max.data)[plan.logit_max +
                                                       at * statistics.logit_max.row] =
            sees ? Exponent<T>::logit_max(reference[half]) : sm80::minus_infinity();
        static_cast<float*>(
            statistics.log_sum.data)[plan.log_sum + at * statistics.log_sum.row] =
            sees ? Exponent<T>::log_sum(reference[half], total) : 0.f;
      }
      auto* const to = static_cast<typename T::Bits*>(params.output.data) + plan.output +
                       at * params.output.row + 8 * lane;
      // From words of columns 8j + 2 * lane, + 1 to eight neighbours 32j + 8 * lane ..
#pragma unroll
      for (int j = 0; j < V / 32; ++j) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* const x = &output[16 * j + 4 * i + 2 * half];
          words[i] = sees ? sm80::pack(T(), x[0] * normalise, x[1] * normalise) : 0;
        }
        const uint4 neighbours = transpose_quad(words);
        if (exists && 32 * j + 8 * lane < problem.value_dim) {
          *reinterpret_cast<uint4*>(to + 32 * j) = neighbours;
        }
      }
    }
  }

  __device__ __forceinline__ void run(uint32_t cluster, uint32_t clusters) {
    const uint32_t units = params.schedule.tiles * params.schedule.heads;
    if (warpgroup == kWarpgroups - 1) pass_turn();  // the first turn
    int next = 0;
    for (uint32_t turn = 0; turn * clusters < units; ++turn) {
      if (unit_of_turn(turn, cluster, clusters) >= units) continue;
      ptx::mbarrier_sleep(shared_address(&shared.query_full[warpgroup]), query_parity);
      query_parity ^= 1;
      const Plan<kWarpgroups>& plan = shared.plans[next];
      next = next_plan(next);
      start_rows();
      const KeyTiles seen = plan.seen[warpgroup];
      skip_tiles(seen.end, plan.keys.end);
      if (seen.begin < seen.end) {
        visit_tiles(plan);
      } else {
        release_queries();
      }
      skip_tiles(plan.keys.begin, seen.begin);
      finish(plan);
    }
  }
};

template <class T, int D, int V>
__global__ void __launch_bounds__(Forward<T, D, V>::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  using F = Forward<T, D, V>;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename F::Shared*>(memory);
  const uint32_t rank = F::kCluster > 1 ? ptx::cluster_rank() : 0;
  const uint32_t cluster = blockIdx.x / F::kCluster, clusters = gridDim.x / F::kCluster;

  if (threadIdx.x == 0) {
    const auto init = [](uint64_t& barrier, int arrivals) {
      ptx::mbarrier_init(shared_address(&barrier), arrivals);
    };
    for (int w = 0; w < F::kWarpgroups; ++w) {
      init(shared.query_full[w], 1);
      init(shared.query_empty[w], 1);
    }
    for (int stage = 0; stage < F::kStages; ++stage) {
      init(shared.key_full[stage], 1);
      init(shared.value_full[stage], 1);
      init(shared.key_empty[stage], F::kWarpgroups * F::kCluster);
      init(shared.value_empty[stage], F::kWarpgroups * F::kCluster);
    }
    init(shared.value_landed, 1);
    ptx::fence_mbarrier_init();
  }
  // All threads wait for the barriers, in all blocks that copies go to.
  F::kCluster > 1 ? ptx::cluster_sync() : __syncthreads();

  // A warp-uniform value, which the compiler need not look for in each lane.
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (role == 0) {
    ptx::give_registers<F::kProducerRegisters>();
    if (threadIdx.x < 32) {
      Producer<T, D, V>{params, shared, rank, static_cast<int>(threadIdx.x)}.run(cluster, clusters);
    }
  } else {
    ptx::take_registers<F::kConsumerRegisters>();
    Consumer<T, D, V>{params, shared, role - 1}.run(cluster, clusters);
  }
  // No block leaves while others may arrive at its barriers.
  if (F::kCluster > 1) ptx::cluster_sync();
}

}  // namespace jaxflash::cuda::sm90
