// Forward pass on Hopper: online softmax over tiles of keys (arXiv 1805.02867, 2307.08691), by
// warps with different roles (arXiv 2407.08608).
//
// Blocks are persistent. One warp of each deals out tiles of rows and plans them, three have
// queries, keys and values copied by the tensor memory accelerator, and each of the consumer
// warpgroups owns 64 rows. Products run asynchronously: a warpgroup starts Q K^T of the next tile
// of keys and P V of this one together, and looks for the former's maxima while the latter is under
// way; from one tile of rows to the next likewise. Warpgroups take turns at Q K^T, so that while
// one has its softmax, the tensor cores work for another.
#pragma once

#include <climits>
#include <cstdint>
#include <type_traits>

#include "attention/visibility.h"
#include "cuda/common/rules.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm80/element.cuh"
#include "cuda/sm80/schedule.cuh"
#include "cuda/sm90/block.cuh"
#include "cuda/sm90/params.h"
#include "cuda/sm90/rules.cuh"
#include "cuda/sm90/tiles.h"

namespace jaxflash::cuda::sm90 {

using sm80::BF16;
using sm80::Exponent;
using sm80::F16;
using sm80::Visit;

// Tiles of keys [begin, end); they are visited last first.
struct KeyTiles {
  int begin, end;
};

// What a block is to do with one tile of rows.
template <int kWarpgroups, class Policy>
struct Plan : PlanRules<Policy> {
  int stop;  // whether there is nothing to do any more
  int first_row;
  KeyTiles keys;                // that come by
  KeyTiles seen[kWarpgroups];   // those of them that a warpgroup sees
  KeyTiles whole[kWarpgroups];  // those of them that it need not look at key by key
  Neighbours row_keys;          // keys_of_row of existing rows
  int query_length;
  float scale;
  BatchIndex index;
  Place query, key, value;
  // Element offsets of the head.
  int64_t output, logit_max, log_sum;
};

template <class T, int D, int V, Reach kReach, class Policy>
struct Forward {
  static constexpr ForwardTile kTile =
      Policy::kEverything ? everything_tile(D, V) : forward_tile(D, V, kReach);
  static constexpr int kWarpgroups = kTile.warpgroups, kKeys = kTile.keys;
  static constexpr int kQueryStages = kTile.query_stages, kStages = kTile.stages;
  static constexpr int kArrayStages = Policy::kEverything ? kTile.array_stages : 1;
  static constexpr int kCluster = kTile.cluster;
  static constexpr int kPlans = 4;  // consumers may be at two, and loaders at the next
  // A cluster asks for more work when it is to load the last tiles of what it has: were it earlier,
  // some would be left with long tiles of rows while others have nothing to do.
  static constexpr int kLastTiles = 3;
  static constexpr int kRows = kTile.rows(), kThreads = kTile.threads();
  static constexpr int kProducerRegisters = kTile.producer_registers();
  static constexpr int kConsumerRegisters = kTile.consumer_registers();
  // Tiles are panels of 64 columns, rows of 128 bytes each, permuted within 1024 bytes.
  static constexpr int kPanels = (D + 63) / 64, kValuePanels = (V + 63) / 64;
  static constexpr int kQueryPanelBytes = 64 * 128, kKeyPanelBytes = kKeys * 128;
  static constexpr int kQueryBytes = kPanels * kQueryPanelBytes;
  static constexpr int kKeyBytes = kPanels * kKeyPanelBytes;
  static constexpr int kValueBytes = kValuePanels * kKeyPanelBytes;
  using Plan = sm90::Plan<kWarpgroups, Policy>;
  static constexpr auto kType =
      T::kDType == DType::kBF16 ? ptx::WgmmaType::kBF16 : ptx::WgmmaType::kF16;

  // Barriers named *_full: who fills the place arrives, and copies to it are counted; its readers
  // wait. *_empty: each warp that has read it arrives, with keys and values also at the other
  // blocks of the cluster, which write here too; who fills it waits.
  struct Tiles {
    uint8_t query[kQueryStages][kWarpgroups][kQueryBytes];
    uint8_t key[kStages][kKeyBytes];
    uint8_t value[kStages][kValueBytes];
  };
  struct TilesAndArrays : Tiles {
    uint8_t arrays[kArrayStages][kWarpgroups][kTile.array_bytes()];  // bias and mask
  };
  struct Shared : std::conditional_t<Policy::kEverything, TilesAndArrays, Tiles> {
    uint64_t query_full[kQueryStages][kWarpgroups], query_empty[kQueryStages][kWarpgroups];
    uint64_t key_full[kStages], key_empty[kStages];
    uint64_t value_full[kStages], value_empty[kStages];
    uint64_t value_landed[kStages];  // as value_full, but its loader waits
    uint64_t unit_full;              // of `unit`, which the first block of the cluster fills in all
    uint64_t unit_empty;             // in the first block
    uint64_t unit_wanted;            // the loader of keys arrives, the planner waits
    uint64_t plan_full[kPlans], plan_empty[kPlans];
    uint32_t unit;
    Plan plans[kPlans];
    // Everything only.
    uint64_t arrays_full[kArrayStages][kWarpgroups], arrays_empty[kArrayStages][kWarpgroups];
    Visit visits[kStages];  // which tile's keys a stage has, written before these come
  };
  static_assert(sizeof(Shared) <= 227 * 1024);
  static_assert(!Policy::kEverything || kCluster == 1, "blocks see tiles of their own");
  // A warpgroup waits for the next plan before it lets those last tiles go by that only others see.
  static_assert((kCluster * kRows - 64) / kKeys + 1 <= kStages + kLastTiles,
                "the loader gets there");
};

__device__ __forceinline__ KeyTiles uniform(const KeyTiles& tiles) {
  return {uniform(tiles.begin), uniform(tiles.end)};
}

// What must be checked in a tile, for the rows of a plan; Everything only.
template <class F>
__device__ __forceinline__ int checks_of(const ForwardParams& params, const typename F::Plan& plan,
                                         int tile) {
  return sm80::tile_checks<Everything, F::kRows, F::kKeys>(params.problem, params.maps, plan.view,
                                                           plan.first_row / F::kRows, tile);
}

// As TileScan, but from tiles before `end` downwards.
struct DownwardScan {
  int end;
  sm80::TileScan scan;

  // The last that is not hidden in [begin, tile], or begin - 1.
  template <class ChecksOf>
  __device__ __forceinline__ Visit next(int tile, int begin, const ChecksOf& checks_of) {
    const Visit found =
        scan.next(end - 1 - tile, end - begin, [&](int back) { return checks_of(end - 1 - back); });
    return {end - 1 - found.tile, found.checks};
  }
};

template <int kCluster>
__device__ __forceinline__ uint32_t rank_in_cluster() {
  return kCluster > 1 ? ptx::cluster_rank() : 0;
}

// The warp that deals out work: units, each a head's tile of rows of the cluster.
template <class T, int D, int V, Reach kReach, class Policy>
struct Planner {
  using F = Forward<T, D, V, kReach, Policy>;
  using Plan = typename F::Plan;
  static constexpr int kCluster = F::kCluster, kKeys = F::kKeys, kWarpgroups = F::kWarpgroups;

  const ForwardParams& params;
  typename F::Shared& shared;

  // Read anew each time: registers are short.
  __device__ __forceinline__ uint32_t rank() const { return rank_in_cluster<F::kCluster>(); }
  __device__ __forceinline__ int lane() const { return threadIdx.x & 31; }

  static __device__ __forceinline__ KeyTiles tiles_of_any(Range keys) {
    if (keys.end <= keys.begin) return {0, 0};
    return {static_cast<int>(static_cast<uint32_t>(keys.begin) / kKeys),
            static_cast<int>((static_cast<uint32_t>(keys.end) + kKeys - 1) / kKeys)};
  }
  static __device__ __forceinline__ KeyTiles tiles_of_every(Range keys) {
    return {static_cast<int>((static_cast<uint32_t>(keys.begin) + kKeys - 1) / kKeys),
            static_cast<int>(static_cast<uint32_t>(keys.end) / kKeys)};
  }
  // Of `tiles` those between the first and the last that are not hidden.
  __device__ __forceinline__ KeyTiles visible(const Plan& plan, const KeyTiles& tiles) const {
    const auto checks = [&](int tile) { return checks_of<F>(params, plan, tile); };
    const int begin = sm80::TileScan().next(tiles.begin, tiles.end, checks).tile;
    return {begin, DownwardScan{tiles.end}.next(tiles.end - 1, begin, checks).tile + 1};
  }
  // Fills in the plan of a unit, each lane its part.
  __device__ __forceinline__ void make_plan(Plan& plan, uint32_t unit) const {
    const Problem& problem = params.problem;
    const sm80::Work work = sm80::work_of(params.schedule, unit);
    const uint32_t batch = work.head / static_cast<uint32_t>(problem.query_heads);
    const uint32_t head = work.head - batch * static_cast<uint32_t>(problem.query_heads);
    if (lane() == 0) plan.index = batch_index(problem, batch);
    __syncwarp();  // all lanes wait for lane 0's index, for which each alone has no registers
    const BatchIndex& index = plan.index;
    const Extent extent = extent_of(problem, index);
    const int cluster_row = work.tile * (kCluster * F::kRows);
    const int first_row = cluster_row + rank() * F::kRows;
    if constexpr (Policy::kEverything) plan_rules<T>(params, extent, index, batch, head, plan);

    // The first lanes look at the rows of a warpgroup each, the others at those of the cluster.
    const bool of_warpgroup = lane() < kWarpgroups;
    const int64_t row = of_warpgroup ? first_row + 64 * lane() : cluster_row;
    const Range rows = {row, row + (of_warpgroup ? 64 : kCluster * F::kRows)};
    KeyTiles seen = tiles_of_any(keys_of_any_row(extent, rows));
    KeyTiles all = {__shfl_sync(0xffffffffu, seen.begin, kWarpgroups),
                    __shfl_sync(0xffffffffu, seen.end, kWarpgroups)};
    if constexpr (Policy::kEverything) {
      if (lane() == 0) plan.first_row = first_row;
      __syncwarp();  // all lanes wait for the parts that tiles' checks need
      seen = all = visible(plan, all);
    }
    if (of_warpgroup) {
      if (seen.end <= seen.begin) seen = {all.begin, all.begin};
      plan.seen[lane()] = seen;
      plan.whole[lane()] = tiles_of_every(keys_of_every_row(extent, rows));
    }
    const auto offset = [&](const Tensor& tensor) {
      return batch_offset(tensor, index) + head * tensor.head;
    };
    const int key_head = head / params.group;
    if (lane() == 0) {
      plan.first_row = first_row;
      plan.keys = all;
      plan.query_length = static_cast<int>(extent.query_length);
      plan.row_keys = keys_near_rows(extent);
    }
    if (lane() == 1) plan.output = offset(params.output);
    if (lane() == 2) plan.logit_max = offset(params.statistics.logit_max);
    if (lane() == 3) plan.log_sum = offset(params.statistics.log_sum);
    if (lane() == 4) plan.query = place_of(params.query, index, head);
    if (lane() == 5) plan.key = place_of(params.key, index, key_head);
    if (lane() == 6) plan.value = place_of(params.value, index, key_head);
    if (lane() == 7) plan.scale = batch_value<float>(problem.scale, index, 1.f);
  }

  // The first unit of each cluster is its own number; those that follow come in the order in which
  // clusters ask for them, or in a fixed one where none takes longer than others.
  __device__ __forceinline__ uint32_t unit_after(uint32_t unit, uint32_t clusters,
                                                 int parity) const {
    if (params.next_unit == nullptr) return unit + clusters;
    if (kCluster == 1) {
      uint32_t next = 0;
      if (lane() == 0) next = clusters + atomicAdd(params.next_unit, 1);
      return __shfl_sync(0xffffffffu, next, 0);
    }
    // The first block asks and tells all, once all have read what it told last.
    const uint32_t full = shared_address(&shared.unit_full);
    if (lane() == 0) {
      ptx::mbarrier_arrive_expecting(full, sizeof(uint32_t));
      if (rank() == 0) {
        const uint32_t next = clusters + atomicAdd(params.next_unit, 1);
        wait(shared.unit_empty, parity ^ 1);
        for (int block = 0; block < kCluster; ++block) {
          ptx::store_async_at(shared_address(&shared.unit), next, full, block);
        }
      }
    }
    wait(shared.unit_full, parity);
    const uint32_t next = ptx::load_shared(shared_address(&shared.unit));
    __syncwarp();  // lane 0 waits for all lanes to have read it
    if (lane() == 0) ptx::mbarrier_arrive_at(shared_address(&shared.unit_empty), 0);
    return next;
  }

  __device__ __forceinline__ void run(uint32_t cluster, uint32_t clusters) {
    const uint32_t units = params.schedule.tiles * params.schedule.heads;
    Ring<F::kPlans> plans;
    int parity = 0;
    for (uint32_t unit = cluster;; unit = unit_after(unit, clusters, parity), parity ^= 1) {
      wait(shared.plan_empty[plans.stage()], plans.parity() ^ 1);
      Plan& plan = shared.plans[plans.stage()];
      const bool stop = unit >= units;
      if (lane() == 0) plan.stop = stop;
      if (!stop) make_plan(plan, unit);
      __syncwarp();  // lane 0 waits for all lanes' parts
      if (lane() == 0) arrive(shared.plan_full[plans.stage()]);
      plans.advance();
      if (stop) return;
      if (params.next_unit != nullptr) wait(shared.unit_wanted, parity);
    }
  }
};

// The warps that have tiles copied, one each for queries (with bias and mask), keys and values.
template <class T, int D, int V, Reach kReach, class Policy>
struct Loader {
  using F = Forward<T, D, V, kReach, Policy>;
  using Plan = typename F::Plan;
  static constexpr int kCluster = F::kCluster, kKeys = F::kKeys, kWarpgroups = F::kWarpgroups;

  const ForwardParams& params;
  typename F::Shared& shared;

  // Read anew each time: registers are short.
  __device__ __forceinline__ uint32_t rank() const { return rank_in_cluster<F::kCluster>(); }
  __device__ __forceinline__ int lane() const { return threadIdx.x & 31; }

  // Calls `load` with each plan.
  template <class Load>
  __device__ __forceinline__ void for_each_plan(const Load& load) {
    for (Ring<F::kPlans> plans;; plans.advance()) {
      wait(shared.plan_full[plans.stage()], plans.parity());
      const Plan& plan = shared.plans[plans.stage()];
      if (plan.stop) return;
      load(plan);
      __syncwarp();  // lane 0 waits for all lanes to have read it
      if (lane() == 0) arrive(shared.plan_empty[plans.stage()]);
    }
  }

  // Calls `load` with each tile of keys that the plan's rows see, last first.
  template <class Load>
  __device__ __forceinline__ void for_each_tile(const Plan& plan, const Load& load) const {
    const KeyTiles keys = plan.keys;
    if constexpr (Policy::kEverything) {
      const auto checks = [&](int tile) { return checks_of<F>(params, plan, tile); };
      DownwardScan scan = {keys.end};
      for (Visit visit = scan.next(keys.end - 1, keys.begin, checks); visit.tile >= keys.begin;
           visit = scan.next(visit.tile - 1, keys.begin, checks)) {
        load(visit);
      }
    } else {
      for (int tile = keys.end - 1; tile >= keys.begin; --tile) load(Visit{tile, 0});
    }
  }

  // Has the warpgroups' rows of bias and mask copied that are copied in tiles, for each tile of
  // keys; of the mask only where it is looked at.
  __device__ __forceinline__ void load_arrays(const Plan& plan, Ring<F::kArrayStages>& ring) const {
    const sm80::ArrayStaging& staging = params.staging;
    if (staging.bias_bytes + staging.mask_bytes == 0) return;
    for_each_tile(plan, [&](const Visit& visit) {
      const int mask_bytes = visit.checks & sm80::kCheckMask ? staging.mask_bytes : 0;
      for (int w = 0; w < kWarpgroups; ++w) {
        wait(shared.arrays_empty[ring.stage()][w], ring.parity() ^ 1);
        if (lane() != 0) continue;
        const uint32_t barrier = shared_address(&shared.arrays_full[ring.stage()][w]);
        ptx::mbarrier_arrive_expecting(barrier, staging.bias_bytes + mask_bytes);
        const auto copy = [&](const TileMap& map, const Place& place, int bytes, uint32_t to) {
          copy_array<kKeys>(map, place, bytes, plan.first_row + 64 * w, visit.tile * kKeys, to,
                            barrier);
        };
        const uint32_t arrays = shared_address(shared.arrays[ring.stage()][w]);
        copy(params.bias, plan.bias, staging.bias_bytes, arrays);
        copy(params.mask, plan.mask, mask_bytes, arrays + staging.bias_bytes);
      }
      ring.advance();
    });
  }

  __device__ __forceinline__ void load_queries() {
    Ring<F::kQueryStages> ring;
    Ring<F::kArrayStages> arrays;
    for_each_plan([&](const Plan& plan) {
      for (int w = 0; w < kWarpgroups; ++w) {
        wait(shared.query_empty[ring.stage()][w], ring.parity() ^ 1);
        if (lane() != 0) continue;
        const uint32_t barrier = shared_address(&shared.query_full[ring.stage()][w]);
        ptx::mbarrier_arrive_expecting(barrier, F::kQueryBytes);
#pragma unroll 1
        for (int panel = 0; panel < F::kPanels; ++panel) {
          ptx::tma_load(shared_address(shared.query[ring.stage()][w]) + panel * F::kQueryPanelBytes,
                        &params.query.map, barrier, 64 * panel, plan.query.head,
                        plan.first_row + 64 * w, plan.query.batch);
        }
      }
      ring.advance();
      if constexpr (Policy::kEverything) load_arrays(plan, arrays);
    });
  }

  // The blocks of a cluster each have some of the panels copied, to all of them.
  template <int kPanels>
  __device__ __forceinline__ void copy_keys(const TileMap& map, const Place& place, int tile,
                                            const void* to, const uint64_t& full) const {
    if (lane() != 0) return;
    const uint32_t barrier = shared_address(&full);
    ptx::mbarrier_arrive_expecting(barrier, kPanels * F::kKeyPanelBytes);
#pragma unroll 1
    for (int panel = rank(); panel < kPanels; panel += kCluster) {
      const uint32_t at = shared_address(to) + panel * F::kKeyPanelBytes;
      if constexpr (kCluster > 1) {
        ptx::tma_load_multicast(at, &map.map, barrier, (1 << kCluster) - 1, 64 * panel, place.head,
                                tile * kKeys, place.batch);
      } else {
        ptx::tma_load(at, &map.map, barrier, 64 * panel, place.head, tile * kKeys, place.batch);
      }
    }
  }

  __device__ __forceinline__ void load_keys() {
    Ring<F::kStages> ring;
    for_each_plan([&](const Plan& plan) {
      bool asked = false;
      const auto ask = [&] {
        if (!asked && lane() == 0) arrive(shared.unit_wanted);
        asked = true;
      };
      for_each_tile(plan, [&](const Visit& visit) {
        if (visit.tile < plan.keys.begin + F::kLastTiles) ask();
        wait(shared.key_empty[ring.stage()], ring.parity() ^ 1);
        if constexpr (Policy::kEverything) {
          if (lane() == 0) {
            shared.visits[ring.stage()] = {visit.tile, visit.checks | plan.checks};
          }
          sm80::prefetch_rules<F::kRows, kKeys, 32>(params.problem, plan.view, params.staging,
                                                    visit.checks, plan.first_row,
                                                    visit.tile * kKeys);
        }
        copy_keys<F::kPanels>(params.key, plan.key, visit.tile, shared.key[ring.stage()],
                              shared.key_full[ring.stage()]);
        ring.advance();
      });
      ask();
    });
  }

  // What the array holds past the values' length is replaced by zeros, since its products with
  // probabilities of 0 need not be 0; past the array's end they are zeros already.
  __device__ __forceinline__ void load_values() {
    Ring<F::kStages> ring;
    uint32_t landed = 0;  // parities, a bit a stage
    for_each_plan([&](const Plan& plan) {
      const int length = plan.row_keys.length;
      for_each_tile(plan, [&](const Visit& visit) {
        wait(shared.value_empty[ring.stage()], ring.parity() ^ 1);
        const int left = length - visit.tile * kKeys;
        const bool whole = left >= kKeys || length == params.problem.key_length;
        uint64_t& full = shared.value_full[ring.stage()];
        copy_keys<F::kValuePanels>(params.value, plan.value, visit.tile, shared.value[ring.stage()],
                                   whole ? full : shared.value_landed[ring.stage()]);
        if (!whole) {
          wait(shared.value_landed[ring.stage()], landed >> ring.stage() & 1);
          landed ^= 1u << ring.stage();
          clear_rows(shared.value[ring.stage()], left);
          if (lane() == 0) arrive(full);
        }
        ring.advance();
      });
    });
  }

  // Zeros from row `first` on.
  __device__ __forceinline__ void clear_rows(const void* values, int first) const {
    for (int panel = 0; panel < F::kValuePanels; ++panel) {
      const uint32_t rows = shared_address(values) + panel * F::kKeyPanelBytes;
      for (int i = first * 128 + 16 * lane(); i < F::kKeyPanelBytes; i += 16 * 32) {
        ptx::store_shared_4(rows + i, {0, 0, 0, 0});
      }
    }
    ptx::fence_proxy_async();
    __syncwarp();  // lane 0, which tells the consumers, waits for all lanes' zeros
  }
};

// One warpgroup.
template <class T, int D, int V, Reach kReach, class Policy>
struct Consumer {
  using F = Forward<T, D, V, kReach, Policy>;
  using Plan = typename F::Plan;
  using LogitProduct = ptx::Wgmma<F::kType, F::kKeys>;
  using OutputProduct = ptx::Wgmma<F::kType, V>;
  static constexpr int kKeys = F::kKeys, kWarpgroups = F::kWarpgroups;
  static constexpr int kLogits = kKeys / 2;  // a thread
  struct NoDraws {};
  using Draws = std::conditional_t<Policy::kEverything, sm80::KeptBits<1, kKeys / 8>, NoDraws>;

  // What of a plan is wanted often.
  struct Unit {
    bool stop;
    KeyTiles keys, seen, whole;
    float scale;

    __device__ __forceinline__ bool sees() const { return seen.begin < seen.end; }
    // Whether the first tile of `next` that is seen comes right after the last of this.
    __device__ __forceinline__ bool leads_to(const Unit& next) const {
      return sees() && seen.begin == keys.begin && !next.stop && next.sees() &&
             next.seen.end == next.keys.end;
    }
  };

  const ForwardParams& params;
  typename F::Shared& shared;
  int warpgroup;
  Ring<F::kPlans> plans;
  Ring<F::kQueryStages> queries;
  Ring<F::kStages> keys, values;

  // As ptx/wgmma.cuh says which elements a thread has; [2]: of its rows lane / 4 and + 8.
  float output[V / 2];
  uint32_t p[kLogits / 2];  // probabilities of the last tile, whose product is to come
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

  // Every warp arrives, a lane for each block: were it one for all warps, others might not even
  // have seen the tile come before the next two have.
  __device__ __forceinline__ void release(uint64_t& empty) const {
    const int lane = threadIdx.x & 31;
    if (F::kCluster == 1) {
      if (lane == 0) arrive(empty);
    } else if (lane < F::kCluster) {
      ptx::mbarrier_arrive_at(shared_address(&empty), lane);
    }
  }
  __device__ __forceinline__ void wait_for_queries() const {
    wait(shared.query_full[queries.stage()][warpgroup], queries.parity());
  }
  __device__ __forceinline__ void release_queries() {
    if ((threadIdx.x & 31) == 0) arrive(shared.query_empty[queries.stage()][warpgroup]);
    queries.advance();
  }
  __device__ __forceinline__ void wait_for_keys() const {
    wait(shared.key_full[keys.stage()], keys.parity());
  }
  __device__ __forceinline__ void release_keys() {
    release(shared.key_empty[keys.stage()]);
    keys.advance();
  }
  __device__ __forceinline__ void wait_for_values() const {
    wait(shared.value_full[values.stage()], values.parity());
  }
  __device__ __forceinline__ void release_values() {
    release(shared.value_empty[values.stage()]);
    values.advance();
  }

  // The place of bias and mask in their ring, which advances with that of the keys; these have
  // been released.
  __device__ __forceinline__ Ring<F::kArrayStages> arrays_of_keys() const {
    static_assert(F::kStages % F::kArrayStages == 0);
    return {(keys.position + 2 * F::kStages - 1) % (2 * F::kArrayStages)};
  }
  // The tiles of bias and mask that are copied, once they have come.
  __device__ __forceinline__ bool has_arrays() const {
    return params.staging.bias_bytes + params.staging.mask_bytes != 0;
  }
  __device__ __forceinline__ sm80::ArrayTiles wait_for_arrays() const {
    if (!has_arrays()) return {0, 0};
    const auto arrays = arrays_of_keys();
    wait(shared.arrays_full[arrays.stage()][warpgroup], arrays.parity());
    return sm80::array_tiles(params.staging,
                             shared_address(shared.arrays[arrays.stage()][warpgroup]), 0);
  }
  __device__ __forceinline__ void release_arrays() const {
    if (!has_arrays()) return;
    const auto arrays = arrays_of_keys();
    __syncwarp();  // lane 0 waits for all lanes to have read them
    if ((threadIdx.x & 31) == 0) arrive(shared.arrays_empty[arrays.stage()][warpgroup]);
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
    const uint64_t query =
        ptx::matrix_descriptor(shared_address(shared.query[queries.stage()][warpgroup]), 0);
    const uint64_t key = ptx::matrix_descriptor(shared_address(shared.key[keys.stage()]), 0);
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      const int panel = step / 4, bytes = 32 * (step % 4);
      LogitProduct::of_shared(s, query + ((panel * F::kQueryPanelBytes + bytes) >> 4),
                              key + ((panel * F::kKeyPanelBytes + bytes) >> 4), step != 0);
    }
    ptx::wgmma_commit();
  }

  // Starts output += p value. k-steps of 16 keys are 16 rows apart.
  __device__ __forceinline__ void multiply_values() {
    const uint64_t value =
        ptx::matrix_descriptor(shared_address(shared.value[values.stage()]), F::kKeyPanelBytes);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      OutputProduct::of_registers(output, p[4 * step], p[4 * step + 1], p[4 * step + 2],
                                  p[4 * step + 3], value + (step * 16 * 128 >> 4));
    }
    ptx::wgmma_commit();
  }

  // The tile whose keys have come, the next to be seen after `tile`.
  __device__ __forceinline__ Visit visit_after(int tile) const {
    if constexpr (Policy::kEverything) {
      const Visit& visit = shared.visits[keys.stage()];
      return {uniform(visit.tile), uniform(visit.checks)};
    }
    return {tile - 1, 0};
  }

  // Minus infinity where a key is outside the row's range.
  __device__ __forceinline__ void hide_outside(const Neighbours& row_keys, int first_row, int tile,
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

  // Whether a reference may have to move. As integers, floats that are not all negative have the
  // same maximum, and negative ones are not far above a reference that is not negative itself. A
  // maximum of three integers is one instruction, of floats it is two.
  __device__ __forceinline__ bool may_move(const float (&s)[kLogits],
                                           const Exponent<T>& exponent) const {
    static_assert(kLogits % 8 == 0);
    const auto bits = [&](int i) { return __float_as_int(s[i]); };
    bool may = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int peak[2] = {INT_MIN, INT_MIN};
#pragma unroll
      for (int i = 2 * half; i < kLogits; i += 8) {
        peak[0] = __vimax3_s32(peak[0], bits(i), bits(i + 4));
        peak[1] = __vimax3_s32(peak[1], bits(i + 1), bits(i + 5));
      }
      const float highest = exponent.reference(__int_as_float(max(peak[0], peak[1])));
      may |=
          highest - reference[half] > Exponent<T>::kStays || reference[half] < -Exponent<T>::kStays;
    }
    return may;
  }

  // References move on to the logits' maxima where these are far above. Whether any of the warp may
  // have; if so, `shrink` is what is to multiply sums made before.
  __device__ __forceinline__ bool move_references(const float (&s)[kLogits],
                                                  const Exponent<T>& exponent, float (&shrink)[2]) {
    if (!__any_sync(0xffffffffu, may_move(s, exponent))) return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float peak[2] = {s[2 * half], s[2 * half + 1]};
#pragma unroll
      for (int i = 4; i < kLogits; i += 4) {
        peak[0] = fmaxf(peak[0], s[i + 2 * half]);
        peak[1] = fmaxf(peak[1], s[i + 2 * half + 1]);
      }
      const float old = reference[half];
      const float highest = exponent.reference(sm80::quad_max(fmaxf(peak[0], peak[1])));
      const float now = highest - old > Exponent<T>::kStays ? highest : old;
      reference[half] = now;
      shrink[half] = ptx::ex2(exponent.difference(old, now));
      sum[half] *= shrink[half];
    }
    return true;
  }

  // Logits to probabilities relative to the references, packed for their product.
  __device__ __forceinline__ void make_probabilities(const Exponent<T>& exponent,
                                                     const Draws& draws, float (&s)[kLogits]) {
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
      s[i] = ptx::ex2(exponent.of(s[i], reference[i / 2 % 2]));
      sum[i / 2 % 2] += s[i];
    }
    drop(draws, s);
    pack(s);
  }

  // From elements 4j .. 4j + 3 of accumulators, columns 8j .. of rows lane / 4 (+ 8), to what the
  // product wants of its operand a of 16 columns: the same elements, of one row and two columns a
  // word.
  __device__ __forceinline__ void pack(const float (&s)[kLogits]) {
#pragma unroll
    for (int i = 0; i < kLogits / 2; ++i) p[i] = sm80::pack(T(), s[2 * i], s[2 * i + 1]);
  }

  __device__ __forceinline__ void start_rows(const Plan& plan) {
    sm80::SoftmaxStart<T> start = {Exponent<T>::kNothing, 0.f};
    if constexpr (Policy::kEverything) start = sm80::softmax_start<T>(plan.sink);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      reference[half] = start.reference;
      sum[half] = start.sum;
    }
  }
  __device__ __forceinline__ void clear_output() {
#pragma unroll
    for (int i = 0; i < V / 2; ++i) output[i] = 0.f;
  }

  // From products to logits by ranges alone. Logits are in units of the scale, so that products
  // need no multiplication but where it is zero or negative.
  __device__ __forceinline__ Exponent<T> apply_ranges(const Plan& plan, const Unit& unit, int tile,
                                                      float (&s)[kLogits]) const {
    const bool zero = unit.scale == 0.f;
    if (unit.scale <= 0.f) {
      const float factor = zero ? 0.f : -1.f;
#pragma unroll
      for (int i = 0; i < kLogits; ++i) s[i] *= factor;
    }
    if (tile < unit.whole.begin || tile >= unit.whole.end) {
      hide_outside(plan.row_keys, plan.first_row, tile, s);
    }
    return {zero ? 1.f : fabsf(unit.scale) * sm80::kLog2E};
  }

  // Accumulators of wgmma as the rules have those of one strip of mma.sync: in both, elements 4j ..
  // 4j + 3 are columns 8j + 2 * (lane % 4) + {0, 1, 0, 1} of the warp's rows lane / 4 +
  // {0, 0, 8, 8}.
  using Strip = float[1][kKeys / 8][4];
  static __device__ __forceinline__ Strip& as_strip(float (&s)[kLogits]) {
    return reinterpret_cast<Strip&>(s);
  }

  // Likewise by all rules.
  __device__ __forceinline__ Exponent<T> apply_everything(const Plan& plan, const Visit& visit,
                                                          float (&s)[kLogits]) const {
    const sm80::ArrayTiles arrays = wait_for_arrays();
    if (visit.checks != 0) {
      const sm80::TilePlace place = {plan.first_row + 64 * warpgroup, visit.tile * kKeys,
                                     16 * (thread() >> 5), 0, sm80::lane_now()};
      sm80::apply_rules<T, Policy, PanelTiles<kKeys>>(
          params.problem, plan.view, visit.checks, arrays, place, [](int, int, int, float) {},
          as_strip(s));
    }
    release_arrays();
    return {plan.view.scaling.unit.nats * sm80::kLog2E};
  }

  // Which probabilities dropout keeps; found while products are under way.
  __device__ __forceinline__ void draw(const Plan& plan, const Visit& visit, Draws& draws) const {
    if constexpr (Policy::kEverything) {
      if (params.problem.dropout_threshold == 0) return;
      const int warp_row = plan.first_row + 64 * warpgroup + 16 * (thread() >> 5);
      draws.draw(params.problem, plan.view, warp_row, visit.tile * kKeys);
      ptx::pin_registers(draws.word[0]);
    }
  }
  __device__ __forceinline__ void drop(const Draws& draws, float (&s)[kLogits]) const {
    if constexpr (Policy::kEverything) {
      if (params.problem.dropout_threshold == 0) return;
#pragma unroll
      for (int i = 0; i < kLogits; ++i) {
        if (!draws.kept(0, i / 4, i % 4)) s[i] = 0.f;
      }
    }
  }

  // From products to logits.
  __device__ __forceinline__ Exponent<T> make_logits(const Plan& plan, const Unit& unit,
                                                     const Visit& visit,
                                                     float (&s)[kLogits]) const {
    if constexpr (Policy::kEverything) {
      return apply_everything(plan, visit, s);
    } else {
      return apply_ranges(plan, unit, visit.tile, s);
    }
  }

  // The first tile of keys after a pause.
  __device__ __forceinline__ void open(const Plan& plan, const Unit& unit) {
    const KeyTiles seen = unit.seen;
    float s[kLogits], shrink[2];
    wait_for_queries();
    wait_for_keys();
    take_turn();
    const Visit visit = visit_after(seen.end);
    ptx::wgmma_fence();
    multiply_keys(s);
    Draws draws;
    draw(plan, visit, draws);
    ptx::wgmma_wait<0>();
    pass_turn();
    ptx::pin_registers(s);
    release_keys();
    if (seen.end - 1 == seen.begin) release_queries();
    const Exponent<T> exponent = make_logits(plan, unit, visit, s);
    move_references(s, exponent, shrink);
    make_probabilities(exponent, draws, s);
  }

  // Q K^T and the softmax of the next tile after `before`, which it returns, and P V of that one,
  // which belongs to the same rows.
  __device__ __forceinline__ int step(const Plan& plan, const Unit& unit, int before) {
    float s[kLogits], shrink[2];
    Draws draws;
    Exponent<T> exponent;
    const Visit visit = start_products(plan, before, draws, s);
    if (visit.tile == unit.seen.begin) release_queries();
    if (finish_products(plan, unit, visit, s, exponent, shrink)) {
#pragma unroll
      for (int i = 0; i < V / 2; ++i) output[i] *= shrink[i / 2 % 2];
    }
    make_probabilities(exponent, draws, s);
    return visit.tile;
  }

  // Likewise where the tile is the first of other rows, of plan `next`.
  __device__ __forceinline__ void step_to(const Plan& next, const Unit& unit, const Plan& plan) {
    float s[kLogits], normalise[2], shrink[2];
    Draws draws;
    Exponent<T> exponent;
    finish_statistics(plan, normalise);
    start_rows(next);
    wait_for_queries();
    const Visit visit = start_products(next, unit.seen.end, draws, s);
    if (visit.tile == unit.seen.begin) release_queries();
    finish_products(next, unit, visit, s, exponent, shrink);
    store_output(plan, normalise);
    clear_output();
    make_probabilities(exponent, draws, s);
  }

  // Starts the products of a step, and waits for Q K^T.
  __device__ __forceinline__ Visit start_products(const Plan& plan, int before, Draws& draws,
                                                  float (&s)[kLogits]) {
    wait_for_keys();
    const Visit visit = visit_after(before);
    take_turn();
    ptx::wgmma_fence();
    multiply_keys(s);
    wait_for_values();
    ptx::wgmma_fence();
    multiply_values();
    draw(plan, visit, draws);
    ptx::wgmma_wait<1>();
    pass_turn();
    ptx::pin_registers(s);
    release_keys();
    return visit;
  }
  // The rest of both: from Q K^T to logits, of which `exponent` is the unit, and references; the
  // result is as of move_references. P V has come by the time that references are known, and before
  // the exponentials it must have: while their unit is busy, probabilities are packed into the
  // registers that it reads. ptxas moves the wait for it ahead of what does not need it, but not of
  // a branch. Where outputs are large, all rules want these registers themselves.
  static constexpr bool kAwaitsFirst = Policy::kEverything && V >= 128;
  __device__ __forceinline__ bool finish_products(const Plan& plan, const Unit& unit,
                                                  const Visit& visit, float (&s)[kLogits],
                                                  Exponent<T>& exponent, float (&shrink)[2]) {
    if (kAwaitsFirst) wait_for_output();
    exponent = make_logits(plan, unit, visit, s);
    const bool moved = move_references(s, exponent, shrink);
    if (!kAwaitsFirst) wait_for_output();
    return moved;
  }
  __device__ __forceinline__ void wait_for_output() {
    ptx::wgmma_wait<0>();
    ptx::pin_registers(output);
    release_values();
  }

  // P V of the last tile before a pause.
  __device__ __forceinline__ void close() {
    wait_for_values();
    ptx::wgmma_fence();
    multiply_values();
    wait_for_output();
  }

  // The log-sum-exp of the rows, and what their outputs are to be multiplied by: 0 where they are
  // to be 0 whatever was summed.
  __device__ __forceinline__ void finish_statistics(const Plan& plan, float (&normalise)[2]) const {
    const Statistics& statistics = params.statistics;
    auto* const logit_max = static_cast<float*>(statistics.logit_max.data) + plan.logit_max;
    auto* const log_sum = static_cast<float*>(statistics.log_sum.data) + plan.log_sum;
    float kept = 1.f;
    if (Policy::kEverything && params.problem.dropout_threshold != 0) {
      kept = static_cast<float>(dropout_keep_scale(params.problem.dropout_threshold));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = plan.first_row + row() + 8 * half;
      const float total = sm80::quad_sum(sum[half]);
      const bool sees = total != 0.f && at < plan.query_length;
      normalise[half] = sees ? kept / total : 0.f;
      if (at >= params.problem.query_length || (threadIdx.x & 3) != 0) continue;
      logit_max[at * statistics.logit_max.row] =
          sees ? Exponent<T>::logit_max(reference[half]) : sm80::minus_infinity();
      log_sum[at * statistics.log_sum.row] =
          sees ? Exponent<T>::log_sum(reference[half], total) : 0.f;
    }
  }

  __device__ __forceinline__ void store_output(const Plan& plan,
                                               const float (&normalise)[2]) const {
    const int lane = threadIdx.x & 3;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = plan.first_row + row() + 8 * half;
      const bool sees = normalise[half] != 0.f;
      auto* const to = static_cast<typename T::Bits*>(params.output.data) + plan.output +
                       at * params.output.row + 8 * lane;
      // From words of columns 8j + 2 * lane, + 1 to eight neighbours 32j + 8 * lane ..
#pragma unroll
      for (int j = 0; j < V / 32; ++j) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* const x = &output[16 * j + 4 * i + 2 * half];
          words[i] = sees ? sm80::pack(T(), x[0] * normalise[half], x[1] * normalise[half]) : 0;
        }
        const uint4 neighbours = sm80::transpose_quad(words);
        if (at < params.problem.query_length && 32 * j + 8 * lane < params.problem.value_dim) {
          ptx::store_global_4(to + 32 * j, neighbours);
        }
      }
    }
  }

  __device__ __forceinline__ void finish(const Plan& plan) const {
    float normalise[2];
    finish_statistics(plan, normalise);
    store_output(plan, normalise);
  }

  __device__ __forceinline__ Unit next_unit() const {
    wait(shared.plan_full[plans.stage()], plans.parity());
    const Plan& plan = shared.plans[plans.stage()];
    const KeyTiles keys = uniform(plan.keys);
    // All rules: warpgroups look at the same tiles.
    const KeyTiles seen = Policy::kEverything ? keys : uniform(plan.seen[warpgroup]);
    return {uniform(plan.stop) != 0, keys, seen, uniform(plan.whole[warpgroup]), plan.scale};
  }
  __device__ __forceinline__ void release_plan(uint32_t stage) const {
    __syncwarp();  // one lane waits for all to have read it
    if ((threadIdx.x & 31) == 0) arrive(shared.plan_empty[stage]);
  }

  __device__ __forceinline__ void run() {
    if (warpgroup == kWarpgroups - 1) pass_turn();  // the first turn
    bool opened = false;                            // whether the unit's first tile has been
    for (Unit unit = next_unit(); !unit.stop;) {
      const uint32_t stage = plans.stage();
      const Plan& plan = shared.plans[stage];
      if (!opened) {
        skip_tiles(unit.seen.end, unit.keys.end);
        start_rows(plan);
        clear_output();
        if (unit.sees()) {
          open(plan, unit);
        } else {
          wait_for_queries();
          release_queries();
        }
      }
      for (int tile = unit.seen.end - 1; tile > unit.seen.begin;) tile = step(plan, unit, tile);

      plans.advance();
      const Unit next = next_unit();
      opened = unit.leads_to(next);
      if (opened) {
        step_to(shared.plans[plans.stage()], next, plan);
      } else {
        if (unit.sees()) close();
        finish(plan);
        skip_tiles(unit.keys.begin, unit.seen.begin);
      }
      release_plan(stage);
      unit = next;
    }
  }
};

template <class T, int D, int V, Reach kReach, class Policy>
__global__ void __launch_bounds__(Forward<T, D, V, kReach, Policy>::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  using F = Forward<T, D, V, kReach, Policy>;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename F::Shared*>(memory);
  const uint32_t cluster = blockIdx.x / F::kCluster, clusters = gridDim.x / F::kCluster;

  if (threadIdx.x == 0) {
    const auto init = [](uint64_t& barrier, int arrivals) {
      ptx::mbarrier_init(shared_address(&barrier), arrivals);
    };
    for (int stage = 0; stage < F::kQueryStages; ++stage) {
      for (int w = 0; w < F::kWarpgroups; ++w) {
        init(shared.query_full[stage][w], 1);
        init(shared.query_empty[stage][w], 4);
      }
    }
    for (int stage = 0; stage < F::kStages; ++stage) {
      init(shared.key_full[stage], 1);
      init(shared.value_full[stage], 1);
      init(shared.value_landed[stage], 1);
      init(shared.key_empty[stage], 4 * F::kWarpgroups * F::kCluster);
      init(shared.value_empty[stage], 4 * F::kWarpgroups * F::kCluster);
    }
    init(shared.unit_full, 1);
    init(shared.unit_empty, F::kCluster);
    init(shared.unit_wanted, 1);
    for (int stage = 0; stage < F::kPlans; ++stage) {
      init(shared.plan_full[stage], 1);
      init(shared.plan_empty[stage], 3 + 4 * F::kWarpgroups);
    }
    for (int stage = 0; Policy::kEverything && stage < F::kArrayStages; ++stage) {
      for (int w = 0; w < F::kWarpgroups; ++w) {
        init(shared.arrays_full[stage][w], 1);
        init(shared.arrays_empty[stage][w], 4);
      }
    }
    ptx::fence_mbarrier_init();
  }
  // All threads wait for the barriers, in all blocks that copies go to.
  F::kCluster > 1 ? ptx::cluster_sync() : __syncthreads();

  const int warp = uniform(threadIdx.x / 32);
  if (warp < 4) {
    ptx::give_registers<F::kProducerRegisters>();
    if (warp == 0) {
      Planner<T, D, V, kReach, Policy>{params, shared}.run(cluster, clusters);
    } else {
      Loader<T, D, V, kReach, Policy> loader = {params, shared};
      if (warp == 1) loader.load_queries();
      if (warp == 2) loader.load_keys();
      if (warp == 3) loader.load_values();
    }
  } else {
    ptx::take_registers<F::kConsumerRegisters>();
    Consumer<T, D, V, kReach, Policy>{params, shared, warp / 4 - 1}.run();
  }
  // No block leaves while others may arrive at its barriers.
  if (F::kCluster > 1) ptx::cluster_sync();
}

}  // namespace jaxflash::cuda::sm90
