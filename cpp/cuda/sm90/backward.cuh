// Backward pass on Hopper: probabilities are computed again from the statistics of the forward pass
// (arXiv 2205.14135, Algorithm 4), by warps with different roles (arXiv 2407.08608).
//
// A block owns a tile of keys of one key head at a time (a unit) and takes it past the rows of all
// query heads that see any of it. One warp deals out units and has tiles copied by the tensor
// memory accelerator, one reads the rows' statistics and clears what must not count, and two
// consumer warpgroups multiply:
//
//   s = key query^T      p = exp(s - lse)         value cotangent += p output_cotangent
//   g = value output_cotangent^T                  d = p (g - delta)
//   key cotangent += d query                      query cotangent += d^T key
//
// Logits have keys as their rows, so that p and d leave the registers of one product as operands
// of the next. Only d^T key sums over the keys of both warpgroups: d goes by way of shared memory,
// and that product is one item late (an item: a tile of rows of a head), so that no warpgroup
// waits for the other in the same item, and one's exponentials fall into the other's products. Its
// result is added to sums in global memory, in f32, a strip of 16 rows a warp.
//
// With 128 keys a warpgroup has both sums of its 64 keys in registers, and a further warp for each
// warpgroup adds its query sums by bulk copies. With 64 keys, where the head dim leaves no
// registers for that, one has the values' sums and one the keys', and threads add query sums
// themselves: the first makes p and passes it on, the second makes d.
//
// What limits (Nsight Compute on an H200, 8192 keys, head dims 64 and 128; clocks of an item of 128
// x 128 or 64 x 128 at a fixed 1.35 GHz): tensor cores are busy for 2560 of 4400 and 3720 clocks,
// the pipe to shared memory for 2950 and 2760: products' operands 1800 and 2060, statistics 550 and
// 280, d 260 and 130, query sums 260. Whatever goes through it, shuffles and special registers too,
// queues behind the rest, so what counts is how little does, and that nothing is read right after
// stores. A consumer thread has 232 registers, all in use.
//
// Tried on H200s on 2026-11-30, 16384 tokens, hidden size 2048, 8192 keys, 20 ms a timing; each
// pair in one run, since machines and their temperatures differ by as much as some of these:
//
//   - statistics in an order in which lanes read neighbours, one float of them a row instead of
//     two, read ahead; fences and bulk copies by those who wait, not by consumers; the plan in
//     uniform registers, the thread's index in one: 425 -> 485 (dim 64), 515 -> 550 (dim 128).
//   - dim 128, the next item's first product started together with the others, not after query sums
//     are added: 495 -> 530 TFLOP/s. With dim 256, where the warpgroups hand p on, 425 -> 380: not
//     done.
//   - dims 64 and 128, warpgroups take turns at products by named barriers: 400 -> 365, 512 -> 510;
//     FlashAttention-3's order of products: 400 -> 375.
//   - dims 64 and 128, vector reductions from registers instead of bulk copies: 418 -> 414, 438 ->
//     414; and a third stage of rows: 418 -> 413, 438 -> 415.
//   - dim 64 with 64 rows, both products of the next item early: 430 -> 376.
//   - query sums handed over together with the next d, one fence for both: they are read too late.
//   - a block for each tile of keys: 30 000 clocks of which 11 000 are a beginning and an end (dim
//     64, 512 keys). That blocks stay, plan the next unit meanwhile, and have its keys copied while
//     the sums of the last are stored made it 1.08 times as fast in the mean of dims and 512 to
//     4096 keys, up to 1.17.
//   - sums of keys and values stored by way of shared memory, in fewer instructions: nothing, and
//     0.94 with dim 256, whose loop then reads all statistics before the first exponential.
//
// Not tried:
//
//   1. Dim 256: clusters of two blocks of neighbouring keys that exchange d (8 KB) and each add
//      half of the columns of 128 keys: half of the bytes to L2. Queries by multicast.
//   2. Short sequences, where clearing and converting query sums takes a tenth: a cluster of all
//      tiles of keys of a head, which sums through distributed shared memory.
//   3. A part of the exponentials by multiply-adds: a warpgroup's 64 a thread take 800 clocks.
//
// All rules (the policy Everything): items that are hidden as a whole are passed over, which the
// loader and the reader each find out on their own; consumers are told by the reader. Products
// become logits by the rules that all kernels share, the transposed way. What of it the second
// half of an item needs goes with the probabilities that wait for g: they are multiplied by the
// slope of the soft cap, and negative where dropout has dropped them.
#pragma once

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "attention/visibility.h"
#include "cuda/common/rules.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/ptx/ldmatrix.cuh"
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
using sm80::F16;

// A tile of rows of one of the query heads that share the block's keys.
struct Item {
  int head, tile;
};

// The items of a unit: tiles [begin, end) of rows, those that see any of the keys, of each head.
struct Items {
  int begin, end;
  int heads;  // of queries; 0 where no row sees any of the keys

  __device__ __forceinline__ Item first() const { return {0, begin}; }
  __device__ __forceinline__ Item last() const { return {heads - 1, end - 1}; }
  __device__ __forceinline__ bool is_last(const Item& item) const {
    return item.head + 1 == heads && item.tile + 1 == end;
  }
  __device__ __forceinline__ Item after(const Item& item) const {
    return item.tile + 1 < end ? Item{item.head, item.tile + 1} : Item{item.head + 1, begin};
  }
  // There is none before the first: head -1.
  __device__ __forceinline__ Item before(const Item& item) const {
    return item.tile > begin ? Item{item.head, item.tile - 1} : Item{item.head - 1, end - 1};
  }
};

// Rows [first, first + count) that see a key.
struct KeyRows {
  int first;
  uint32_t count;
};

// What a block is to do with a unit: a tile of keys.
struct BackwardPlan {
  int stop;  // whether there is none any more
  Extent extent;
  int first_key;
  int keys;  // of the tile, that exist
  Items items;
  int whole_begin, whole_end;  // tiles of rows of which those that exist see all keys
  int query_length;
  float scale;
  Place query, cotangent, key, value;  // query, cotangent: of the first head
  // Element offsets, of the first query head.
  int64_t rows, query_sums;
  int64_t key_cotangent, value_cotangent;
};

// Probabilities are kept times 2^kShift, exactly: as f16, small ones would lose digits. Sums of
// them make good for it, and gradients: d = p (g * 2^-kShift - delta * 2^-kShift).
inline constexpr int kShift = 12;
inline constexpr float kUnshift = 1.f / (1 << kShift);

// What probabilities take of a row's statistics: 2^((s + reference) * scale * log2(e) + rest). The
// reference is 0 but where logits are huge, see BackwardReader::terms_of.
struct RowTerms {
  float reference, rest;
};

// An item whose rows have come, as consumers are told of it; Everything only.
struct VisitedItem {
  Item item;
  int checks;
  bool is_first, is_last;  // of its unit
};

template <class T, int D, class Policy>
struct Backward {
  static constexpr BackwardTile kTile =
      Policy::kEverything ? everything_backward_tile(D) : backward_tile(D);
  static constexpr int kKeys = kTile.keys, kRows = kTile.rows, kStages = kTile.stages;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kProducerRegisters = kTile.producer_registers();
  static constexpr int kConsumerRegisters = kTile.consumer_registers();
  static constexpr bool kOwnsKeys = kTile.owns_keys();
  static constexpr int kWarps = 4 * BackwardTile::kWarpgroups;            // of consumers
  static constexpr int kGradientWarps = kOwnsKeys ? kWarps : kWarps / 2;  // that make d
  // Tiles are panels of 64 columns, rows of 128 bytes each, permuted within 1024 bytes. Those of d
  // have keys as rows and rows as columns.
  static constexpr int kPanels = D / 64;
  static constexpr int kKeyPanelBytes = kKeys * 128, kRowPanelBytes = kRows * 128;
  static constexpr int kKeyBytes = kPanels * kKeyPanelBytes;
  static constexpr int kRowBytes = kPanels * kRowPanelBytes;
  static constexpr int kGradientBytes = kRows / 64 * kKeyPanelBytes;
  // Query sums are made in pieces of 64 rows and columns, or of half as many columns where there is
  // but one of those; the first half of them by the first warpgroup.
  static constexpr int kPieceColumns = kRows * D == 64 * 64 ? 32 : 64;
  static constexpr int kRowPieces = D / kPieceColumns;  // of the same rows
  static constexpr int kPieces = kRows / 64 * kRowPieces / BackwardTile::kWarpgroups;  // of each
  // Of a warpgroup's piece `i`: its rows and columns among those of the tile.
  static __device__ __forceinline__ int piece_rows(int warpgroup, int i) {
    return (warpgroup * kPieces + i) / kRowPieces;
  }
  static __device__ __forceinline__ int piece_columns(int warpgroup, int i) {
    return (warpgroup * kPieces + i) % kRowPieces;
  }
  static constexpr int kStripBytes = 16 * kPieceColumns * 4;  // of a warp
  // Where a warpgroup has both sums, probabilities wait for g in registers, or, where all rules
  // leave none for that, in the place of the warp's strip of query sums.
  static constexpr bool kKeepsInRegisters = kOwnsKeys && (!Policy::kEverything || D < 128);
  static constexpr int kMovedBytes = kOwnsKeys ? kWarps * kStripBytes : kRows * kKeys * 2;
  static constexpr auto kType =
      T::kDType == DType::kBF16 ? ptx::WgmmaType::kBF16 : ptx::WgmmaType::kF16;
  static_assert(kTile.keys == 64 || kTile.keys == 128);
  static_assert(kRows % 64 == 0 && D % 64 == 0);
  static_assert(kPieces == (kOwnsKeys ? 1 : 2));
  // Of bias and mask; whole panels.
  static constexpr int kArrayStages = kTile.array_stages;
  static constexpr int kArrayWarps = kOwnsKeys ? kWarps : kWarps / 2;  // that read them
  static_assert(kTile.array_bytes % 1024 == 0);
  static_assert(!Policy::kEverything || kRows == 64, "tiles of bias and mask have 64 rows");

  // Barriers; `warps` stands for all consumer warps. Those of plans and keys have a phase a unit,
  // those of gradients one an item and one more a unit, those of strips likewise where the order of
  // additions counts, all others one an item. Whoever waits for one sees each of its phases.
  //   plan_full        the loader arrives; all others wait
  //   plan_empty       reader, adders and each warp arrive once done with a unit; the loader waits
  //   keys_landed      the loader arrives, copies are counted; warps and the reader wait
  //   keys_empty       each warp arrives once its products of them are done, and the reader once it
  //                    has seen them land; the loader waits
  //   rows_landed      the loader arrives, copies are counted; the reader waits
  //   rows_ready       the reader arrives: rows have landed, terms are there, rows (and keys) that
  //                    must not count are zeros; warps wait
  //   rows_empty       each warp arrives once it has read tiles and terms; loader and reader wait
  //   gradients_full   each warp that makes d arrives; warps wait
  //   gradients_empty  each warp arrives once its product of them is done; makers of d wait
  //   strips_full      of a warpgroup: each of its warps arrives; its adder waits
  //   strips_empty     the adder arrives once it has read them; the warpgroup waits
  //   passed_full      each warp of the first warpgroup arrives; those of the second wait
  //   passed_empty     the other way round
  //   arrays_full      the loader arrives, copies are counted; warps that make p wait
  //   arrays_empty     each of these arrives once it has read bias and mask; the loader waits
  struct NoArrays {};
  struct Arrays {
    uint8_t arrays[kArrayStages][kTile.array_bytes];  // of bias and mask
  };
  // Of visited items. While a consumer is at one and asks for the one before it, the reader is at
  // most kStages after it; where there are adders, one more, since these may be an item late. A
  // power of two, since counts wrap.
  static constexpr int kVisits = kOwnsKeys ? 8 : 4;
  static_assert(kStages + (kOwnsKeys ? 3 : 2) <= kVisits);
  struct NoRules {};
  struct Rules {
    // Of the heads of the items whose rows a stage has; the reader writes them ahead of rows_ready.
    sm80::ScaledView views[kStages];
    VisitedItem visits[kVisits];
    float keep_scale;  // of dropout
    uint64_t arrays_full[kArrayStages], arrays_empty[kArrayStages];
  };
  struct Plan : BackwardPlan, PlanRules<Policy> {  // rules: of the first head
    KeyRows key_rows[kKeys];
  };
  static constexpr int kPlans = kTile.plans;
  // Consumer warps, the reader and the adders.
  static constexpr int kPlanReaders = kWarps + 1 + (kOwnsKeys ? BackwardTile::kWarpgroups : 0);
  struct Shared : std::conditional_t<Policy::kEverything, Arrays, NoArrays> {
    uint8_t key[kKeyBytes];
    uint8_t value[kKeyBytes];
    uint8_t query[kStages][kRowBytes];
    uint8_t cotangent[kStages][kRowBytes];
    uint8_t gradients[2][kGradientBytes];
    uint8_t moved[kMovedBytes];                             // strips of query sums, or p on its way
    float reference[kStages][kRows], rest[kStages][kRows];  // RowTerms
    float delta[kStages][kRows];                            // times 2^-kShift
    uint32_t has_references[kStages];                       // whether one of these is not 0
    uint64_t plan_full[kPlans], plan_empty[kPlans];
    uint64_t keys_landed, keys_empty;
    uint64_t rows_landed[kStages], rows_ready[kStages], rows_empty[kStages];
    uint64_t gradients_full[2], gradients_empty[2];
    uint64_t strips_full[2], strips_empty[2];
    uint64_t passed_full, passed_empty;
    Plan plans[kPlans];
    std::conditional_t<Policy::kEverything, Rules, NoRules> rules;
  };
  static_assert(sizeof(Shared) <= 227 * 1024);
};

// A thread fills in what of a unit's plan follows from ranges.
template <class B, class Policy>
__device__ __forceinline__ void plan_ranges(const BackwardParams& params, int64_t first_key,
                                            const BatchIndex& index, BackwardPlan& plan) {
  constexpr int kRows = B::kRows;
  const Extent extent = extent_of(params.problem, index);
  const Range keys = {first_key, first_key + B::kKeys};
  const Range any = rows_of_any_key(extent, keys);
  const Range every = rows_of_every_key(extent, keys);
  // Rows past the query length need no checks: their probabilities are 0. With a bias they may be
  // NaN.
  const bool to_the_end = !Policy::kEverything && every.end == extent.query_length;

  plan.extent = extent;
  plan.first_key = static_cast<int>(first_key);
  plan.keys = static_cast<int>(clamp_to(extent.key_length - first_key, 0, B::kKeys));
  plan.items.begin = static_cast<int>(any.begin / kRows);
  plan.items.end =
      any.end > any.begin ? static_cast<int>((any.end + kRows - 1) / kRows) : plan.items.begin;
  plan.whole_begin = static_cast<int>((every.begin + kRows - 1) / kRows);
  plan.whole_end = static_cast<int>((every.end + (to_the_end ? kRows - 1 : 0)) / kRows);
  plan.items.heads = plan.items.begin < plan.items.end ? static_cast<int>(params.group) : 0;
  plan.query_length = static_cast<int>(extent.query_length);
}

// A thread fills in the rest: the scale, and where things lie.
template <int D>
__device__ __forceinline__ void plan_places(const BackwardParams& params, uint32_t batch,
                                            const BatchIndex& index, int key_head,
                                            BackwardPlan& plan) {
  const Problem& problem = params.problem;
  const int head = key_head * static_cast<int>(params.group);  // the first of the query
  plan.scale = batch_value<float>(problem.scale, index, 1.f);
  plan.query = place_of(params.query, index, head);
  plan.cotangent = place_of(params.cotangent, index, head);
  plan.key = place_of(params.key, index, key_head);
  plan.value = place_of(params.value, index, key_head);
  const auto offset = [&](const Tensor& tensor, int of_head) {
    return batch_offset(tensor, index) + of_head * tensor.head;
  };
  plan.rows = (batch * problem.query_heads + head) * problem.query_length;
  plan.key_cotangent = offset(params.key_cotangent, key_head);
  plan.value_cotangent = offset(params.value_cotangent, key_head);
  plan.query_sums = (batch * problem.query_heads + head) * params.strips * (16 * D);
}

// The items of a plan, one after the other.
template <class B, class Policy>
struct ItemWalk {
  static constexpr int checks = 0;
  const Items& items;
  Item item;

  __device__ __forceinline__ ItemWalk(const BackwardParams&, const typename B::Plan& plan)
      : items(plan.items), item(plan.items.first()) {}
  __device__ __forceinline__ bool ends() const { return item.head >= items.heads; }
  __device__ __forceinline__ void go_on() { item = items.after(item); }
};

// Likewise those that no rule hides as a whole. All lanes of a warp walk.
template <class B>
struct ItemWalk<B, Everything> {
  const BackwardParams& params;
  const typename B::Plan& plan;
  int heads;
  Item item;
  int checks = sm80::kHidden;  // of the item
  sm80::TileScan scan = {};    // of its head

  // At the first item.
  __device__ __forceinline__ ItemWalk(const BackwardParams& params, const typename B::Plan& plan)
      : params(params), plan(plan), heads(plan.items.heads), item{0, plan.items.begin - 1} {
    if (heads > 0) go_on();
  }

  __device__ __forceinline__ bool ends() const { return item.head >= heads; }

  __device__ __forceinline__ void go_on() {
    while (true) {
      const sm80::Visit visit =
          scan.next(item.tile + 1, plan.items.end, [this](int tile) { return checks_of(tile); });
      item.tile = visit.tile;
      checks = visit.checks;
      if (visit.tile < plan.items.end) return;
      if (++item.head == heads) return;
      item.tile = plan.items.begin - 1;
      scan.count = 0;  // what it knows is of another head
    }
  }

 private:
  struct View {
    const Extent& extent;
    int64_t batch, mask_map;
  };
  __device__ __forceinline__ int checks_of(int tile) const {
    const sm80::ScaledView& first = plan.view;
    const View view = {first.extent, first.batch,
                       first.mask_map + item.head * params.maps.mask.head};
    return sm80::tile_checks<Everything, B::kRows, B::kKeys>(
        params.problem, params.maps, view, tile, static_cast<uint32_t>(plan.first_key) / B::kKeys);
  }
};

// The warp that deals out units, plans them, and has tiles copied.
template <class T, int D, class Policy>
struct BackwardLoader {
  using B = Backward<T, D, Policy>;
  using Plan = typename B::Plan;

  const BackwardParams& params;
  typename B::Shared& shared;
  Ring<B::kPlans> plans;
  Ring<B::kStages> rows;
  Ring<B::kArrayStages> arrays;
  uint32_t key_parity = 0;

  __device__ __forceinline__ int lane() const { return threadIdx.x & 31; }
  __device__ __forceinline__ const Plan& plan() const { return shared.plans[plans.stage()]; }

  // Units come in the order in which blocks ask for them, the first too. Where the order of
  // additions counts, a unit waits for earlier ones only, and these are of blocks that run and are
  // at them or at still earlier ones: of all that are not done the earliest waits for none.
  __device__ __forceinline__ uint32_t next_unit() const {
    uint32_t next = 0;
    if (lane() == 0) next = atomicAdd(params.next_unit, 1);
    return __shfl_sync(0xffffffffu, next, 0);
  }

  // Fills in the plan of a unit, each lane its part.
  __device__ __forceinline__ void make_plan(uint32_t unit, Plan& plan) const {
    const Problem& problem = params.problem;
    const auto key_heads = static_cast<uint32_t>(problem.key_heads);
    const sm80::Work work = sm80::work_of(params.schedule, unit);
    const uint32_t batch = work.head / key_heads;
    const int key_head = static_cast<int>(work.head - batch * key_heads);
    const BatchIndex index = batch_index(problem, batch);
    if (lane() == 0) plan_ranges<B, Policy>(params, int64_t{work.tile} * B::kKeys, index, plan);
    if (lane() == 1) plan_places<D>(params, batch, index, key_head, plan);
    __syncwarp();  // all lanes wait for the extent
    const Neighbours rows = rows_near_keys(plan.extent);
    for (int key = lane(); key < B::kKeys; key += 32) {
      const int first = rows.first_of(plan.first_key + key);
      const int end = key < plan.keys ? rows.end_of(plan.first_key + key) : first;
      plan.key_rows[key] = {first, static_cast<uint32_t>(max(end - first, 0))};
    }
    if constexpr (Policy::kEverything) {
      plan_rules<T>(params, plan.extent, index, batch, key_head * static_cast<int>(params.group),
                    plan);
      __syncwarp();  // all lanes wait for the parts that tiles' checks need
      const ItemWalk<B, Policy> walk(params, plan);
      __syncwarp();  // lane 0 waits for all lanes to have read the plan
      if (lane() == 0 && walk.ends()) plan.items.heads = 0;
    }
    __syncwarp();  // all lanes wait for all parts
  }

  template <int kPanelBytes>
  __device__ __forceinline__ void copy(const TileMap& map, Place place, int head, int row,
                                       const void* to, uint32_t barrier) const {
#pragma unroll 1
    for (int panel = 0; panel < B::kPanels; ++panel) {
      ptx::tma_load(shared_address(to) + panel * kPanelBytes, &map.map, barrier, 64 * panel,
                    place.head + head, row, place.batch);
    }
  }

  __device__ __forceinline__ void copy_keys() {
    wait(shared.keys_empty, key_parity ^ 1);
    key_parity ^= 1;
    if (lane() == 0) {
      const uint32_t keys = shared_address(&shared.keys_landed);
      ptx::mbarrier_arrive_expecting(keys, 2 * B::kKeyBytes);
      copy<B::kKeyPanelBytes>(params.key, plan().key, 0, plan().first_key, shared.key, keys);
      copy<B::kKeyPanelBytes>(params.value, plan().value, 0, plan().first_key, shared.value, keys);
    }
    __syncwarp();  // no lane falls behind by two phases of what it waits for
  }

  __device__ __forceinline__ void copy_rows(const Item& item) {
    const uint32_t stage = rows.stage();
    wait(shared.rows_empty[stage], rows.parity() ^ 1);
    rows.advance();
    if (lane() == 0) {
      const uint32_t landed = shared_address(&shared.rows_landed[stage]);
      ptx::mbarrier_arrive_expecting(landed, 2 * B::kRowBytes);
      copy<B::kRowPanelBytes>(params.query, plan().query, item.head, item.tile * B::kRows,
                              shared.query[stage], landed);
      copy<B::kRowPanelBytes>(params.cotangent, plan().cotangent, item.head, item.tile * B::kRows,
                              shared.cotangent[stage], landed);
    }
    __syncwarp();  // as above
  }

  // Bias and mask of an item, as far as they are copied in tiles; of the mask only where it is
  // looked at.
  __device__ __forceinline__ void copy_arrays(const Item& item, int checks) {
    const sm80::ArrayStaging& staging = params.staging;
    if (staging.bias_bytes + staging.mask_bytes == 0) return;
    const uint32_t stage = arrays.stage();
    wait(shared.rules.arrays_empty[stage], arrays.parity() ^ 1);
    arrays.advance();
    if (lane() != 0) return;
    const int mask_bytes = checks & sm80::kCheckMask ? staging.mask_bytes : 0;
    const uint32_t full = shared_address(&shared.rules.arrays_full[stage]);
    const uint32_t tiles = shared_address(shared.arrays[stage]);
    ptx::mbarrier_arrive_expecting(full, staging.bias_bytes + mask_bytes);
    const auto copy = [&](const TileMap& map, Place place, const Tensor& array, int bytes,
                          uint32_t to) {
      if (array.head != 0) place.head += item.head;
      copy_array<B::kKeys>(map, place, bytes, item.tile * B::kRows, plan().first_key, to, full);
    };
    const PlanRules<Everything>& rules = plan();
    copy(params.bias, rules.bias, params.problem.bias, staging.bias_bytes, tiles);
    copy(params.mask, rules.mask, params.problem.mask, mask_bytes, tiles + staging.bias_bytes);
  }

  // Keys come after the first rows, for which there is room sooner; also where there are no rows,
  // so that barriers' phases are those of units.
  __device__ __forceinline__ void load_unit() {
    bool has_keys = false;
#pragma unroll 1
    for (ItemWalk<B, Policy> walk(params, plan()); !walk.ends(); walk.go_on()) {
      copy_rows(walk.item);
      if (!has_keys) copy_keys();
      has_keys = true;
      if constexpr (Policy::kEverything) copy_arrays(walk.item, walk.checks);
    }
    if (!has_keys) copy_keys();
  }

  // The next unit is asked for when the rows of the last one are on their way, no sooner, so that
  // no block has one waiting for long while others have nothing to do.
  __device__ __forceinline__ void run() {
    const uint32_t units = params.schedule.tiles * params.schedule.heads;
#pragma unroll 1
    for (uint32_t unit = next_unit();; unit = next_unit(), plans.advance()) {
      wait(shared.plan_empty[plans.stage()], plans.parity() ^ 1);
      Plan& plan = shared.plans[plans.stage()];
      const bool stop = unit >= units;
      if (lane() == 0) plan.stop = stop;
      if (!stop) make_plan(unit, plan);
      if (lane() == 0) arrive(shared.plan_full[plans.stage()]);
      if (stop) return;
      load_unit();
    }
  }
};

// Calls `work` with each unit's plan at `plans`, in all lanes of a warp that the loader waits for.
template <class Shared, class Plans, class Work>
__device__ __forceinline__ void for_each_unit(Shared& shared, Plans& plans, const Work& work) {
#pragma unroll 1
  for (;; plans.advance()) {
    wait(shared.plan_full[plans.stage()], plans.parity());
    if (shared.plans[plans.stage()].stop) return;
    work();
    __syncwarp();  // lane 0 waits for all lanes to have read the plan
    if ((threadIdx.x & 31) == 0) arrive(shared.plan_empty[plans.stage()]);
  }
}

// The warp that reads the rows' statistics, and clears rows and keys that must not count: products
// with probabilities of 0 need not be 0.
template <class T, int D, class Policy>
struct BackwardReader {
  using B = Backward<T, D, Policy>;
  static constexpr int kLaneRows = B::kRows / 32;

  const BackwardParams& params;
  typename B::Shared& shared;
  Ring<B::kPlans> plans;
  Ring<B::kStages> rows;
  uint32_t key_parity = 0;
  uint32_t count = 0;  // of items

  __device__ __forceinline__ int lane() const { return threadIdx.x & 31; }
  __device__ __forceinline__ const auto& plan() const { return shared.plans[plans.stage()]; }

  // Zeros in row `row` of both tiles, by all lanes.
  template <int kPanelBytes>
  __device__ __forceinline__ void clear_row(const void* first, const void* second, int row) const {
#pragma unroll 1
    for (int i = lane(); i < 2 * B::kPanels * 8; i += 32) {
      const int chunk = i % 8, panel = i / 8 % B::kPanels;
      const uint32_t tile = shared_address(i / 8 < B::kPanels ? first : second);
      ptx::store_shared_4(tile + panel * kPanelBytes + row * 128 + chunk * 16, {0, 0, 0, 0});
    }
  }

  // Keys past the length. Past the array's end they are zeros already.
  __device__ __forceinline__ void clear_keys() const {
    const int64_t in_array = params.problem.key_length - plan().first_key;
    const int keys = static_cast<int>(min_of(in_array, B::kKeys));
    if (plan().keys >= keys) return;
    wait(shared.keys_landed, key_parity);
#pragma unroll 1
    for (int key = plan().keys; key < keys; ++key) {
      clear_row<B::kKeyPanelBytes>(shared.key, shared.value, key);
    }
    ptx::fence_proxy_async();
  }

  struct Statistic {
    float logit_max, log_sum, delta;
  };
  // Of a row that does not exist as of one that sees nothing.
  __device__ __forceinline__ Statistic statistic_of(int head, int row) const {
    if (row >= plan().query_length) return {sm80::minus_infinity(), 0.f, 0.f};
    const int64_t at = plan().rows + head * params.problem.query_length + row;
    return {params.rows.logit_max[at], params.rows.log_sum[at], params.rows.delta[at]};
  }

  // What logits are held in units of.
  __device__ __forceinline__ float logit_unit() const {
    if constexpr (Policy::kEverything) return plan().view.scaling.unit.nats;
    return plan().scale;
  }

  // Huge logits are taken relative to their maximum before they are rounded to exponents. What that
  // loses of the maximum, in units of the scale, goes to the rest. Up to kHuge three roundings of
  // the log-sum-exp are 3e-5 of a probability at most: less than rounding to 16 bits by a factor
  // of 17.
  static constexpr float kHuge = 256.f;
  __device__ __forceinline__ RowTerms terms_of(const Statistic& x) const {
    if (x.logit_max == sm80::minus_infinity()) return {0.f, sm80::minus_infinity()};
    const float scale = logit_unit();
    const bool normal = fabsf(scale) >= FLT_MIN;  // else 1 / scale may be infinite
    const float reference = normal && fabsf(x.logit_max) > kHuge ? -x.logit_max / scale : 0.f;
    const float rounding = fmaf(reference, scale, x.logit_max);
    return {reference, kShift - (x.log_sum + rounding) * sm80::kLog2E};
  }

  // The rows of an item, which `begin(stage)` is told of once its stage is free.
  template <class Begin>
  __device__ __forceinline__ void read(const Item& item, const Begin& begin) {
    const uint32_t stage = rows.stage();
    const int first_row = item.tile * B::kRows;
    Statistic x[kLaneRows];  // read before the stage is free
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      x[i] = statistic_of(item.head, first_row + 32 * i + lane());
    }
    wait(shared.rows_empty[stage], rows.parity() ^ 1);
    begin(stage);
    uint32_t cleared[kLaneRows], referred = 0;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const int row = 32 * i + lane();
      const RowTerms terms = terms_of(x[i]);
      shared.reference[stage][row] = terms.reference;
      shared.rest[stage][row] = terms.rest;
      referred |= __ballot_sync(0xffffffffu, terms.reference != 0.f);
      const bool dead = x[i].logit_max == sm80::minus_infinity();
      shared.delta[stage][row] = dead ? 0.f : x[i].delta * kUnshift;
      cleared[i] =
          __ballot_sync(0xffffffffu, dead && first_row + row < params.problem.query_length);
    }
    if (lane() == 0) shared.has_references[stage] = referred;
    // So that consumers need to wait for one barrier only.
    wait(shared.rows_landed[stage], rows.parity());
    uint32_t any_cleared = 0;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      any_cleared |= cleared[i];
#pragma unroll 1
      for (uint32_t left = cleared[i]; left != 0; left &= left - 1) {
        clear_row<B::kRowPanelBytes>(shared.query[stage], shared.cotangent[stage],
                                     32 * i + __ffs(left) - 1);
      }
    }
    if (any_cleared != 0) ptx::fence_proxy_async();
    __syncwarp();  // lane 0 waits for all lanes' terms and zeros
    if (lane() == 0) arrive(shared.rows_ready[stage]);
    rows.advance();
  }

  // Writes the view of a query head, counted from the plan's first, where it is not there yet.
  __device__ __forceinline__ void look_at(int head, sm80::ScaledView& view) const {
    const Problem& problem = params.problem;
    const sm80::ScaledView& first = plan().view;
    const bool known =
        count >= B::kStages && view.head == first.head + head && view.batch == first.batch;
    if (uniform(known)) return;  // as lane 0 says, which will change it
    if (lane() == 0) {
      view = first;
      view.head += head;
      sm80::find_arrays<Policy>(problem, params.maps, view);
    }
    __syncwarp();  // all lanes wait for lane 0's copy, of which they change a part
    if (lane() < 4 && problem.dropout_stream.data != nullptr) {
      view.stream[lane()] = stream_word(problem.dropout_stream, view.index, view.head, lane());
    }
  }
  // Tells consumers of an item, whose rows will be in a stage.
  __device__ __forceinline__ void announce(const VisitedItem& visited, uint32_t stage) const {
    sm80::ScaledView& view = shared.rules.views[stage];
    look_at(visited.item.head, view);
    if (lane() == 0) shared.rules.visits[count % B::kVisits] = visited;
    __syncwarp();  // all lanes wait for the view
    sm80::prefetch_rules<B::kRows, B::kKeys, 32>(params.problem, view, params.staging,
                                                 visited.checks, visited.item.tile * B::kRows,
                                                 plan().first_key);
  }

  __device__ __forceinline__ void read_unit() {
    if (plan().items.heads == 0) return;
    clear_keys();
    bool first = true;
    ItemWalk<B, Policy> walk(params, plan());
#pragma unroll 1
    for (; !walk.ends(); ++count, first = false) {
      const Item item = walk.item;
      const int checks = walk.checks;
      walk.go_on();
      const bool last = walk.ends();
      read(item, [&](uint32_t stage) {
        if constexpr (Policy::kEverything) {
          announce({item, checks | plan().checks, first, last}, stage);
        }
      });
    }
  }
  __device__ __forceinline__ void run() {
    for_each_unit(shared, plans, [this] {
      read_unit();
      // In each unit, and the loader waits for it: a parity tells only neighbouring phases apart.
      wait(shared.keys_landed, key_parity);
      key_parity ^= 1;
      __syncwarp();  // lane 0 waits for all lanes to have seen them land
      if (lane() == 0) arrive(shared.keys_empty);
    });
  }
};

// A warp that adds a consumer warpgroup's strips of query sums to those in global memory.
template <class T, int D, class Policy>
struct BackwardAdder {
  using B = Backward<T, D, Policy>;

  const BackwardParams& params;
  typename B::Shared& shared;
  int warpgroup;
  Ring<B::kPlans> plans;
  uint32_t turn_count = 0, item_count = 0;  // so far

  __device__ __forceinline__ int lane() const { return threadIdx.x & 31; }
  __device__ __forceinline__ const auto& plan() const { return shared.plans[plans.stage()]; }

  // Waits for the next strips, calls `add`, which waits until they have been read, and lets the
  // warpgroup write others.
  template <class Add>
  __device__ __forceinline__ void turn(const Add& add) {
    wait(shared.strips_full[warpgroup], turn_count & 1);
    // Not by those who wrote, whom it would keep waiting: a fence may lie anywhere between writes
    // and reads that barriers put in order.
    ptx::fence_proxy_async();
    add();
    __syncwarp();  // lane 0 waits for lanes with a strip
    if (lane() == 0) arrive(shared.strips_empty[warpgroup]);
    ++turn_count;
  }

  // Each of the first lanes one warp's strip: 16 rows and 8 blocks of 8 columns, contiguous in
  // global memory, in the order of accumulators: elements 4j .. 4j + 3 of lane l at 128 j + 4 l.
  __device__ __forceinline__ void add(const Item& item) const {
    const int strip = item.tile * (B::kRows / 16) + B::piece_rows(warpgroup, 0) * 4 + lane();
    if (lane() >= 4 || strip >= params.strips || params.query_sums == nullptr) return;
    float* const to = params.query_sums + plan().query_sums +
                      (item.head * params.strips + strip) * (16 * D) +
                      B::piece_columns(warpgroup, 0) * (16 * B::kPieceColumns);
    ptx::bulk_add(to, shared_address(shared.moved) + (4 * warpgroup + lane()) * B::kStripBytes,
                  B::kStripBytes);
    ptx::bulk_commit();
    ptx::bulk_wait_read();
  }

  // Where the order counts, tiles of keys add to the same rows in descending order, in which they
  // are dealt out. Rows share a turn where a tile of them takes less time than handing it on.
  static constexpr int kTurnTiles = BackwardParams::kTurnRows / B::kRows;  // of rows, a turn
  __device__ __forceinline__ uint32_t* turns_of(const Item& item) const {
    const int64_t head = plan().rows / params.problem.query_length + item.head;
    return params.turns +
           (head * params.turns_a_head + item.tile / kTurnTiles) * BackwardTile::kWarpgroups +
           warpgroup;
  }
  __device__ __forceinline__ void begin_turn(const Item& item) const {
    if (item.tile % kTurnTiles != 0 && item.tile != plan().items.begin) return;
    const int64_t first_row = int64_t{item.tile / kTurnTiles} * BackwardParams::kTurnRows;
    const Range rows = {first_row,
                        min_of(first_row + BackwardParams::kTurnRows, params.problem.query_length)};
    const Range seen = keys_of_any_row(plan().extent, rows);
    const auto turn = static_cast<uint32_t>((seen.end - 1 - plan().first_key) / B::kKeys);
    if (lane() == 0) {
      while (ptx::load_acquire(turns_of(item)) != turn) {
      }
    }
    __syncwarp();  // all lanes wait until lane 0 has seen the turn come
  }
  __device__ __forceinline__ void end_turn(const Item& item) const {
    if ((item.tile + 1) % kTurnTiles != 0 && item.tile + 1 != plan().items.end) return;
    ptx::bulk_wait();  // not only read: added
    __syncwarp();      // lane 0 waits for lanes with a strip
    if (lane() == 0) ptx::add_release(turns_of(item), 1);
  }

  // Strips come with the item after their own; with the first come none, and after the last only
  // where the order counts, see BackwardConsumer::finish_pieces.
  __device__ __forceinline__ void add_unit() {
    const Items& all = plan().items;
    if (all.heads == 0 && params.turns == nullptr) return;
    turn([] {});
    if constexpr (Policy::kEverything) {
      const auto visited = [this] { return shared.rules.visits[item_count % B::kVisits]; };
      for (; !visited().is_last; ++item_count) turn([&] { add(visited().item); });
      ++item_count;
    } else {
#pragma unroll 1
      for (Item item = all.first(); item.head < all.heads; item = all.after(item)) {
        if (params.turns == nullptr && all.is_last(item)) return;
        if (params.turns != nullptr) begin_turn(item);  // while the strips are made
        turn([&] { add(item); });
        if (params.turns != nullptr) end_turn(item);
      }
    }
  }
  __device__ __forceinline__ void run() {
    for_each_unit(shared, plans, [this] { add_unit(); });
  }
};

// What both kinds of consumer warpgroup do.
template <class T, int D, class Policy>
struct BackwardConsumer {
  using B = Backward<T, D, Policy>;
  using LogitProduct = ptx::Wgmma<B::kType, B::kRows>;          // of 64 keys
  using SumProduct = ptx::Wgmma<B::kType, D>;                   // of 64 keys
  using PieceProduct = ptx::Wgmma<B::kType, B::kPieceColumns>;  // of 64 rows
  static constexpr int kLogits = B::kRows / 2;                  // a thread
  // Where a warpgroup has both sums, registers are short: probabilities of 32 rows at a time become
  // operands; and of 16 where the rules need registers beside large sums.
  static constexpr int kPartRows = Policy::kEverything ? (D < 128 ? 32 : 16)
                                   : B::kOwnsKeys      ? 32
                                                       : B::kRows;
  static constexpr int kParts = B::kRows / kPartRows;
  using Logits = float[kLogits];
  using Operand = uint32_t[kLogits / 2];
  using Sum = float[D / 2];
  using Piece = float[B::kPieceColumns / 2];

  const BackwardParams& params;
  typename B::Shared& shared;
  int warpgroup;
  uint32_t count, units;  // items and units done; stages and parities follow from them

  // Of the plan, in uniform registers: reading shared memory takes the longer, the more it is in
  // use, and here products would wait for it.
  Items items;
  float exponent;  // from what logits are held in to exponents of 2

  __device__ __forceinline__ const auto& plan() const { return shared.plans[units % B::kPlans]; }

  // Waits for the next unit's plan and keys; whether there is one.
  __device__ __forceinline__ bool begin_unit() {
    wait(shared.plan_full[units % B::kPlans], units / B::kPlans & 1);
    if (uniform(plan().stop) != 0) return false;
    items = {uniform(plan().items.begin), uniform(plan().items.end), uniform(plan().items.heads)};
    if constexpr (Policy::kEverything) {
      exponent = plan().view.scaling.unit.nats * sm80::kLog2E;
    } else {
      exponent = plan().scale * sm80::kLog2E;
    }
    wait(shared.keys_landed, units & 1);
    return true;
  }
  __device__ __forceinline__ void end_unit() {
    release_all_lanes(shared.plan_empty[units % B::kPlans]);
  }

  // What make_probabilities found: slopes of the soft cap in a part, and what dropout keeps in all.
  float slope[kPartRows / 2];
  sm80::KeptBits<1, B::kRows / 8> kept;

  // Kept, not read anew: a special register comes by way of shared memory's queue.
  const int thread = ptx::thread_index() & 127;
  __device__ __forceinline__ int warp() const { return thread >> 5; }
  __device__ __forceinline__ int lane() const { return thread & 31; }
  // Of the tile, the first key of the warpgroup, and of this thread; another is 8 further on.
  __device__ __forceinline__ int first_key() const { return B::kOwnsKeys ? 64 * warpgroup : 0; }
  __device__ __forceinline__ int thread_key() const {
    return first_key() + 16 * warp() + lane() / 4;
  }

  __device__ __forceinline__ uint32_t stage() const { return count % B::kStages; }  // of rows
  __device__ __forceinline__ uint32_t next_stage() const { return (count + 1) % B::kStages; }
  // Of gradients of the item before (at first, of zeros), and of the current one: of each unit
  // there are those of one item more.
  __device__ __forceinline__ Ring<2> last_gradients() const { return {(count + units) % 4}; }
  __device__ __forceinline__ Ring<2> next_gradients() const { return {(count + units + 1) % 4}; }

  __device__ __forceinline__ const uint8_t* query() const { return shared.query[stage()]; }
  __device__ __forceinline__ const uint8_t* next_query() const {
    return shared.query[next_stage()];
  }
  __device__ __forceinline__ const uint8_t* cotangent() const { return shared.cotangent[stage()]; }

  // Every warp arrives: others might not even have seen the tile come.
  __device__ __forceinline__ void release(uint64_t& barrier) const {
    if (lane() == 0) arrive(barrier);
  }
  // Likewise where all lanes have read or written shared memory themselves.
  __device__ __forceinline__ void release_all_lanes(uint64_t& barrier) const {
    __syncwarp();  // lane 0 waits for all lanes
    if (lane() == 0) arrive(barrier);
  }
  // Of the item that is `ahead` of the current one.
  __device__ __forceinline__ void wait_for_rows(uint32_t ahead) const {
    const uint32_t at = (count + ahead) % B::kStages, parity = (count + ahead) / B::kStages & 1;
    wait(shared.rows_ready[at], parity);
  }
  __device__ __forceinline__ void release_rows() const {
    release_all_lanes(shared.rows_empty[stage()]);
  }
  __device__ __forceinline__ void wait_for_gradients() const {
    wait(shared.gradients_full[last_gradients().stage()], last_gradients().parity());
    ptx::fence_proxy_async();  // as adders do
  }
  __device__ __forceinline__ void release_gradients() const {
    release(shared.gradients_empty[last_gradients().stage()]);
  }

  // The item that is `ahead` of the current one, which has none before the first.
  __device__ __forceinline__ const VisitedItem& visited(int ahead) const {
    return shared.rules.visits[(count + ahead) % B::kVisits];
  }
  __device__ __forceinline__ bool is_last(const Item& item) const {
    if constexpr (Policy::kEverything) return visited(0).is_last;
    return items.is_last(item);
  }
  // Head -1: there is none.
  __device__ __forceinline__ Item item_before(const Item& item) const {
    if constexpr (Policy::kEverything) return visited(0).is_first ? Item{-1, 0} : visited(-1).item;
    return items.before(item);
  }
  __device__ __forceinline__ Item last_item() const {
    if constexpr (Policy::kEverything) return visited(-1).item;
    return items.last();
  }

  // Starts d = keys rows^T, for this warpgroup's keys of a tile. Both operands have their k-steps
  // of 16 columns 32 bytes apart within a panel's rows.
  __device__ __forceinline__ void multiply_rows(const void* keys, const void* of_rows,
                                                Logits& d) const {
    const uint64_t a = ptx::matrix_descriptor(shared_address(keys) + first_key() * 128, 0);
    const uint64_t b = ptx::matrix_descriptor(shared_address(of_rows), 0);
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      const int panel = step / 4, bytes = 32 * (step % 4);
      LogitProduct::of_shared(d, a + ((panel * B::kKeyPanelBytes + bytes) >> 4),
                              b + ((panel * B::kRowPanelBytes + bytes) >> 4), step != 0);
    }
    ptx::wgmma_commit();
  }

  // Starts sum += operand rows, for all rows or some. k-steps of 16 rows are 2048 bytes apart.
  __device__ __forceinline__ void add_rows(const Operand& a, const void* of_rows, Sum& sum) const {
    add_rows(a, of_rows, 0, B::kRows, sum);
  }
  __device__ __forceinline__ void add_rows(const Operand& a, const void* of_rows, int begin,
                                           int end, Sum& sum) const {
    const uint64_t b = ptx::matrix_descriptor(shared_address(of_rows), B::kRowPanelBytes);
#pragma unroll
    for (int step = begin / 16; step < end / 16; ++step) {
      SumProduct::of_registers(sum, a[4 * step], a[4 * step + 1], a[4 * step + 2], a[4 * step + 3],
                               b + (step * 16 * 128 >> 4));
    }
    ptx::wgmma_commit();
  }

  // Starts q = gradients^T key, over all keys, for a piece. Both operands are walked down their
  // rows: of gradients one panel, the piece's rows; of keys one or half of one, its columns.
  // k-steps of 16 keys are 2048 bytes apart.
  __device__ __forceinline__ void start_piece(int i, Piece& q) const {
    const uint64_t a =
        ptx::matrix_descriptor(shared_address(shared.gradients[last_gradients().stage()]) +
                                   B::piece_rows(warpgroup, i) * B::kKeyPanelBytes,
                               B::kKeyPanelBytes);
    constexpr int kInPanel = 64 / B::kPieceColumns;
    const int column = B::piece_columns(warpgroup, i);
    const uint64_t b =
        ptx::matrix_descriptor(shared_address(shared.key) + column / kInPanel * B::kKeyPanelBytes +
                                   column % kInPanel * (B::kPieceColumns * 2),
                               B::kKeyPanelBytes);
#pragma unroll
    for (int step = 0; step < B::kKeys / 16; ++step) {
      PieceProduct::of_transposed(q, a + (step * 16 * 128 >> 4), b + (step * 16 * 128 >> 4),
                                  step != 0);
    }
    ptx::wgmma_commit();
  }

  // Adds a piece to the sums of an item, where no adder does.
  __device__ __forceinline__ void add_piece(int i, const Item& item, const Piece& q) const {
    const int strip = item.tile * (B::kRows / 16) + B::piece_rows(warpgroup, i) * 4 + warp();
    if (params.query_sums == nullptr || item.head < 0 || strip >= params.strips) return;
    float* const to = params.query_sums + plan().query_sums +
                      (item.head * params.strips + strip) * (16 * D) +
                      B::piece_columns(warpgroup, i) * (16 * B::kPieceColumns);
#pragma unroll
    for (int j = 0; j < B::kPieceColumns / 8; ++j) {
      ptx::add_global_4(to + 128 * j + 4 * lane(),
                        {q[4 * j], q[4 * j + 1], q[4 * j + 2], q[4 * j + 3]});
    }
  }

  // The place of this warp's strip of query sums.
  __device__ __forceinline__ uint32_t strip_place() const {
    return shared_address(shared.moved) + (4 * warpgroup + warp()) * B::kStripBytes;
  }
  // Waits until the adder has read the warpgroup's last strips. There are those of one item more of
  // each unit where the last item's are handed over too.
  __device__ __forceinline__ void wait_for_strips() const {
    const uint32_t strips = count + (params.turns != nullptr ? units : 0);
    wait(shared.strips_empty[warpgroup], (strips & 1) ^ 1);
  }
  // Hands a piece over, in the order of accumulators.
  __device__ __forceinline__ void store_strip(const Piece& q) const {
    const uint32_t to = strip_place() + 16 * lane();
#pragma unroll
    for (int j = 0; j < B::kPieceColumns / 8; ++j) {
      ptx::store_shared_4(to + 512 * j,
                          {__float_as_uint(q[4 * j]), __float_as_uint(q[4 * j + 1]),
                           __float_as_uint(q[4 * j + 2]), __float_as_uint(q[4 * j + 3])});
    }
    release_all_lanes(shared.strips_full[warpgroup]);
  }

  // Of one of the rows' statistics, those of rows 8j + 2 * (lane % 4) and the next.
  __device__ __forceinline__ float2 of_two_rows(const float (&x)[B::kRows], int j) const {
    const uint2 two = ptx::load_shared_2(shared_address(&x[2 * (lane() & 3) + 8 * j]));
    return {__uint_as_float(two.x), __uint_as_float(two.y)};
  }
  // Where registers allow it, what probabilities take of the rows' statistics is read while other
  // things are waited for; so are the first deltas.
  static constexpr bool kReadsAhead = B::kOwnsKeys && !Policy::kEverything;
  static constexpr int kDeltasAhead = kReadsAhead ? 8 : 0;
  struct Terms {
    uint32_t has_references;
    float2 rests[kPartRows / 8];  // of a part
  };
  __device__ __forceinline__ void read_rests(uint32_t at, int part, Terms& terms) const {
#pragma unroll
    for (int j = 0; j < kPartRows / 8; ++j) {
      terms.rests[j] = of_two_rows(shared.rest[at], kPartRows / 8 * part + j);
    }
  }
  // Of the first part, of the rows of stage `at`.
  __device__ __forceinline__ void read_terms(uint32_t at, Terms& terms) const {
    read_rests(at, 0, terms);
    terms.has_references = shared.has_references[at];
  }
  __device__ __forceinline__ void add_references(int part, Logits& s) const {
#pragma unroll
    for (int j = kPartRows / 8 * part; j < kPartRows / 8 * (part + 1); ++j) {
      const float2 two = of_two_rows(shared.reference[stage()], j);
#pragma unroll
      for (int i = 0; i < 4; ++i) s[4 * j + i] += i % 2 == 0 ? two.x : two.y;
    }
  }

  // From products to probabilities, of a part of the rows. A thread has rows 8j + 2 * (lane % 4)
  // and the next, of two keys each. `terms`: if they are read ahead, the part's; then the next's.
  __device__ __forceinline__ void make_probabilities(const Item& item, int part, Terms& terms,
                                                     Logits& s) {
    if constexpr (Policy::kEverything) apply_rules(part, s);
    if (!kReadsAhead) {
      read_rests(stage(), part, terms);
      terms.has_references = shared.has_references[stage()];
    }
    if (terms.has_references != 0) add_references(part, s);
    float* const part_s = s + kPartRows / 2 * part;
#pragma unroll
    for (int i = 0; i < kPartRows / 2; ++i) {
      const float rest = i % 2 == 0 ? terms.rests[i / 4].x : terms.rests[i / 4].y;
      part_s[i] = ptx::ex2(fmaf(part_s[i], exponent, rest));
    }
    if (kReadsAhead && part + 1 < kParts) read_rests(stage(), part + 1, terms);
    // Two branches: with one, ptxas (13.0) finds no registers to leave products under way.
    if (item.tile < plan().whole_begin || item.tile >= plan().whole_end) {
      hide_outside(item, part, s);
    }
  }

  // As rules.cuh has accumulators whose rows are keys: one strip of them.
  template <int kRows>
  using Strip = float[1][kRows / 8][4];
  template <int kRows>
  __device__ __forceinline__ sm80::KeysDownPlace logits_place(int part) const {
    return {{visited(0).item.tile * B::kRows, plan().first_key, kRows * part,
             first_key() + 16 * warp(), sm80::lane_now()}};
  }
  __device__ __forceinline__ bool drops() const {
    return Policy::kEverything && params.problem.dropout_threshold != 0;
  }

  // Products to logits by all rules but ranges, of a part of the rows.
  __device__ __forceinline__ void apply_rules(int part, Logits& s) {
    const sm80::ScaledView& view = shared.rules.views[stage()];
    const auto place = logits_place<kPartRows>(part);
    if (part == 0 && drops()) kept.draw(params.problem, view, place);
    const int checks = uniform(visited(0).checks);
    const sm80::ArrayTiles arrays = wait_for_arrays();
#pragma unroll
    for (float& x : slope) x = 1.f;
    if (checks != 0) {
      sm80::apply_rules<T, Policy, PanelTiles<B::kKeys>>(
          params.problem, view, checks, arrays, place,
          [this](int, int block, int element, float of) { slope[4 * block + element] = of; },
          reinterpret_cast<Strip<kPartRows>&>(s[kPartRows / 2 * part]));
    }
    if (part == kParts - 1) release_arrays();
  }

  // The tiles of bias and mask that are copied, once they have come.
  __device__ __forceinline__ bool has_arrays() const {
    return params.staging.bias_bytes + params.staging.mask_bytes != 0;
  }
  __device__ __forceinline__ uint32_t array_stage() const { return count % B::kArrayStages; }
  __device__ __forceinline__ sm80::ArrayTiles wait_for_arrays() const {
    if (!has_arrays()) return {0, 0};
    wait(shared.rules.arrays_full[array_stage()], count / B::kArrayStages & 1);
    return sm80::array_tiles(params.staging, shared_address(shared.arrays[array_stage()]), 0);
  }
  __device__ __forceinline__ void release_arrays() const {
    if (has_arrays()) release_all_lanes(shared.rules.arrays_empty[array_stage()]);
  }

  // Of a part's probabilities: those that values' sums are made of, but for the factor of those
  // that dropout keeps, and those that wait for g. Rules that are off cost one branch.
  __device__ __forceinline__ void pack_weights(const Logits& p, int part, Operand& a) const {
#pragma unroll
    for (int i = kPartRows / 4 * part; i < kPartRows / 4 * (part + 1); ++i) {
      a[i] = sm80::pack(T(), p[2 * i], p[2 * i + 1]);
    }
    if (!drops()) return;
#pragma unroll
    for (int i = kPartRows / 4 * part; i < kPartRows / 4 * (part + 1); ++i) {
      a[i] &= ~of_dropped(2 * i, 0xffff);
    }
  }
  // Elements i and i + 1 as halves of a word: `bits` in those that dropout has dropped.
  __device__ __forceinline__ uint32_t of_dropped(int i, uint32_t bits) const {
    return (kept.kept(0, i / 4, i % 4) ? 0 : bits) |
           (kept.kept(0, i / 4, i % 4 + 1) ? 0 : bits << 16);
  }
  __device__ __forceinline__ void apply_slopes(int part, Logits& p) const {
    if constexpr (Policy::kEverything) {
      if (params.problem.soft_cap == 0) return;
      // A slope may be a rounding below 0.
#pragma unroll
      for (int i = 0; i < kPartRows / 2; ++i) {
        float& x = p[kPartRows / 2 * part + i];
        x = fabsf(x * slope[i]);
      }
    }
  }
  // Elements 4j .. 4j + 3, negative where dropout has dropped them.
  __device__ __forceinline__ uint2 pack_waiting(const Logits& p, int j) const {
    uint2 two = {ptx::pack_f16(p[4 * j], p[4 * j + 1]), ptx::pack_f16(p[4 * j + 2], p[4 * j + 3])};
    if (drops()) {
      two.x |= of_dropped(4 * j, 0x8000);
      two.y |= of_dropped(4 * j + 2, 0x8000);
    }
    return two;
  }

  // Zeros where a row does not see a key.
  __device__ __forceinline__ void hide_outside(const Item& item, int part, Logits& s) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeyRows seen = plan().key_rows[thread_key() + 8 * half];
      const int row = item.tile * B::kRows + 2 * (lane() & 3) - seen.first;
#pragma unroll
      for (int i = kPartRows / 4 * part; i < kPartRows / 4 * (part + 1); ++i) {
        const uint32_t at = row + 8 * (i / 2) + i % 2;
        if (at >= seen.count) s[4 * (i / 2) + 2 * half + i % 2] = 0.f;
      }
    }
  }

  // g = p (g - delta). p waits for g as f16, which keeps more digits than bf16 and takes half the
  // registers of floats: `p_of(j)` gives two words of elements 4j ..
  // The first deltas are read before `wait_for_products()`.
  template <class POf, class Wait>
  __device__ __forceinline__ void make_gradients(const POf& p_of, const Wait& wait_for_products,
                                                 Logits& g) const {
    const auto& deltas = shared.delta[stage()];
    float2 ahead[kDeltasAhead + 1];
#pragma unroll
    for (int j = 0; j < kDeltasAhead; ++j) ahead[j] = of_two_rows(deltas, j);
    wait_for_products();
    float unshift = kUnshift;
    if constexpr (Policy::kEverything) unshift *= shared.rules.keep_scale;
    if (drops()) {
#pragma unroll
      for (int j = 0; j < kLogits / 4; ++j) {
        const uint2 p = p_of(j);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if ((i < 2 ? p.x : p.y) >> (15 + 16 * (i % 2)) & 1) g[4 * j + i] = 0.f;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kLogits / 4; ++j) {
      const float2 two = j < kDeltasAhead ? ahead[j] : of_two_rows(deltas, j);
      const uint2 p = p_of(j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float delta = i % 2 == 0 ? two.x : two.y;
        const uint32_t word = i < 2 ? p.x : p.y;
        const uint32_t bits = i % 2 == 0 ? word & 0xffff : word >> 16;
        float& x = g[4 * j + i];
        const float p_of_element = sm80::float_of(F16(), bits);
        x = (Policy::kEverything ? fabsf(p_of_element) : p_of_element) * fmaf(x, unshift, -delta);
      }
    }
    if constexpr (Policy::kEverything) {
      if (params.bias_cotangent.data != nullptr) take_bias_cotangent(g);
    }
  }

  // The bias's share of the gradients.
  __device__ __forceinline__ void take_bias_cotangent(const Logits& g) const {
    const sm80::ScaledView& view = shared.rules.views[stage()];
    const auto place = logits_place<B::kRows>(0);
    const auto& strip = reinterpret_cast<const Strip<B::kRows>&>(g);
    if (params.bias_sums) {
      sm80::add_bias_cotangent(params.problem, params.bias_cotangent, view, place, strip);
    } else {
      sm80::store_bias_cotangent(params.problem, params.bias_cotangent, view, place, strip);
    }
  }

  // From elements 4j .. 4j + 3 of accumulators, columns 8j .. of rows lane / 4 (+ 8), to what the
  // product wants of its operand a of 16 columns: the same elements, of one row and two columns a
  // word.
  static __device__ __forceinline__ void pack(const Logits& x, Operand& a) {
#pragma unroll
    for (int i = 0; i < kLogits / 2; ++i) a[i] = sm80::pack(T(), x[2 * i], x[2 * i + 1]);
  }

  // An operand, as [key][row] in shared memory, for products of all warpgroups. Words 4k .. 4k + 3
  // are fragments of four 8x8 matrices: keys + 0, + 8 of rows 16k .., then of rows 16k + 8 ..
  // A lane gives the address of one of their rows: key lane % 16, 16-byte chunk 2k + lane / 16 of
  // its 128 bytes, which the permutation has at that, exclusive or key % 8.
  __device__ __forceinline__ void store_gradients(const Operand& a, Ring<2> to) const {
    wait(shared.gradients_empty[to.stage()], to.parity() ^ 1);
    const int key = first_key() + 16 * warp() + (lane() & 15);
    const uint32_t at = shared_address(shared.gradients[to.stage()]) + key * 128 +
                        (((lane() >> 4) ^ (lane() & 7)) << 4);
#pragma unroll
    for (int step = 0; step < B::kRows / 16; ++step) {
      ptx::stmatrix_x4((at + step / 4 * B::kKeyPanelBytes) ^ (step % 4 << 5), a[4 * step],
                       a[4 * step + 1], a[4 * step + 2], a[4 * step + 3]);
    }
    release_all_lanes(shared.gradients_full[to.stage()]);
  }
  // What the product before the first item's is of.
  __device__ __forceinline__ void store_no_gradients() const {
    Operand zeros;
#pragma unroll
    for (int i = 0; i < kLogits / 2; ++i) zeros[i] = 0;
    store_gradients(zeros, last_gradients());
  }

  // The query sums of the last item, after which keys are not needed any more. Threads add them
  // themselves, unless the order counts: the next unit's would wait for bulk copies.
  __device__ __forceinline__ void finish_pieces() {
    Piece q[B::kPieces];
    count = uniform(count);
    wait_for_gradients();
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < B::kPieces; ++i) start_piece(i, q[i]);
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < B::kPieces; ++i) ptx::pin_registers(q[i]);
    release_gradients();
    release(shared.keys_empty);
    if (B::kOwnsKeys && params.turns != nullptr) {
      wait_for_strips();
      store_strip(q[0]);
    } else if (items.heads > 0) {
#pragma unroll
      for (int i = 0; i < B::kPieces; ++i) add_piece(i, last_item(), q[i]);
    }
  }

  static __device__ __forceinline__ void clear(Sum& sum) {
#pragma unroll
    for (int i = 0; i < D / 2; ++i) sum[i] = 0.f;
  }

  // Stores a warpgroup's sums to rows of a cotangent.
  __device__ __forceinline__ void store(const Sum& sum, float scale, const Tensor& cotangent,
                                        int64_t offset, int64_t columns) const {
    if (cotangent.data == nullptr) return;
    const int quad_lane = threadIdx.x & 3;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t key = plan().first_key + thread_key() + 8 * half;
      auto* const to = static_cast<typename T::Bits*>(cotangent.data) + offset +
                       key * cotangent.row + 8 * quad_lane;
      // From words of columns 8j + 2 * lane, + 1 to eight neighbours 32j + 8 * lane ..
#pragma unroll
      for (int j = 0; j < D / 32; ++j) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* const x = &sum[16 * j + 4 * i + 2 * half];
          words[i] = sm80::pack(T(), x[0] * scale, x[1] * scale);
        }
        const uint4 neighbours = sm80::transpose_quad(words);
        if (key < params.problem.key_length && 32 * j + 8 * quad_lane < columns) {
          ptx::store_global_4(to + 32 * j, neighbours);
        }
      }
    }
  }
  __device__ __forceinline__ void store_key(Sum& sum) const {
    float scale = plan().scale;
    if (!(fabsf(scale) <= FLT_MAX)) {  // what nothing was added to stays 0 even so
#pragma unroll
      for (float& x : sum) x = x == 0.f ? 0.f : x * scale;
      scale = 1.f;
    }
    store(sum, scale, params.key_cotangent, plan().key_cotangent, params.problem.head_dim);
  }
  __device__ __forceinline__ void store_value(const Sum& sum) const {
    float unshift = kUnshift;
    if constexpr (Policy::kEverything) unshift *= shared.rules.keep_scale;
    store(sum, unshift, params.value_cotangent, plan().value_cotangent, params.problem.value_dim);
  }

  // Calls `step` with each item, if there are any.
  template <class Step>
  __device__ __forceinline__ void for_each_item(const Step& step) {
    if constexpr (Policy::kEverything) {
      for_each_visible_item(step);
    } else {
      Item item = items.first();
#pragma unroll 1
      for (; item.head < items.heads; item = items.after(item)) {
        count = uniform(count);  // descriptors are made of it, and belong in uniform registers
        step(item);
        ++count;
      }
    }
  }
  // Likewise with those that the reader has found.
  template <class Step>
  __device__ __forceinline__ void for_each_visible_item(const Step& step) {
    if (items.heads == 0) return;
    for (bool last = false; !last;) {
      count = uniform(count);
      wait(shared.rows_ready[stage()], count / B::kStages & 1);
      last = uniform(visited(0).is_last) != 0;
      step({uniform(visited(0).item.head), uniform(visited(0).item.tile)});
      ++count;
    }
  }
};

// A warpgroup that has both sums of its 64 keys.
template <class T, int D, class Policy>
struct KeyOwner : BackwardConsumer<T, D, Policy> {
  using C = BackwardConsumer<T, D, Policy>;
  typename C::Sum key_sum, value_sum;
  // At the beginning of a step the products that its probabilities come of: each starts the next
  // one's, which come while query sums are added.
  typename C::Logits p;
  typename C::Terms terms;  // likewise, if they are read ahead

  // What waits for g: in `words`, or in the place of the warp's strip.
  __device__ __forceinline__ uint32_t place_of_waiting(int j) const {
    return this->strip_place() + (32 * j + this->lane()) * 8;
  }
  __device__ __forceinline__ void let_wait(int part, typename C::Operand& words) {
    this->apply_slopes(part, p);
    constexpr bool kKeepsInRegisters = C::B::kKeepsInRegisters;
    if (!kKeepsInRegisters && part == 0) this->wait_for_strips();
#pragma unroll
    for (int j = C::kPartRows / 8 * part; j < C::kPartRows / 8 * (part + 1); ++j) {
      const uint2 two = this->pack_waiting(p, j);
      if constexpr (kKeepsInRegisters) {
        words[2 * j] = two.x;
        words[2 * j + 1] = two.y;
      } else {
        ptx::store_shared_2(place_of_waiting(j), two);
      }
    }
  }
  __device__ __forceinline__ uint2 waiting_of(const typename C::Operand& words, int j) const {
    if constexpr (C::B::kKeepsInRegisters) return {words[2 * j], words[2 * j + 1]};
    return ptx::load_shared_2(place_of_waiting(j));
  }

  __device__ __forceinline__ void start() {
    if (this->items.heads == 0) return;
    this->wait_for_rows(0);
    if (C::kReadsAhead) this->read_terms(this->stage(), terms);
    ptx::wgmma_fence();
    this->multiply_rows(this->shared.key, this->query(), p);
    ptx::wgmma_wait<0>();
  }

  // After the last item, the product that it starts is of what lies in shared memory, and unused.
  __device__ __forceinline__ void step(const Item& item) {
    typename C::Logits g;
    typename C::Operand p_operand, p_waiting, g_operand;
    typename C::Piece q;
    ptx::pin_registers(p);
    ptx::wgmma_fence();
    this->multiply_rows(this->shared.value, this->cotangent(), g);
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
      this->make_probabilities(item, part, terms, p);
      this->pack_weights(p, part, p_operand);
      let_wait(part, p_waiting);
      ptx::wgmma_fence();
      this->add_rows(p_operand, this->cotangent(), C::kPartRows * part, C::kPartRows * (part + 1),
                     value_sum);
    }
    this->make_gradients([&](int j) { return waiting_of(p_waiting, j); },
                         [&] {
                           ptx::wgmma_wait<C::kParts>();
                           ptx::pin_registers(g);
                         },
                         g);
    C::pack(g, g_operand);
    this->store_gradients(g_operand, this->next_gradients());

    ptx::wgmma_wait<0>();  // done by now; operands leave their registers
    ptx::pin_registers(p_operand);
    ptx::wgmma_fence();
    this->add_rows(g_operand, this->query(), key_sum);
    this->wait_for_gradients();
    ptx::wgmma_fence();
    this->start_piece(0, q);
    if (!this->is_last(item)) this->wait_for_rows(1);
    // Ahead of the query sums, behind whose stores reading would queue.
    if (C::kReadsAhead) this->read_terms(this->next_stage(), terms);
    ptx::wgmma_wait<1>();
    ptx::pin_registers(g_operand);
    this->release_rows();
    ptx::wgmma_fence();
    this->multiply_rows(this->shared.key, this->next_query(), p);
    ptx::wgmma_wait<1>();
    ptx::pin_registers(q);
    this->release_gradients();
    if (C::B::kKeepsInRegisters) this->wait_for_strips();
    this->store_strip(q);
    ptx::wgmma_wait<0>();
  }

  __device__ __forceinline__ void run_unit() {
    C::clear(key_sum);
    C::clear(value_sum);
    this->store_no_gradients();
    start();
    this->for_each_item([&](const Item& item) { step(item); });
    this->finish_pieces();
    this->store_value(value_sum);
    this->store_key(key_sum);
  }
};

// A warpgroup that has one of the sums of 64 keys: the values' (the first) or the keys'.
template <class T, int D, class Policy, bool kOfValues>
struct SumOwner : BackwardConsumer<T, D, Policy> {
  using C = BackwardConsumer<T, D, Policy>;
  typename C::Sum sum;

  // Probabilities, from thread to thread. Elements 4j .. 4j + 3 of all threads lie side by side.
  __device__ __forceinline__ uint32_t passed(int j) const {
    return shared_address(this->shared.moved) + (j * 128 + this->thread) * 8;
  }
  __device__ __forceinline__ void pass(const typename C::Logits& p, int part) const {
    if (part == 0) wait(this->shared.passed_empty, (this->count & 1) ^ 1);
#pragma unroll
    for (int j = C::kPartRows / 8 * part; j < C::kPartRows / 8 * (part + 1); ++j) {
      ptx::store_shared_2(passed(j), this->pack_waiting(p, j));
    }
    if (part == C::kParts - 1) this->release_all_lanes(this->shared.passed_full);
  }
  __device__ __forceinline__ void take_gradients(typename C::Logits& g) const {
    wait(this->shared.passed_full, this->count & 1);
    this->make_gradients([&](int j) { return ptx::load_shared_2(passed(j)); }, [] {}, g);
    this->release_all_lanes(this->shared.passed_empty);
  }

  __device__ __forceinline__ void step(const Item& item) {
    typename C::Operand operand;
    typename C::Piece first, second;
    this->wait_for_rows(0);
    this->wait_for_gradients();
    ptx::wgmma_fence();
    if constexpr (kOfValues) {
      typename C::Logits p;
      this->multiply_rows(this->shared.key, this->query(), p);
      this->start_piece(0, first);
      ptx::wgmma_wait<1>();
      ptx::pin_registers(p);
#pragma unroll
      for (int part = 0; part < C::kParts; ++part) {
        typename C::Terms terms;
        this->make_probabilities(item, part, terms, p);
        this->pack_weights(p, part, operand);
        this->apply_slopes(part, p);
        pass(p, part);
      }
    } else {
      typename C::Logits g;
      this->multiply_rows(this->shared.value, this->cotangent(), g);
      this->start_piece(0, first);
      ptx::wgmma_wait<1>();
      ptx::pin_registers(g);
      take_gradients(g);
      C::pack(g, operand);
      this->store_gradients(operand, this->next_gradients());
    }
    ptx::wgmma_fence();
    this->add_rows(operand, kOfValues ? this->cotangent() : this->query(), sum);
    ptx::wgmma_wait<1>();
    ptx::pin_registers(first);
    this->add_piece(0, this->item_before(item), first);
    ptx::wgmma_fence();
    this->start_piece(1, second);
    ptx::wgmma_wait<1>();
    ptx::pin_registers(operand);
    this->release_rows();
    ptx::wgmma_wait<0>();
    ptx::pin_registers(second);
    this->release_gradients();
    this->add_piece(1, this->item_before(item), second);
  }

  __device__ __forceinline__ void run_unit() {
    C::clear(sum);
    if (!kOfValues) this->store_no_gradients();
    this->for_each_item([&](const Item& item) { step(item); });
    this->finish_pieces();
    kOfValues ? this->store_value(sum) : this->store_key(sum);
  }
};

// Units of a consumer warpgroup. A new object for each: no register is kept from one to the next.
template <class Consumer, class Params, class Shared>
__device__ __forceinline__ void run_units(const Params& params, Shared& shared, int warpgroup) {
  uint32_t count = 0;
#pragma unroll 1
  for (uint32_t units = 0;; ++units) {
    Consumer consumer = {{params, shared, warpgroup, count, units}};
    if (!consumer.begin_unit()) return;
    consumer.run_unit();
    consumer.end_unit();
    count = consumer.count;
  }
}

template <class T, int D, class Policy>
__global__ void __launch_bounds__(Backward<T, D, Policy>::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams params) {
  using B = Backward<T, D, Policy>;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename B::Shared*>(memory);

  if (threadIdx.x == 0) {
    const auto init = [](uint64_t& barrier, int arrivals) {
      ptx::mbarrier_init(shared_address(&barrier), arrivals);
    };
    for (int plan = 0; plan < B::kPlans; ++plan) {
      init(shared.plan_full[plan], 1);
      init(shared.plan_empty[plan], B::kPlanReaders);
    }
    init(shared.keys_landed, 1);
    init(shared.keys_empty, B::kWarps + 1);
    for (int stage = 0; stage < B::kStages; ++stage) {
      init(shared.rows_landed[stage], 1);
      init(shared.rows_ready[stage], 1);
      init(shared.rows_empty[stage], B::kWarps);
    }
    for (int stage = 0; stage < 2; ++stage) {
      init(shared.gradients_full[stage], B::kGradientWarps);
      init(shared.gradients_empty[stage], B::kWarps);
      init(shared.strips_full[stage], 4);
      init(shared.strips_empty[stage], 1);
    }
    init(shared.passed_full, B::kWarps / 2);
    init(shared.passed_empty, B::kWarps / 2);
    if constexpr (Policy::kEverything) {
      for (int stage = 0; stage < B::kArrayStages; ++stage) {
        init(shared.rules.arrays_full[stage], 1);
        init(shared.rules.arrays_empty[stage], B::kArrayWarps);
      }
    }
    if constexpr (Policy::kEverything) {
      shared.rules.keep_scale =
          static_cast<float>(dropout_keep_scale(params.problem.dropout_threshold));
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // all threads wait for the barriers

  const int warp = uniform(threadIdx.x / 32);
  if (warp < 4) {
    ptx::give_registers<B::kProducerRegisters>();
    if (warp == 0) BackwardLoader<T, D, Policy>{params, shared}.run();
    if (warp == 1) BackwardReader<T, D, Policy>{params, shared}.run();
    if (B::kOwnsKeys && warp >= 2) BackwardAdder<T, D, Policy>{params, shared, warp - 2}.run();
  } else {
    ptx::take_registers<B::kConsumerRegisters>();
    if constexpr (B::kOwnsKeys) {
      run_units<KeyOwner<T, D, Policy>>(params, shared, warp / 4 - 1);
    } else if (warp < 8) {
      run_units<SumOwner<T, D, Policy, true>>(params, shared, 0);
    } else {
      run_units<SumOwner<T, D, Policy, false>>(params, shared, 1);
    }
  }
}

}  // namespace jaxflash::cuda::sm90
