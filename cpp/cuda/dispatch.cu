// From a problem to the kernels that take it.
#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/common/launch.cuh"
#include "cuda/launch.h"
#include "cuda/sm80/kernels.cuh"
#include "cuda/sm80/tiles.h"
#include "cuda/sm90/kernels.cuh"
#include "cuda/sm90/tiles.h"

namespace jaxflash::cuda {
namespace {

struct Kernel {
  DType dtype;
  int dim;
  bool everything;
  decltype(&sm80::launch_forward<sm80::BF16, 64, sm80::Ranges>) forward;
  decltype(&sm80::launch_backward<sm80::BF16, 64, sm80::Ranges>) backward;
};

constexpr Kernel kKernels[] = {
#define JAXFLASH_KERNEL(T, D, Policy)                                                             \
  {sm80::T::kDType, D, sm80::Policy::kEverything, sm80::launch_forward<sm80::T, D, sm80::Policy>, \
   sm80::launch_backward<sm80::T, D, sm80::Policy>},
#include "cuda/sm80/kernels.inc"
#undef JAXFLASH_KERNEL
};

struct HopperKernel {
  DType dtype;
  int dim;
  int value_dim;
  sm90::Reach reach;
  bool everything;
  Error (*forward)(sm90::ForwardParams, Cursor&, bool, Stream);
};

// Smaller ones first; the last entry ends the list, which may have no other.
constexpr HopperKernel kHopperKernels[] = {
#define JAXFLASH_KERNEL(T, D, V, REACH, POLICY) \
  {sm90::T::kDType,                             \
   D,                                           \
   V,                                           \
   sm90::Reach::REACH,                          \
   sm90::POLICY::kEverything,                   \
   sm90::launch_forward<sm90::T, D, V, sm90::Reach::REACH, sm90::POLICY>},
#include "cuda/sm90/kernels.inc"
#undef JAXFLASH_KERNEL
    {},
};

struct HopperBackwardKernel {
  DType dtype;
  int dim;
  bool everything;
  bool takes_turns;  // where gradients must be deterministic
  Error (*backward)(sm90::BackwardParams, sm80::QueryFinishParams, sm80::BiasFinishParams, Cursor&,
                    bool, Stream);
};

// Likewise.
constexpr HopperBackwardKernel kHopperBackwardKernels[] = {
#define JAXFLASH_KERNEL(T, D, POLICY)                                \
  {sm90::T::kDType, D, sm90::POLICY::kEverything,                    \
   !sm90::POLICY::kEverything && sm90::backward_tile(D).owns_keys(), \
   sm90::launch_backward<sm90::T, D, sm90::POLICY>},
#include "cuda/sm90/backward_kernels.inc"
#undef JAXFLASH_KERNEL
    {},
};

// Sinks are in the statistics already, when probabilities are computed again from them.
bool gradients_need_everything(const Problem& problem) {
  return problem.bias.data != nullptr || problem.mask.data != nullptr ||
         problem.query_segment_ids.data != nullptr || problem.soft_cap != 0 ||
         problem.dropout_threshold != 0;
}
bool needs_everything(const Problem& problem) {
  return gradients_need_everything(problem) || problem.sinks.data != nullptr;
}

// The kernels with the least padding that do what the problem needs; nullptr if there are none.
const Kernel* find_kernel(const Problem& problem) {
  const bool everything = needs_everything(problem);
  const int64_t dim = std::max(problem.head_dim, problem.value_dim);
  const Kernel* best = nullptr;
  for (const Kernel& kernel : kKernels) {
    if (kernel.dtype != problem.query.dtype || kernel.dim < dim) continue;
    if (everything && !kernel.everything) continue;
    const bool better = best == nullptr || kernel.dim < best->dim ||
                        (kernel.dim == best->dim && !kernel.everything);
    if (better) best = &kernel;
  }
  return best;
}

constexpr int64_t kLongest = 1 << 30;  // of a Hopper kernel's queries and keys

// About how many keys a row sees, as far as windows tell.
int64_t keys_seen(const Problem& problem) {
  const int64_t left = problem.window_left, right = problem.window_right;
  const bool bounded_left = left != kUnlimited, bounded_right = right != kUnlimited;
  if (bounded_left && bounded_right) return std::min(left + right + 1, problem.key_length);
  return bounded_left || bounded_right ? problem.key_length / 2 : problem.key_length;
}

// The Hopper kernel for a problem, as far as sizes and which operands there are tell; nullptr where
// the portable one is to run: where there are no keys, too many, or so few rows that keys are dealt
// to several blocks.
const HopperKernel* find_hopper_kernel(const Problem& problem) {
  const bool empty = problem.key_length == 0;
  const bool huge = problem.query_length > kLongest || problem.key_length > kLongest;
  const int64_t tiles = problem.batches * problem.query_heads * tiles_of(problem.query_length, 128);
  const bool split = tiles < 128 && problem.key_length >= 2048;
  if (empty || huge || split) return nullptr;
  const bool everything = needs_everything(problem);
  const bool is_short = keys_seen(problem) <= sm90::kShortKeys;
  for (const HopperKernel& kernel : kHopperKernels) {
    const bool fits = kernel.forward != nullptr && kernel.dtype == problem.query.dtype &&
                      kernel.dim >= problem.head_dim && kernel.value_dim >= problem.value_dim;
    const bool reaches = is_short || kernel.reach == sm90::Reach::kLong;
    if (fits && reaches && kernel.everything == everything) return &kernel;
  }
  return nullptr;
}

// The Hopper kernel for a problem's gradients, likewise. It wants blocks for half of a GPU, and
// keys of their own for each batch. It has no gradient of a bias beside a soft cap: the gradients
// of logits that it computes are those before the cap, and the bias is added after it. Not all
// kernels can make deterministic ones.
const HopperBackwardKernel* find_hopper_backward(const Problem& problem,
                                                 const BackwardResults& results) {
  const int64_t dim = std::max(problem.head_dim, problem.value_dim);
  const bool empty = problem.query_length == 0 || problem.key_length == 0;
  const bool huge = problem.query_length > kLongest || problem.key_length > kLongest;
  const int64_t tiles = problem.batches * problem.key_heads * tiles_of(problem.key_length, 128);
  const int64_t group = problem.query_heads / std::max<int64_t>(problem.key_heads, 1);
  const bool split = tiles < 64 && problem.query_length * group >= 2048;
  bool summed = false;
  for (int at = 0; at < problem.batch_rank; ++at) {
    for (const Tensor* const cotangent : {&results.key, &results.value}) {
      summed |=
          cotangent->data != nullptr && cotangent->batch[at] == 0 && problem.batch_size[at] > 1;
    }
  }
  const bool capped_bias = results.bias.data != nullptr && problem.soft_cap != 0;
  if (capped_bias || summed || empty || huge || split) return nullptr;
  const bool everything = gradients_need_everything(problem);
  for (const HopperBackwardKernel& kernel : kHopperBackwardKernels) {
    const bool fits = kernel.backward != nullptr && kernel.dtype == problem.query.dtype &&
                      kernel.dim >= dim && kernel.everything == everything;
    if (fits) return kernel.takes_turns || !results.deterministic ? &kernel : nullptr;
  }
  return nullptr;
}

// Whether the tensor memory accelerator can read the operands.
bool can_map(const Problem& problem) {
  return sm90::can_map(problem.query, problem.head_dim) &&
         sm90::can_map(problem.key, problem.head_dim) &&
         sm90::can_map(problem.value, problem.value_dim);
}

// Whether gradients of keys and values take 16-byte stores.
bool can_store(const Problem& problem, const BackwardResults& results) {
  const auto can = [](const Tensor& result, int64_t columns) {
    return result.data == nullptr || sm90::can_map(result, columns);
  };
  return can(results.key, problem.head_dim) && can(results.value, problem.value_dim);
}

// Whether the current device runs code for compute_90a.
bool is_hopper() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major == 9;
}

// A bias of float64 is none of theirs: whoever calls converts it.
Error refusal(const Problem& problem) {
  const bool wide = problem.bias.data != nullptr && problem.bias.dtype == DType::kF64;
  return wide ? "jaxflash: the bias is float64; CUDA kernels take bfloat16, float16 and float32"
              : nullptr;
}

constexpr Error kUnsupported =
    "jaxflash: no CUDA kernel for this dtype and head dim; there are "
#define JAXFLASH_KERNEL(T, D, Policy) #T " " #D " (" #Policy "), "
#include "cuda/sm80/kernels.inc"
#undef JAXFLASH_KERNEL
    "each for head dims up to its own";

sm80::ForwardParams forward_params(const Problem& problem, const ForwardResults& results,
                                   Precision precision) {
  sm80::ForwardParams params;
  const int64_t size = problem.query.dtype == DType::kF32 ? 4 : 2;
  params.problem = problem;
  params.output = results.output;
  params.statistics = results.statistics;
  params.vectors = {allows_vectors(problem.query, problem.head_dim, size),
                    allows_vectors(problem.key, problem.head_dim, size),
                    allows_vectors(problem.value, problem.value_dim, size),
                    allows_vectors(results.output, problem.value_dim, size)};
  params.precise = precision == Precision::kFloat;
  params.group = static_cast<int>(problem.query_heads / problem.key_heads);
  return params;
}

sm90::ForwardParams hopper_params(const Problem& problem, const ForwardResults& results) {
  sm90::ForwardParams params = {};
  params.problem = problem;
  params.output = results.output;
  params.statistics = results.statistics;
  return params;
}

bool is_broadcast(const Problem& problem, const Tensor& bias) {
  bool broadcast = (bias.head == 0 && problem.query_heads > 1) ||
                   (bias.row == 0 && problem.query_length > 1) ||
                   (bias.column == 0 && problem.key_length > 1);
  for (int dim = 0; dim < problem.batch_rank; ++dim) {
    broadcast |= bias.batch[dim] == 0 && problem.batch_size[dim] > 1;
  }
  return broadcast;
}

// Whether the cotangent of the bias is wanted, and added up.
bool sums_bias(const Problem& problem, const BackwardResults& results) {
  return results.bias.data != nullptr && is_broadcast(problem, results.bias);
}

sm90::BackwardParams hopper_params(const Problem& problem, const BackwardInputs& inputs,
                                   const BackwardResults& results) {
  sm90::BackwardParams params = {};
  params.problem = problem;
  params.output_cotangent = inputs.output_cotangent;
  params.statistics = inputs.statistics;
  params.delta = inputs.delta;
  params.key_cotangent = results.key;
  params.value_cotangent = results.value;
  params.bias_cotangent = results.bias;
  params.bias_sums = sums_bias(problem, results);
  params.deterministic = results.deterministic;
  return params;
}

sm80::BackwardParams backward_params(const Problem& problem, const BackwardInputs& inputs,
                                     const BackwardResults& results, Precision precision) {
  sm80::BackwardParams params;
  const int64_t size = problem.query.dtype == DType::kF32 ? 4 : 2;
  params.problem = problem;
  params.output_cotangent = inputs.output_cotangent;
  params.statistics = inputs.statistics;
  params.delta = inputs.delta;
  params.key_cotangent = results.key;
  params.value_cotangent = results.value;
  params.bias_cotangent = results.bias;
  params.bias_sums = sums_bias(problem, results);
  params.vectors = {allows_vectors(problem.query, problem.head_dim, size),
                    allows_vectors(problem.key, problem.head_dim, size),
                    allows_vectors(problem.value, problem.value_dim, size),
                    allows_vectors(inputs.output_cotangent, problem.value_dim, size)};
  params.vector_key_cotangent = allows_vectors(results.key, problem.head_dim, size);
  params.vector_value_cotangent = allows_vectors(results.value, problem.value_dim, size);
  params.precise = precision == Precision::kFloat;
  const Tensor& cotangent = results.key.data != nullptr ? results.key : results.value;
  for (int dim = 0; dim < problem.batch_rank; ++dim) {
    params.summed[dim] = cotangent.data != nullptr && cotangent.batch[dim] == 0;
    if (params.summed[dim]) params.repeats *= problem.batch_size[dim];
  }
  if (problem.batches == 0) params.repeats = 1;
  params.group = static_cast<int>(problem.query_heads / problem.key_heads);
  params.heads = static_cast<int>(params.repeats) * params.group;
  return params;
}

sm80::QueryFinishParams finish_params(const Problem& problem, const BackwardResults& results) {
  sm80::QueryFinishParams params;
  params.problem = problem;
  params.query_cotangent = results.query;
  params.scale_cotangent = results.scale;
  params.vectors =
      allows_vectors(results.query, problem.head_dim, problem.query.dtype == DType::kF32 ? 4 : 2);
  return params;
}

sm80::BiasFinishParams bias_params(const Problem& problem, const BackwardResults& results) {
  sm80::BiasFinishParams params;
  params.cotangent = results.bias;
  if (results.bias.data == nullptr) return params;
  params.elements = (results.bias.head == 0 ? 1 : problem.query_heads) *
                    (results.bias.row == 0 ? 1 : problem.query_length) *
                    (results.bias.column == 0 ? 1 : problem.key_length);
  for (int dim = 0; dim < problem.batch_rank; ++dim) {
    if (results.bias.batch[dim] != 0) params.elements *= problem.batch_size[dim];
  }
  return params;
}

// The most that a call takes as code for any architecture: tiles differ in two kinds.
template <class Count>
size_t most_bytes(const Count& count) {
  size_t most = 0;
  for (const int arch : {80, 90}) {
    Cursor cursor({});
    count(cursor, arch);
    most = std::max(most, cursor.used());
  }
  return most;
}

// A kernel in words.
std::string in_words(const char* family, bool everything, int rows, int keys) {
  return std::string(family) + ", " + (everything ? "all rules" : "ranges of keys") +
         ", tiles of " + std::to_string(rows) + " queries and " + std::to_string(keys) + " keys";
}
constexpr char kHopper[] = "Hopper kernel (wgmma)", kPortable[] = "portable kernel (mma.sync)";

}  // namespace

size_t forward_workspace_bytes(const Problem& problem) {
  const Kernel* const kernel = find_kernel(problem);
  if (kernel == nullptr) return 0;
  const size_t portable = most_bytes([&](Cursor& cursor, int arch) {
    kernel->forward(forward_params(problem, {}, Precision::kFloat), cursor, false, arch, nullptr);
  });
  const HopperKernel* const hopper = find_hopper_kernel(problem);
  if (hopper == nullptr) return portable;
  Cursor cursor({});
  hopper->forward(hopper_params(problem, {}), cursor, false, nullptr);
  return std::max(portable, cursor.used());
}

size_t backward_workspace_bytes(const Problem& problem, const BackwardResults& results) {
  const Kernel* const kernel = find_kernel(problem);
  if (kernel == nullptr) return 0;
  const size_t portable = most_bytes([&](Cursor& cursor, int arch) {
    kernel->backward(backward_params(problem, {}, results, Precision::kFloat),
                     finish_params(problem, results), bias_params(problem, results),
                     results.deterministic, cursor, false, arch, nullptr);
  });
  const HopperBackwardKernel* const hopper = find_hopper_backward(problem, results);
  if (hopper == nullptr) return portable;
  Cursor cursor({});
  hopper->backward(hopper_params(problem, {}, results), finish_params(problem, results),
                   bias_params(problem, results), cursor, false, nullptr);
  return std::max(portable, cursor.used());
}

std::string forward_kernel(const Problem& problem, int capability) {
  const HopperKernel* const hopper = find_hopper_kernel(problem);
  if (hopper != nullptr && capability / 10 == 9 && can_map(problem)) {
    const sm90::ForwardTile tile =
        hopper->everything ? sm90::everything_tile(hopper->dim, hopper->value_dim)
                           : sm90::forward_tile(hopper->dim, hopper->value_dim, hopper->reach);
    return in_words(kHopper, hopper->everything, tile.rows(), tile.keys);
  }
  const Kernel* const kernel = find_kernel(problem);
  if (kernel == nullptr || capability < 80) return "";
  const sm80::ForwardTile tile =
      sm80::forward_tile(kernel->dtype == DType::kF32, kernel->dim, kernel->everything, capability);
  return in_words(kPortable, kernel->everything, tile.rows(), tile.keys);
}

std::string backward_kernel(const Problem& problem, const BackwardResults& results,
                            int capability) {
  const HopperBackwardKernel* const hopper = find_hopper_backward(problem, results);
  if (hopper != nullptr && capability / 10 == 9 && can_map(problem) &&
      can_store(problem, results)) {
    const sm90::BackwardTile tile = hopper->everything ? sm90::everything_backward_tile(hopper->dim)
                                                       : sm90::backward_tile(hopper->dim);
    return in_words(kHopper, hopper->everything, tile.rows, tile.keys);
  }
  const Kernel* const kernel = find_kernel(problem);
  if (kernel == nullptr || capability < 80) return "";
  const sm80::BackwardTile tile = sm80::backward_tile(kernel->dtype == DType::kF32, kernel->dim,
                                                      kernel->everything, capability);
  return in_words(kPortable, kernel->everything, tile.rows, tile.keys);
}

Error forward(const Problem& problem, const ForwardResults& results, Precision precision,
              Stream stream) {
  if (const Error error = refusal(problem)) return error;
  const Kernel* const kernel = find_kernel(problem);
  if (kernel == nullptr) return kUnsupported;
  Cursor cursor(results.workspace);
  const HopperKernel* const hopper = find_hopper_kernel(problem);
  if (hopper != nullptr && is_hopper() && can_map(problem) &&
      sm90::can_map(results.output, problem.value_dim)) {
    return hopper->forward(hopper_params(problem, results), cursor, true, stream);
  }
  return kernel->forward(forward_params(problem, results, precision), cursor, true, 0, stream);
}

Error backward(const Problem& problem, const BackwardInputs& inputs, const BackwardResults& results,
               Precision precision, Stream stream) {
  if (const Error error = refusal(problem)) return error;
  const Kernel* const kernel = find_kernel(problem);
  if (kernel == nullptr) return kUnsupported;
  Cursor cursor(results.workspace);
  const HopperBackwardKernel* const hopper = find_hopper_backward(problem, results);
  if (hopper != nullptr && is_hopper() && can_map(problem) &&
      sm90::can_map(inputs.output_cotangent, problem.value_dim) && can_store(problem, results)) {
    return hopper->backward(hopper_params(problem, inputs, results),
                            finish_params(problem, results), bias_params(problem, results), cursor,
                            true, stream);
  }
  return kernel->backward(backward_params(problem, inputs, results, precision),
                          finish_params(problem, results), bias_params(problem, results),
                          results.deterministic, cursor, true, 0, stream);
}

}  // namespace jaxflash::cuda
