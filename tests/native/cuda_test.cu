// Compares the CUDA kernels with the CPU kernels, which take the same problems: odd shapes, every
// dtype and feature; and times them.
//
//   cuda_test                      all cases; a line for each that is wrong
//   cuda_test case SUBSTRING       those whose name contains it, with all errors
//   cuda_test time [MODE]          TFLOP/s, 16384 tokens, hidden 2048
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "attention/problem.h"
#include "attention/visibility.h"
#include "cpu/kernels.h"
#include "cpu/launch.h"
#include "cuda/launch.h"

namespace jaxflash {
namespace {

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

class Threads final : public cpu::Executor {
 public:
  ~Threads() override {
    for (std::thread& thread : threads_) thread.join();
  }
  int64_t thread_count() const override { return std::thread::hardware_concurrency(); }
  void schedule(std::function<void()> work) override { threads_.emplace_back(std::move(work)); }

 private:
  std::vector<std::thread> threads_;
};

int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 8;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kBool:
      return 1;
    default:
      return 4;
  }
}

uint16_t bf16_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Normal numbers (zero below 2^-14), infinity and NaN.
uint16_t f16_bits(float x) {
  if (x != x) return 0x7e00;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float a = std::fabs(x);
  if (a < 6.2e-5f) return sign;
  if (a >= 65520.f) return sign | 0x7c00;
  int exponent;
  const float mantissa = std::frexp(a, &exponent);
  return sign | static_cast<uint16_t>(((exponent + 14) << 10) +
                                      static_cast<int>(std::nearbyint((mantissa * 2 - 1) * 1024)));
}

double value_of(DType dtype, const unsigned char* from) {
  if (dtype == DType::kF32) {
    float x;
    std::memcpy(&x, from, 4);
    return x;
  }
  if (dtype == DType::kF64) {
    double x;
    std::memcpy(&x, from, 8);
    return x;
  }
  uint16_t bits;
  std::memcpy(&bits, from, 2);
  const int mantissa_bits = dtype == DType::kBF16 ? 7 : 10;
  const int mask = 0x7fff >> mantissa_bits;
  const int exponent = (bits & 0x7fff) >> mantissa_bits,
            mantissa = bits & ((1 << mantissa_bits) - 1);
  double magnitude =
      std::ldexp(mantissa + (1 << mantissa_bits), exponent - mask / 2 - mantissa_bits);
  if (exponent == 0) magnitude = std::ldexp(mantissa, 1 - mask / 2 - mantissa_bits);
  if (exponent == mask) magnitude = mantissa ? NAN : INFINITY;
  return bits & 0x8000 ? -magnitude : magnitude;
}

// A dense array [*B, rows, heads, columns] or, as bias and mask, [*B, heads, rows, columns]; sizes
// of 1 that stand for more are broadcast.
struct Array {
  Tensor tensor;
  std::vector<unsigned char> bytes;
  void* device = nullptr;

  Array() = default;
  Array(const Array&) = delete;
  Array& operator=(Array&& other) {
    std::swap(tensor, other.tensor);
    std::swap(bytes, other.bytes);
    std::swap(device, other.device);
    return *this;
  }
  Array(DType dtype, std::vector<int64_t> batch, int64_t rows, int64_t heads, int64_t columns,
        bool heads_first = false) {
    tensor.dtype = dtype;
    int64_t stride = columns;
    tensor.column = columns == 1 && heads_first ? 0 : 1;
    if (heads_first) {
      tensor.row = rows == 1 ? 0 : stride;
      stride *= rows;
      tensor.head = heads == 1 ? 0 : stride;
      stride *= heads;
    } else {
      tensor.head = stride;
      stride *= heads;
      tensor.row = stride;
      stride *= rows;
    }
    for (int dim = static_cast<int>(batch.size()) - 1; dim >= 0; --dim) {
      tensor.batch[dim] = batch[dim] == 1 ? 0 : stride;
      stride *= batch[dim];
    }
    bytes.resize(stride * size_of(dtype));
  }
  ~Array() { cudaFree(device); }

  int64_t size() const { return static_cast<int64_t>(bytes.size()) / size_of(tensor.dtype); }
  double get(int64_t i) const { return value_of(tensor.dtype, &bytes[i * size_of(tensor.dtype)]); }
  void set(int64_t i, double x) {
    unsigned char* const to = &bytes[i * size_of(tensor.dtype)];
    const auto put = [&](auto value) { std::memcpy(to, &value, sizeof value); };
    switch (tensor.dtype) {
      case DType::kF64:
        return put(x);
      case DType::kF32:
        return put(static_cast<float>(x));
      case DType::kBF16:
        return put(bf16_bits(static_cast<float>(x)));
      case DType::kF16:
        return put(f16_bits(static_cast<float>(x)));
      case DType::kBool:
        return put(static_cast<uint8_t>(x));
      case DType::kS32:
        return put(static_cast<int32_t>(x));
      case DType::kU32:
        return put(static_cast<uint32_t>(x));
    }
  }
  void fill(const std::function<double()>& next) {
    for (int64_t i = 0; i < size(); ++i) set(i, next());
  }
  Tensor host() {
    bytes.reserve(1);
    Tensor view = tensor;
    view.data = bytes.data();
    return view;
  }
  // With a copy of the bytes in device memory.
  Tensor on_device() {
    if (device == nullptr) check(cudaMalloc(&device, bytes.size() + 256));
    check(cudaMemcpy(device, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
    Tensor view = tensor;
    view.data = device;
    return view;
  }
  void fetch() { check(cudaMemcpy(bytes.data(), device, bytes.size(), cudaMemcpyDeviceToHost)); }
};

struct Case {
  std::string name = "plain";
  DType dtype = DType::kBF16;
  int64_t batch = 2, query_length = 128, key_length = 128, query_heads = 2, key_heads = 2;
  int64_t head_dim = 64, value_dim = 64;
  int64_t inner_batch = 0;  // a second batch dim, along which keys are shared
  bool lengths = false, segments = false, sorted_segments = false, mask = false, sinks = false;
  bool dropout = false, shared_keys = false, deterministic = false;
  DType bias_dtype = DType::kF32;
  std::vector<int64_t> bias;  // sizes batch, head, row, column: 1 or 0 (all of it)
  std::vector<int64_t> mask_shape = {0, 1, 0, 0};
  bool sparse_mask = false;  // whole tiles hidden
  double soft_cap = 0, scale = 0, size = 1;
  int64_t left = kUnlimited, right = kUnlimited;
  int32_t offset = 0;
};

constexpr const char* kNames[] = {"output", "logit_max", "log_sum", "lse",   "d_query",
                                  "d_key",  "d_value",   "d_scale", "d_bias"};

class Run {
 public:
  explicit Run(const Case& c) : c_(c) {
    std::vector<int64_t> batch = {c.batch}, key_batch = {c.shared_keys ? 1 : c.batch};
    if (c.inner_batch > 0) {
      batch.push_back(c.inner_batch);
      key_batch.push_back(1);
    }
    int64_t batches = 1, key_batches = 1;
    for (size_t i = 0; i < batch.size(); ++i) {
      problem_.batch_size[i] = batch[i];
      batches *= batch[i];
      key_batches *= key_batch[i];
    }
    problem_.batch_rank = static_cast<int>(batch.size());
    problem_.batches = batches;
    problem_.query_length = c.query_length;
    problem_.key_length = c.key_length;
    problem_.query_heads = c.query_heads;
    problem_.key_heads = c.key_heads;
    problem_.head_dim = c.head_dim;
    problem_.value_dim = c.value_dim;
    problem_.window_left = c.left;
    problem_.window_right = c.right;
    problem_.soft_cap = c.soft_cap;
    problem_.dropout_threshold = c.dropout ? 20000 : 0;
    const auto t = c.query_length, s = c.key_length, n = c.query_heads, k = c.key_heads;
    query_ = Array(c.dtype, batch, t, n, c.head_dim);
    key_ = Array(c.dtype, key_batch, s, k, c.head_dim);
    value_ = Array(c.dtype, key_batch, s, k, c.value_dim);
    cotangent_ = Array(c.dtype, batch, t, n, c.value_dim);
    delta_ = Array(DType::kF32, batch, t, n, 1);
    const auto normal = [this, &c] { return normal_(engine_) * c.size; };
    for (Array* array : {&query_, &key_, &value_, &cotangent_}) array->fill(normal);
    scale_ = Array(DType::kF32, batch, 1, 1, 1);
    scale_.fill([&] { return c.scale != 0 ? c.scale : 1 / std::sqrt(double(c.head_dim)); });
    const auto pick = [](int64_t choice, int64_t size) { return choice == 0 ? size : 1; };
    if (!c.bias.empty()) {
      bias_ = Array(c.bias_dtype, {pick(c.bias[0], c.batch)}, pick(c.bias[2], t),
                    pick(c.bias[1], n), pick(c.bias[3], s), true);
      bias_.fill([&] { return normal_(engine_); });
    }
    if (c.mask) {
      const auto& shape = c.mask_shape;
      mask_ = Array(DType::kBool, {pick(shape[0], c.batch)}, pick(shape[2], t), pick(shape[1], n),
                    pick(shape[3], s), true);
      mask_.fill([&] { return engine_() % 4 != 0; });
      if (c.sparse_mask) {
        for (int64_t i = 0; i < mask_.size(); ++i) {
          const int64_t row = i / s % t, column = i % s;
          const int64_t kind = (row / 128 * 7 + column / 128) % 3;
          if (kind == 0) mask_.set(i, 0);
          if (kind == 1) mask_.set(i, 1);
        }
      }
    }
    sinks_ = Array(DType::kF32, {1}, 1, n, 1);
    sinks_.fill([&] { return normal_(engine_); });
    query_lengths_ = Array(DType::kS32, batch, 1, 1, 1);
    key_lengths_ = Array(DType::kS32, batch, 1, 1, 1);
    offset_ = Array(DType::kS32, batch, 1, 1, 1);
    offset_.fill([&] { return c.offset; });
    query_ids_ = Array(DType::kS32, batch, t, 1, 1);
    key_ids_ = Array(DType::kS32, batch, s, 1, 1);
    query_ids_.fill([&] { return int(engine_() % 3) - 1; });
    key_ids_.fill([&] { return int(engine_() % 3) - 1; });
    if (c.sorted_segments) {
      for (int64_t i = 0; i < query_ids_.size(); ++i) query_ids_.set(i, i % t * 5 / t);
      for (int64_t i = 0; i < key_ids_.size(); ++i) key_ids_.set(i, i % s * 5 / s);
    }
    stream_ = Array(DType::kU32, batch, 1, n, 4);
    stream_.fill([&] { return engine_(); });
    if (c.lengths) {
      for (int64_t b = 0; b < batches; ++b) {
        const int64_t queries = t * (b + 1) / (batches + 1), keys = s * (b + 1) / batches;
        query_lengths_.set(b, double(queries));
        key_lengths_.set(b, double(keys));
        poison(query_, b, queries, t);
        poison(cotangent_, b, queries, t);
        if (batches == key_batches) {
          poison(key_, b, keys, s);
          poison(value_, b, keys, s);
        }
      }
    }
    output_ = Array(c.dtype, batch, t, n, c.value_dim);
    logit_max_ = Array(DType::kF32, batch, t, n, 1);
    log_sum_ = Array(DType::kF32, batch, t, n, 1);
    lse_ = Array(DType::kF32, batch, t, n, 1);
    d_query_ = Array(c.dtype, batch, t, n, c.head_dim);
    d_key_ = Array(c.dtype, key_batch, s, k, c.head_dim);
    d_value_ = Array(c.dtype, key_batch, s, k, c.value_dim);
    d_scale_ = Array(DType::kF32, batch, t, n, 1);
    workspace_ = Array(DType::kF32, batch, t, n, c.head_dim);
    if (!c.bias.empty()) {
      d_bias_ = Array(c.bias_dtype, {pick(c.bias[0], c.batch)}, pick(c.bias[2], t),
                      pick(c.bias[1], n), pick(c.bias[3], s), true);
    }
  }

  std::vector<std::vector<double>> on_host() {
    const auto at = [](Array& a) { return a.host(); };
    point(at);
    clear();
    const Statistics statistics{logit_max_.host(), log_sum_.host()};
    Threads forward_threads;
    cpu::avx2::kKernels.forward(problem_, {output_.host(), statistics}, forward_threads);
    make_delta();
    cpu::BackwardResults results;
    results.query = d_query_.host();
    results.key = d_key_.host();
    results.value = d_value_.host();
    results.scale = d_scale_.host();
    if (!c_.bias.empty()) results.bias = d_bias_.host();
    results.workspace = workspace_.host();
    results.chunk_stride = workspace_.size();
    Threads threads;
    cpu::avx2::kKernels.backward(problem_, {cotangent_.host(), statistics, delta_.host()}, results,
                                 threads);
    return take();
  }

  // Empty where there is no kernel.
  std::vector<std::vector<double>> on_device(bool backward) {
    const auto at = [](Array& a) { return a.on_device(); };
    point(at);
    clear();
    for (Array* a : results()) a->on_device();
    const Statistics statistics{at(logit_max_), at(log_sum_)};
    const size_t forward_bytes = cuda::forward_workspace_bytes(problem_);
    Memory memory(forward_bytes);
    if (fails(cuda::forward(problem_, {at(output_), statistics, {memory.data, forward_bytes}},
                            cuda::Precision::kFloat, nullptr))) {
      return {};
    }
    check(cudaDeviceSynchronize());
    for (Array* a : {&output_, &logit_max_, &log_sum_}) a->fetch();
    make_delta();
    cuda::BackwardResults results;
    results.query = at(d_query_);
    results.key = at(d_key_);
    results.value = at(d_value_);
    results.scale = at(d_scale_);
    if (!c_.bias.empty()) results.bias = at(d_bias_);
    results.deterministic = c_.deterministic;
    const size_t bytes = cuda::backward_workspace_bytes(problem_, results);
    Memory backward_memory(bytes);
    results.workspace = {backward_memory.data, bytes};
    if (backward) {
      const Statistics fetched{at(logit_max_), at(log_sum_)};
      if (fails(cuda::backward(problem_, {at(cotangent_), fetched, at(delta_)}, results,
                               cuda::Precision::kFloat, nullptr))) {
        return {};
      }
      check(cudaDeviceSynchronize());
      for (Array* a : {&d_query_, &d_key_, &d_value_, &d_scale_, &d_bias_}) {
        if (a->device != nullptr) a->fetch();
      }
    }
    return take();
  }

 private:
  struct Memory {
    void* data = nullptr;
    explicit Memory(size_t bytes) {
      check(cudaMalloc(&data, bytes + 256));
      check(cudaMemset(data, 0xff, bytes + 256));
    }
    ~Memory() { cudaFree(data); }
  };

  bool fails(cuda::Error error) {
    if (error != nullptr && std::strstr(error, "no CUDA kernel") == nullptr) {
      std::printf("%s: %s\n", c_.name.c_str(), error);
    }
    return error != nullptr;
  }

  template <class At>
  void point(const At& at) {
    problem_.query = at(query_);
    problem_.key = at(key_);
    problem_.value = at(value_);
    problem_.scale = at(scale_);
    if (!c_.bias.empty()) problem_.bias = at(bias_);
    if (c_.mask) problem_.mask = at(mask_);
    if (c_.sinks) problem_.sinks = at(sinks_);
    if (c_.offset != 0) problem_.query_offset = at(offset_);
    if (c_.lengths) {
      problem_.query_lengths = at(query_lengths_);
      problem_.key_value_lengths = at(key_lengths_);
    }
    if (c_.segments) {
      problem_.query_segment_ids = at(query_ids_);
      problem_.key_value_segment_ids = at(key_ids_);
    }
    if (c_.dropout) problem_.dropout_stream = at(stream_);
    at(cotangent_);
  }

  std::vector<Array*> results() {
    return {&output_, &logit_max_, &log_sum_, &lse_,   &d_query_,
            &d_key_,  &d_value_,   &d_scale_, &d_bias_};
  }
  void clear() {
    for (Array* a : results()) std::fill(a->bytes.begin(), a->bytes.end(), 0xff);
  }
  std::vector<std::vector<double>> take() {
    for (int64_t i = 0; i < lse_.size(); ++i) lse_.set(i, logit_max_.get(i) + log_sum_.get(i));
    std::vector<std::vector<double>> all;
    for (Array* a : results()) {
      all.emplace_back();
      for (int64_t i = 0; i < a->size(); ++i) all.back().push_back(a->get(i));
    }
    return all;
  }
  // Any numbers do, but 0 where a query sees nothing.
  void make_delta() {
    std::minstd_rand engine(7);
    for (int64_t i = 0; i < delta_.size(); ++i) {
      const double number = static_cast<double>(engine() % 128) / 64 - 1;
      delta_.set(i, std::isinf(logit_max_.get(i)) ? 0 : number);
    }
  }
  static void poison(Array& array, int64_t b, int64_t begin, int64_t end) {
    for (int64_t i = b * end + begin; i < (b + 1) * end; ++i) {
      for (int64_t j = 0; j < array.tensor.row; ++j) array.set(i * array.tensor.row + j, NAN);
    }
  }

  Case c_;
  Problem problem_;
  std::mt19937 engine_{1};
  std::normal_distribution<double> normal_;
  Array query_, key_, value_, cotangent_, delta_, scale_, bias_, mask_, sinks_, query_lengths_,
      key_lengths_, offset_, query_ids_, key_ids_, stream_, output_, logit_max_, log_sum_, lse_,
      d_query_, d_key_, d_value_, d_scale_, workspace_, d_bias_;
};

double tolerance(DType dtype) {
  return dtype == DType::kBF16 ? 0.012 : dtype == DType::kF16 ? 0.002 : 1e-5;
}

// Largest difference, relative to the largest element; NaN where only one of both is.
double difference(const std::vector<double>& a, const std::vector<double>& b) {
  double most = 0, largest = 1e-3;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;
    const double d = std::fabs(a[i] - b[i]);
    if (d != d) return d;
    most = std::max(most, d);
    if (!std::isinf(a[i])) largest = std::max(largest, std::fabs(a[i]));
  }
  return most / largest;
}

// Whether the case is right.
bool test(const Case& c, bool verbose) {
  Run host(c), device(c);
  const auto actual = device.on_device(true);
  if (actual.empty()) return true;
  const auto expected = host.on_host();
  bool right = true;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (i == 1 || i == 2 || expected[i].empty()) continue;  // only their sum is fixed
    const double d = difference(expected[i], actual[i]);
    // f16 and bf16 probabilities round each product of a sum.
    double allowed = tolerance(c.dtype);
    if (i == 8) allowed = std::max(allowed, tolerance(c.bias_dtype));
    if (c.size > 1 && c.dtype == DType::kF32) allowed = 1e-3;  // roundings of the logits
    const bool good = d <= allowed;
    if (!good || verbose) {
      std::printf("%-6s %s %s [B %ld T %ld S %ld N %ld K %ld H %ld Hv %ld]: %.2e\n",
                  good ? "" : "WRONG", c.name.c_str(), kNames[i], c.batch, c.query_length,
                  c.key_length, c.query_heads, c.key_heads, c.head_dim, c.value_dim, d);
    }
    right &= good;
  }
  if (c.deterministic) {
    for (int i = 0; i < 5; ++i) {
      const auto again = Run(c).on_device(true);
      for (size_t j = 0; j < again.size(); ++j) {
        for (size_t e = 0; e < again[j].size(); ++e) {
          if (again[j][e] == actual[j][e] || again[j][e] != again[j][e]) continue;
          std::printf("WRONG  %s %s differs from run to run\n", c.name.c_str(), kNames[j]);
          return false;
        }
      }
    }
  }
  return right;
}

std::vector<Case> cases() {
  std::vector<Case> features(1);
  const auto add = [&](const char* name, const std::function<void(Case&)>& set) {
    Case c;
    c.name = name;
    set(c);
    features.push_back(c);
  };
  add("causal", [](Case& c) { c.right = 0; });
  add("window", [](Case& c) { c.left = 30, c.right = 20, c.offset = -5; });
  add("bottom right", [](Case& c) { c.right = 0, c.offset = 60; });
  add("lengths", [](Case& c) { c.lengths = true; });
  add("lengths causal", [](Case& c) { c.lengths = true, c.right = 0, c.offset = 7; });
  add("negative scale", [](Case& c) { c.scale = -0.2, c.right = 0; });
  add("shared keys", [](Case& c) { c.shared_keys = true, c.right = 0; });
  add("shared keys lengths", [](Case& c) { c.shared_keys = true, c.lengths = true; });
  add("two batch dims", [](Case& c) { c.inner_batch = 3; });
  add("deterministic", [](Case& c) { c.deterministic = true, c.right = 0; });
  add("huge", [](Case& c) { c.size = 30; });
  add("cap", [](Case& c) { c.soft_cap = 2; });
  add("mask", [](Case& c) { c.mask = true; });
  add("mask of heads", [](Case& c) { c.mask = true, c.mask_shape = {1, 0, 0, 0}; });
  add("mask of keys", [](Case& c) { c.mask = true, c.mask_shape = {0, 1, 1, 0}; });
  add("sparse mask", [](Case& c) { c.mask = c.sparse_mask = true; });
  add("segments", [](Case& c) { c.segments = true; });
  add("sorted segments", [](Case& c) { c.segments = c.sorted_segments = true, c.right = 0; });
  add("deterministic segments",
      [](Case& c) { c.segments = c.sorted_segments = c.deterministic = true; });
  add("sinks", [](Case& c) { c.sinks = true, c.lengths = true; });
  add("dropout", [](Case& c) { c.dropout = true; });
  add("dropout causal", [](Case& c) { c.dropout = c.lengths = true, c.right = 0; });
  add("bias", [](Case& c) { c.bias = {0, 0, 0, 0}; });
  add("bias bf16", [](Case& c) { c.bias = {0, 0, 0, 0}, c.bias_dtype = DType::kBF16; });
  add("bias of heads", [](Case& c) { c.bias = {1, 0, 0, 0}, c.bias_dtype = DType::kBF16; });
  add("bias causal", [](Case& c) { c.bias = {1, 0, 0, 0}, c.right = 0, c.lengths = true; });
  add("bias of keys", [](Case& c) { c.bias = {0, 1, 1, 0}; });
  add("bias of rows", [](Case& c) { c.bias = {1, 1, 0, 1}; });
  add("bias and mask", [](Case& c) {
    c.bias = {0, 0, 0, 0}, c.bias_dtype = DType::kBF16, c.mask = true, c.mask_shape = {0, 0, 0, 0};
  });
  add("bias of all", [](Case& c) { c.bias = {1, 0, 1, 1}, c.bias_dtype = DType::kF16; });
  add("all", [](Case& c) {
    c.lengths = c.segments = c.mask = c.sinks = c.dropout = true;
    c.soft_cap = 3, c.left = 100, c.right = 40, c.offset = 3, c.bias = {0, 0, 0, 0};
  });

  struct Shape {
    int64_t batch, query_length, key_length, query_heads, key_heads, head_dim, value_dim;
  };
  const Shape shapes[] = {
      {2, 200, 300, 2, 1, 64, 64},
      {1, 130, 67, 4, 2, 128, 128},
      {3, 7, 300, 3, 3, 33, 80},
      {2, 37, 53, 2, 1, 17, 5},
      {1, 1, 1, 1, 1, 1, 1},
      {2, 300, 257, 2, 2, 32, 32},
      {2, 140, 200, 2, 1, 96, 96},
      {1, 150, 300, 2, 1, 192, 128},
      {1, 130, 200, 2, 2, 256, 256},
      {1, 513, 700, 6, 2, 64, 128},
      {2, 0, 5, 2, 2, 8, 8},
      {2, 5, 0, 2, 2, 8, 8},
      // Rows of bias and mask in aligned pieces of 16 bytes.
      {2, 150, 352, 2, 1, 64, 64},
      {1, 300, 208, 2, 2, 128, 128},
      {1, 70, 272, 2, 2, 200, 256},
      // Several tiles of rows for each block of a persistent kernel, and many tiles of keys.
      {70, 70, 90, 4, 4, 128, 128},
      {1, 300, 1100, 4, 2, 128, 128},
      {1, 520, 1536, 3, 3, 64, 64},
  };
  std::vector<Case> all;
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const Shape& s : shapes) {
      for (Case c : features) {
        c.name += dtype == DType::kBF16 ? " bf16" : dtype == DType::kF16 ? " f16" : " f32";
        c.dtype = dtype;
        // Gradients of logits are f16 themselves: larger operands would take them past its range.
        if (dtype == DType::kF16) c.size = std::min(c.size, 8.);
        c.batch = s.batch;
        c.query_length = s.query_length;
        c.key_length = s.key_length;
        c.query_heads = s.query_heads;
        c.key_heads = s.key_heads;
        c.head_dim = s.head_dim;
        c.value_dim = s.value_dim;
        all.push_back(c);
      }
    }
  }
  return all;
}

// Device arrays for timing, random and never fetched.
struct Timed {
  void* data = nullptr;
  size_t bytes;
  explicit Timed(size_t n, bool random = false, DType dtype = DType::kBF16) : bytes(n) {
    check(cudaMalloc(&data, n + 256));
    if (!random) return;
    const size_t block = std::min<size_t>(n, 1 << 22);
    std::vector<unsigned char> host(block);
    std::mt19937 engine(3);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i + size_of(dtype) <= block; i += size_of(dtype)) {
      const float x = normal(engine);
      const uint16_t half = dtype == DType::kBF16 ? bf16_bits(x) : f16_bits(x);
      if (dtype == DType::kF32)
        std::memcpy(&host[i], &x, 4);
      else
        std::memcpy(&host[i], &half, 2);
    }
    for (size_t at = 0; at < n; at += block) {
      check(cudaMemcpy(static_cast<char*>(data) + at, host.data(), std::min(block, n - at),
                       cudaMemcpyHostToDevice));
    }
  }
  ~Timed() { cudaFree(data); }
};

// The median of five rounds of 20 ms: shorter ones run at clocks that power does not let last.
double seconds_of(const std::function<void()>& run) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  const auto milliseconds = [&](int calls) {
    check(cudaEventRecord(begin));
    for (int i = 0; i < calls; ++i) run();
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    float ms;
    check(cudaEventElapsedTime(&ms, begin, end));
    return ms / calls;
  };
  milliseconds(1);
  const int calls = std::max(1, static_cast<int>(20 / milliseconds(2)));
  std::vector<float> times;
  for (int round = 0; round < 5; ++round) times.push_back(milliseconds(calls));
  check(cudaGetLastError());
  std::sort(times.begin(), times.end());
  return times[2] * 1e-3;
}

struct Setting {
  DType dtype = DType::kBF16;
  int64_t tokens = 16384, hidden = 2048;
  bool cap = false, mask = false, bias = false, bias_batch = false, dropout = false;
  int segments = 0;
  bool deterministic = false;
};

// TFLOP/s forward and backward; negative where there is no kernel.
void time_one(const Setting& setting, int64_t dim, int64_t length, bool causal, double& forward,
              double& backward) {
  const int64_t size = size_of(setting.dtype);
  const int64_t heads = setting.hidden / dim, batch = setting.tokens / length;
  const size_t elements = setting.tokens * setting.hidden, rows = setting.tokens * heads;
  Timed q(elements * size, true, setting.dtype), k(elements * size, true, setting.dtype),
      v(elements * size, true, setting.dtype), cotangent(elements * size, true, setting.dtype),
      o(elements * size), dq(elements * size), dk(elements * size), dv(elements * size),
      peak(rows * 4), sum(rows * 4), delta(rows * 4), scale(256);
  check(cudaMemset(delta.data, 0, delta.bytes));
  const float s = 1 / std::sqrt(float(dim));
  check(cudaMemcpy(scale.data, &s, 4, cudaMemcpyHostToDevice));
  Problem p;
  p.batch_rank = 1;
  p.batch_size[0] = p.batches = batch;
  p.query_length = p.key_length = length;
  p.query_heads = p.key_heads = heads;
  p.head_dim = p.value_dim = dim;
  p.window_right = causal ? 0 : kUnlimited;
  const auto tensor = [&](Timed& t, DType dtype, int64_t columns) {
    Tensor x;
    x.data = t.data;
    x.dtype = dtype;
    x.column = 1;
    x.head = columns;
    x.row = columns * heads;
    x.batch[0] = x.row * length;
    return x;
  };
  p.query = tensor(q, setting.dtype, dim);
  p.key = tensor(k, setting.dtype, dim);
  p.value = tensor(v, setting.dtype, dim);
  p.scale.data = scale.data;
  if (setting.cap) p.soft_cap = 50;
  Timed mask(setting.mask ? length * length : 1);
  if (setting.mask) {
    check(cudaMemset(mask.data, 1, mask.bytes));
    std::vector<unsigned char> host(length * length);
    std::mt19937 engine(5);
    for (auto& x : host) x = engine() % 8 != 0;
    check(cudaMemcpy(mask.data, host.data(), host.size(), cudaMemcpyHostToDevice));
    p.mask.data = mask.data;
    p.mask.dtype = DType::kBool;
    p.mask.row = length;
    p.mask.column = 1;
  }
  const size_t bias_elements =
      setting.bias ? (setting.bias_batch ? batch : 1) * heads * length * length : 1;
  Timed bias(bias_elements * 2, setting.bias), dbias(bias_elements * 2);
  Tensor bias_tensor;
  if (setting.bias) {
    bias_tensor.dtype = DType::kBF16;
    bias_tensor.column = 1;
    bias_tensor.row = length;
    bias_tensor.head = heads == 1 ? 0 : length * length;
    bias_tensor.batch[0] = setting.bias_batch ? heads * length * length : 0;
    p.bias = bias_tensor;
    p.bias.data = bias.data;
  }
  Timed ids(batch * length * 4);
  if (setting.segments > 0) {
    std::vector<int32_t> host(batch * length);
    for (int64_t i = 0; i < batch * length; ++i) {
      host[i] = static_cast<int32_t>(i % length * setting.segments / length);
    }
    check(cudaMemcpy(ids.data, host.data(), ids.bytes, cudaMemcpyHostToDevice));
    p.query_segment_ids.data = ids.data;
    p.query_segment_ids.dtype = DType::kS32;
    p.query_segment_ids.row = 1;
    p.query_segment_ids.batch[0] = length;
    p.key_value_segment_ids = p.query_segment_ids;
  }
  Timed stream(batch * heads * 16, true);
  if (setting.dropout) {
    p.dropout_threshold = 6554;
    p.dropout_stream.data = stream.data;
    p.dropout_stream.head = 4;
    p.dropout_stream.batch[0] = heads * 4;
  }
  const Statistics statistics{tensor(peak, DType::kF32, 1), tensor(sum, DType::kF32, 1)};
  const size_t forward_bytes = cuda::forward_workspace_bytes(p);
  Timed forward_space(forward_bytes);
  const double flop = 4. * setting.tokens * setting.hidden * length * (causal ? 0.5 : 1);
  cuda::Error error = nullptr;
  const double forward_seconds = seconds_of([&] {
    error = cuda::forward(
        p, {tensor(o, setting.dtype, dim), statistics, {forward_space.data, forward_bytes}},
        cuda::Precision::kFloat, nullptr);
  });
  forward = error != nullptr ? -1 : flop / forward_seconds * 1e-12;
  cuda::BackwardResults results;
  results.query = tensor(dq, setting.dtype, dim);
  results.key = tensor(dk, setting.dtype, dim);
  results.value = tensor(dv, setting.dtype, dim);
  if (setting.bias) {
    results.bias = bias_tensor;
    results.bias.data = dbias.data;
  }
  results.deterministic = setting.deterministic;
  const size_t bytes = cuda::backward_workspace_bytes(p, results);
  Timed space(bytes);
  results.workspace = {space.data, bytes};
  const double backward_seconds = seconds_of([&] {
    error = cuda::backward(
        p, {tensor(cotangent, setting.dtype, dim), statistics, tensor(delta, DType::kF32, 1)},
        results, cuda::Precision::kFloat, nullptr);
  });
  backward = error != nullptr ? -1 : 2.5 * flop / backward_seconds * 1e-12;
}

void time_setting(const char* name, const Setting& setting, const std::vector<int64_t>& dims,
                  const std::vector<int64_t>& lengths, const std::vector<bool>& causals) {
  for (const int64_t dim : dims) {
    for (const bool causal : causals) {
      std::string line[2];
      for (const int64_t length : lengths) {
        double speed[2];
        time_one(setting, dim, length, causal, speed[0], speed[1]);
        for (int i = 0; i < 2; ++i) {
          char text[16];
          std::snprintf(text, sizeof text, "%7.0f", speed[i]);
          line[i] += text;
        }
      }
      for (int i = 0; i < 2; ++i) {
        std::printf("%s %s d%-3ld %-6s %s\n", name, i ? "bwd" : "fwd", dim,
                    causal ? "causal" : "full", line[i].c_str());
      }
      std::fflush(stdout);
    }
  }
}

void time_all(const std::string& mode) {
  if (mode == "short" || mode == "plain" || mode == "all") {
    const std::vector<int64_t> lengths =
        mode == "short" ? std::vector<int64_t>{1024, 8192}
                        : std::vector<int64_t>{512, 1024, 2048, 4096, 8192, 16384};
    time_setting("plain", {}, {64, 128, 256}, lengths, {false, true});
  }
  if (mode.rfind("features", 0) == 0 || mode == "all") {
    std::vector<int64_t> dims = {64, 128};
    if (mode == "features64") dims = {64};
    if (mode == "features128") dims = {128};
    const std::vector<int64_t> lengths = {4096};
    const auto one = [&](const char* name, const std::function<void(Setting&)>& set) {
      Setting setting;
      set(setting);
      time_setting(name, setting, dims, lengths, {false});
    };
    one("plain        ", [](Setting&) {});
    one("cap          ", [](Setting& s) { s.cap = true; });
    one("mask         ", [](Setting& s) { s.mask = true; });
    one("dropout      ", [](Setting& s) { s.dropout = true; });
    one("bias [1,N]   ", [](Setting& s) { s.bias = true; });
    one("bias [B,N]   ", [](Setting& s) { s.bias = s.bias_batch = true; });
    one("segments     ", [](Setting& s) { s.segments = 8; });
    one("deterministic", [](Setting& s) { s.deterministic = true; });
    Setting segments;
    segments.segments = 8;
    time_setting("segments", segments, dims, {16384}, {false});
    Setting floats;
    floats.dtype = DType::kF32;
    time_setting("f32", floats, {64, 128, 256}, {4096}, {false, true});
  }
}

}  // namespace
}  // namespace jaxflash

int main(int argc, char** argv) {
  using namespace jaxflash;
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "time" && argc > 5) {  // time DIM LENGTH CAUSAL REPEATS
    for (int i = 0; i < std::atoi(argv[5]); ++i) {
      double speed[2];
      time_one({}, std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4]), speed[0], speed[1]);
      std::printf("%s %s %s: %.0f %.0f\n", argv[2], argv[3], argv[4], speed[0], speed[1]);
    }
    return 0;
  }
  if (mode == "many") {  // more (batch, head) pairs than a grid's y or z dimension holds
    Case c;
    c.batch = 70000, c.query_length = 3, c.key_length = 5, c.head_dim = c.value_dim = 8;
    c.query_heads = 1, c.key_heads = 1, c.right = 0;
    return test(c, true) ? 0 : 1;
  }
  if (mode == "time") {
    time_all(argc > 2 ? argv[2] : "all");
    return 0;
  }
  int count = 0, wrong = 0;
  for (const Case& c : cases()) {
    if (mode == "case" && c.name.find(argc > 2 ? argv[2] : "") == std::string::npos) continue;
    ++count;
    if (!test(c, mode == "case")) ++wrong;
    std::fflush(stdout);
  }
  std::printf("cuda_test: %d cases, %d wrong\n", count, wrong);
  return wrong != 0;
}
