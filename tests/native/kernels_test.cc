// Calls the CPU kernels without Python, over odd shapes, every dtype, every feature and every
// instruction set that this machine has; also under the sanitizers (tools/sanitize). Asserts what
// needs no reference: what lies past the lengths (NaN here) reaches no result, every result is
// written, threads change no bit, and instruction sets agree. That they are right is for the Python
// suite to say, which runs on the best of them.
#include "cpu/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "attention/problem.h"
#include "cpu/launch.h"

namespace jaxflash {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Starts a thread for each closure; joins them at its end.
class Threads final : public cpu::Executor {
 public:
  explicit Threads(int64_t count) : count_(count) {}
  ~Threads() override {
    for (std::thread& thread : threads_) thread.join();
  }
  int64_t thread_count() const override { return count_; }
  void schedule(std::function<void()> work) override { threads_.emplace_back(std::move(work)); }

 private:
  int64_t count_;
  std::vector<std::thread> threads_;
};

int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 8;
    case DType::kF32:
    case DType::kS32:
    case DType::kU32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kBool:
      return 1;
  }
  return 0;
}

// Exact for NaN, 0 and multiples of 1/64 below 4, all that this test stores.
uint16_t half_bits(DType dtype, double x) {
  if (std::isnan(x)) return 0x7fff;
  if (dtype == DType::kBF16) {
    const auto single = static_cast<float>(x);
    uint32_t bits;
    std::memcpy(&bits, &single, sizeof bits);
    return static_cast<uint16_t>(bits >> 16);
  }
  if (x == 0) return 0;
  int exponent;
  const double mantissa = std::frexp(std::abs(x), &exponent);  // in [0.5, 1)
  const auto magnitude = ((exponent + 13) << 10) + static_cast<int>(mantissa * 2048);
  return static_cast<uint16_t>((x < 0 ? 0x8000 : 0) + magnitude);
}

double half_value(DType dtype, uint16_t bits) {
  const int mantissa_bits = dtype == DType::kBF16 ? 7 : 10;
  const int exponent_mask = 0x7fff >> mantissa_bits;
  const int exponent = (bits & 0x7fff) >> mantissa_bits;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const int bias = exponent_mask / 2 + mantissa_bits;
  double magnitude = std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias);
  if (exponent == 0) magnitude = std::ldexp(mantissa, 1 - bias);
  if (exponent == exponent_mask) magnitude = mantissa ? kNaN : INFINITY;
  return bits & 0x8000 ? -magnitude : magnitude;
}

// A dense array [batch, row, head, column] or, for what has keys as columns, [batch, head, row,
// column].
struct Array {
  enum class Order { kRowHead, kHeadRow };

  Array() = default;
  Array(DType dtype, int64_t batch, int64_t row, int64_t head, int64_t column,
        Order order = Order::kRowHead)
      : bytes(static_cast<size_t>(batch * row * head * column * size_of(dtype))) {
    tensor.dtype = dtype;
    tensor.batch[0] = batch == 1 ? 0 : row * head * column;
    tensor.row = order == Order::kRowHead ? head * column : column;
    tensor.head = order == Order::kRowHead ? column : row * column;
    tensor.column = 1;
  }

  int64_t size() const { return static_cast<int64_t>(bytes.size()) / size_of(tensor.dtype); }

  void set(int64_t i, double x) {
    unsigned char* to = bytes.data() + i * size_of(tensor.dtype);
    const auto put = [&](auto value) { std::memcpy(to, &value, sizeof value); };
    switch (tensor.dtype) {
      case DType::kF64:
        return put(x);
      case DType::kF32:
        return put(static_cast<float>(x));
      case DType::kS32:
        return put(static_cast<int32_t>(x));
      case DType::kU32:
        return put(static_cast<uint32_t>(x));
      case DType::kBool:
        return put(static_cast<uint8_t>(x));
      case DType::kBF16:
      case DType::kF16:
        return put(half_bits(tensor.dtype, x));
    }
  }

  void fill(const std::function<double()>& next) {
    for (int64_t i = 0; i < size(); ++i) set(i, next());
  }

  // Of a float array.
  double get(int64_t i) const {
    const unsigned char* from = bytes.data() + i * size_of(tensor.dtype);
    const auto take = [&](auto value) {
      std::memcpy(&value, from, sizeof value);
      return value;
    };
    if (tensor.dtype == DType::kF64) return take(double{});
    if (tensor.dtype == DType::kF32) return take(float{});
    return half_value(tensor.dtype, take(uint16_t{}));
  }

  // With the address of the elements as they lie now; never null, which would mean absent.
  Tensor view() {
    bytes.reserve(1);
    tensor.data = bytes.data();
    return tensor;
  }

  std::vector<unsigned char> bytes;
  Tensor tensor;
};

struct Shape {
  int64_t batch, query_length, key_length, query_heads, key_heads, head_dim, value_dim;
};

struct Features {
  const char* name;
  bool lengths = false;
  bool segments = false;
  bool bias = false;
  bool mask = false;
  bool sinks = false;
  bool dropout = false;
  bool shared_keys = false;  // one key and value for all of the batch, their gradients summed
  bool broadcast_bias = false;
  double soft_cap = 0;
  int64_t window_left = kUnlimited;
  int64_t window_right = kUnlimited;
  int32_t offset = 0;
};

class Call {
 public:
  Call(const Shape& shape, DType dtype, const Features& features)
      : shape_(shape),
        dtype_(dtype),
        compute_(dtype == DType::kF64 ? DType::kF64 : DType::kF32),
        features_(features) {
    describe();
    allocate();
    fill();
  }

  // Runs both directions on `threads` threads; every result, in the order of kResultNames.
  std::vector<Array> run(const cpu::Kernels& kernels, int64_t threads) {
    Threads executor(threads);
    const auto [b, t, s, n, k, h, hv] = shape_;
    const int64_t key_batch = features_.shared_keys ? 1 : b;
    Array output(dtype_, b, t, n, hv), logit_max(compute_, b, t, n, 1),
        log_sum(compute_, b, t, n, 1);
    Array d_query(dtype_, b, t, n, h), d_key(dtype_, key_batch, s, k, h);
    Array d_value(dtype_, key_batch, s, k, hv), d_scale(compute_, b, t, n, 1), d_bias;
    const int64_t chunks = s > 128 ? 2 : 1;
    Array workspace(compute_, chunks * b, t, n, h);
    for (Array* result : {&output, &logit_max, &log_sum, &d_query, &d_key, &d_value, &d_scale}) {
      result->fill([] { return kNaN; });
    }

    const Statistics statistics{logit_max.view(), log_sum.view()};
    ok_ = kernels.forward(problem_, {output.view(), statistics}, executor);

    cpu::BackwardResults results;
    results.query = d_query.view();
    results.key = d_key.view();
    results.value = d_value.view();
    results.scale = d_scale.view();
    if (features_.bias) {
      d_bias = bias_;
      d_bias.fill([] { return kNaN; });
      results.bias = d_bias.view();
    }
    results.chunks = chunks;
    results.chunk_stride = b * t * n * h;
    if (chunks > 1 || compute_ != dtype_) results.workspace = workspace.view();
    ok_ = kernels.backward(problem_, {cotangent_.view(), statistics, delta_of(logit_max).view()},
                           results, executor) &&
          ok_;
    return {output, logit_max, log_sum, d_query, d_key, d_value, d_scale, d_bias};
  }

  bool ok() const { return ok_; }

 private:
  void describe() {
    problem_.batch_rank = 1;
    problem_.batch_size[0] = problem_.batches = shape_.batch;
    problem_.query_length = shape_.query_length;
    problem_.key_length = shape_.key_length;
    problem_.query_heads = shape_.query_heads;
    problem_.key_heads = shape_.key_heads;
    problem_.head_dim = shape_.head_dim;
    problem_.value_dim = shape_.value_dim;
    problem_.window_left = features_.window_left;
    problem_.window_right = features_.window_right;
    problem_.soft_cap = features_.soft_cap;
    problem_.dropout_threshold = features_.dropout ? 20000 : 0;
  }

  void allocate() {
    const auto [b, t, s, n, k, h, hv] = shape_;
    const int64_t key_batch = features_.shared_keys ? 1 : b;
    const auto kHeadRow = Array::Order::kHeadRow;
    query_ = Array(dtype_, b, t, n, h);
    key_ = Array(dtype_, key_batch, s, k, h);
    value_ = Array(dtype_, key_batch, s, k, hv);
    cotangent_ = Array(dtype_, b, t, n, hv);
    bias_ = features_.broadcast_bias ? Array(DType::kBF16, 1, 1, n, s, kHeadRow)
                                     : Array(DType::kF32, b, t, n, s, kHeadRow);
    if (features_.broadcast_bias) bias_.tensor.row = 0;
    mask_ = Array(DType::kBool, b, t, 1, s, kHeadRow);
    mask_.tensor.head = 0;
    sinks_ = Array(compute_, 1, 1, n, 1);
    scale_ = Array(compute_, b, 1, 1, 1);
    query_lengths_ = Array(DType::kS32, b, 1, 1, 1);
    key_lengths_ = Array(DType::kS32, b, 1, 1, 1);
    offset_ = Array(DType::kS32, b, 1, 1, 1);
    query_segments_ = Array(DType::kS32, b, t, 1, 1);
    key_segments_ = Array(DType::kS32, b, s, 1, 1);
    stream_ = Array(DType::kU32, b, 1, n, 4);
  }

  void fill() {
    const auto random = [this] { return static_cast<int>(engine_() % 255 - 127) / 64.0; };
    for (Array* array : {&query_, &key_, &value_, &cotangent_, &bias_, &sinks_})
      array->fill(random);
    mask_.fill([this] { return engine_() % 4 != 0; });
    scale_.fill([] { return 0.5; });
    offset_.fill([this] { return features_.offset; });
    query_segments_.fill([this] { return engine_() % 3; });
    key_segments_.fill([this] { return engine_() % 3; });
    stream_.fill([this] { return engine_(); });

    problem_.query = query_.view();
    problem_.key = key_.view();
    problem_.value = value_.view();
    problem_.scale = scale_.view();
    if (features_.bias) problem_.bias = bias_.view();
    if (features_.mask) problem_.mask = mask_.view();
    if (features_.sinks) problem_.sinks = sinks_.view();
    if (features_.offset != 0) problem_.query_offset = offset_.view();
    if (features_.segments) {
      problem_.query_segment_ids = query_segments_.view();
      problem_.key_value_segment_ids = key_segments_.view();
    }
    if (features_.dropout) problem_.dropout_stream = stream_.view();
    if (features_.lengths) shorten();
  }

  // Cuts each batch to a length of its own; what lies past it becomes NaN.
  void shorten() {
    for (int64_t b = 0; b < shape_.batch; ++b) {
      const int64_t queries = shape_.query_length * (b + 1) / (shape_.batch + 1);
      const int64_t keys = shape_.key_length * (b + 1) / (shape_.batch + 1);
      query_lengths_.set(b, static_cast<double>(queries));
      key_lengths_.set(b, static_cast<double>(keys));
      poison(query_, b, queries, shape_.query_length);
      poison(cotangent_, b, queries, shape_.query_length);
      if (features_.shared_keys) continue;
      poison(key_, b, keys, shape_.key_length);
      poison(value_, b, keys, shape_.key_length);
    }
    problem_.query_lengths = query_lengths_.view();
    problem_.key_value_lengths = key_lengths_.view();
  }

  static void poison(Array& array, int64_t b, int64_t begin, int64_t end) {
    const int64_t row = array.tensor.row;
    for (int64_t i = (b * end + begin) * row; i < (b + 1) * end * row; ++i) array.set(i, kNaN);
  }

  // Any numbers do, but 0 where a query sees nothing.
  static Array delta_of(const Array& logit_max) {
    std::minstd_rand engine(7);
    Array delta = logit_max;
    for (int64_t i = 0; i < delta.size(); ++i) {
      const double number = static_cast<double>(engine() % 128) / 64 - 1;
      delta.set(i, std::isinf(logit_max.get(i)) ? 0 : number);
    }
    return delta;
  }

  Shape shape_;
  DType dtype_;
  DType compute_;
  Features features_;
  Problem problem_;
  std::minstd_rand engine_{1};
  Array query_, key_, value_, cotangent_, bias_, mask_, sinks_, scale_, query_lengths_,
      key_lengths_, offset_, query_segments_, key_segments_, stream_;
  bool ok_ = false;
};

constexpr const char* kResultNames[] = {"output",         "logit_max",    "log_sum",
                                        "query gradient", "key gradient", "value gradient",
                                        "scale gradient", "bias gradient"};

std::vector<const cpu::Kernels*> kernels_of_this_machine() {
  std::vector<const cpu::Kernels*> all{&cpu::baseline::kKernels};
#if defined(JAXFLASH_HAS_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    all.push_back(&cpu::avx2::kKernels);
  }
#endif
#if defined(JAXFLASH_HAS_AVX512)
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    all.push_back(&cpu::avx512::kKernels);
  }
#endif
  return all;
}

// By how much two instruction sets may differ, relative to the largest element: some roundings of
// the result's dtype, and of the compute type for sums over a few hundred products.
double tolerance(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 1e-13;
    case DType::kBF16:
      return 0.02;
    case DType::kF16:
      return 0.003;
    default:
      return 1e-5;
  }
}

bool agree(const Array& a, const Array& b) {
  double difference = 0, largest = 1;
  for (int64_t i = 0; i < a.size(); ++i) {
    if (a.get(i) == b.get(i)) continue;  // infinities too
    difference = std::max(difference, std::abs(a.get(i) - b.get(i)));
    largest = std::max(largest, std::abs(a.get(i)));
  }
  return difference <= tolerance(a.tensor.dtype) * largest;
}

bool has_nan(const Array& array) {
  for (int64_t i = 0; i < array.size(); ++i) {
    if (std::isnan(array.get(i))) return true;
  }
  return false;
}

// What is wrong with the kernels' results for a call; empty if nothing.
std::string defect(Call& call) {
  std::vector<Array> expected;
  for (const cpu::Kernels* kernels : kernels_of_this_machine()) {
    const std::string where = std::string(" (") + kernels->instruction_set + ")";
    const std::vector<Array> alone = call.run(*kernels, 1);
    if (!call.ok()) return "failed" + where;
    const std::vector<Array> shared = call.run(*kernels, 4);
    if (!call.ok()) return "failed with threads" + where;
    if (expected.empty()) expected = alone;
    for (size_t i = 0; i < alone.size(); ++i) {
      if (has_nan(alone[i])) return std::string("NaN in ") + kResultNames[i] + where;
      if (alone[i].bytes != shared[i].bytes) {
        return std::string("threads change ") + kResultNames[i] + where;
      }
      if (!agree(expected[i], alone[i])) {
        return std::string("baseline has another ") + kResultNames[i] + where;
      }
    }
  }
  return "";
}

int test_all() {
  const Shape shapes[] = {
      {1, 1, 1, 1, 1, 1, 1},     {2, 37, 53, 2, 1, 17, 5},  {1, 130, 131, 4, 2, 64, 64},
      {3, 7, 300, 3, 3, 33, 80}, {1, 200, 3, 2, 2, 256, 1}, {2, 65, 129, 6, 2, 40, 128},
      {2, 0, 5, 2, 2, 8, 8},     {2, 5, 0, 2, 2, 8, 8},
  };
  Features causal{"causal"}, window{"window"}, ranges{"ranges"}, pointwise{"pointwise"};
  Features shared{"shared keys"}, everything{"everything"};
  causal.window_right = 0;
  window.window_left = 3, window.window_right = 20, window.offset = -5;
  ranges.lengths = true, ranges.window_left = 40, ranges.window_right = 0, ranges.offset = 9;
  pointwise.bias = pointwise.mask = pointwise.segments = true;
  shared.shared_keys = shared.bias = shared.broadcast_bias = true;
  everything.lengths = everything.segments = everything.bias = everything.mask = true;
  everything.sinks = everything.dropout = true;
  everything.soft_cap = 15, everything.window_left = 100, everything.window_right = 2;
  everything.offset = 3;

  int failures = 0, calls = 0;
  for (const Features& features :
       {Features{"plain"}, causal, window, ranges, pointwise, shared, everything}) {
    for (const Shape& shape : shapes) {
      for (DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16}) {
        ++calls;
        Call call(shape, dtype, features);
        const std::string what = defect(call);
        if (what.empty()) continue;
        ++failures;
        std::printf("%s, dtype %d, B=%d T=%d S=%d N=%d K=%d H=%d Hv=%d: %s\n", features.name,
                    static_cast<int>(dtype), static_cast<int>(shape.batch),
                    static_cast<int>(shape.query_length), static_cast<int>(shape.key_length),
                    static_cast<int>(shape.query_heads), static_cast<int>(shape.key_heads),
                    static_cast<int>(shape.head_dim), static_cast<int>(shape.value_dim),
                    what.c_str());
      }
    }
  }
  std::printf("kernels_test:");
  for (const cpu::Kernels* kernels : kernels_of_this_machine()) {
    std::printf(" %s", kernels->instruction_set);
  }
  std::printf("; %d calls, %d failed\n", calls, failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace jaxflash

int main() { return jaxflash::test_all(); }
