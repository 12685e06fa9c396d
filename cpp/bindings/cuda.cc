// Python module jaxflash._cuda: the CUDA custom calls and what they were built with.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "cuda/common/build_facts.h"
#include "ffi/cuda_handlers.h"

namespace nb = nanobind;

namespace jaxflash {
namespace {

// A dtype by its NumPy name, and a shape.
using Shapes = std::vector<std::pair<std::string, std::vector<int64_t>>>;

constexpr std::pair<const char*, XLA_FFI_DataType> kDTypes[] = {
    {"bfloat16", XLA_FFI_DataType_BF16}, {"float16", XLA_FFI_DataType_F16},
    {"float32", XLA_FFI_DataType_F32},   {"float64", XLA_FFI_DataType_F64},
    {"bool", XLA_FFI_DataType_PRED},     {"int32", XLA_FFI_DataType_S32},
    {"uint32", XLA_FFI_DataType_U32},    {"uint8", XLA_FFI_DataType_U8},
};

XLA_FFI_DataType dtype_of(const std::string& name) {
  for (const auto& [known, dtype] : kDTypes) {
    if (name == known) return dtype;
  }
  throw nb::value_error(("jaxflash: unexpected dtype " + name).c_str());
}

std::vector<ffi::BufferShape> buffer_shapes(const Shapes& shapes) {
  std::vector<ffi::BufferShape> buffers;
  for (const auto& [dtype, dims] : shapes) buffers.push_back({dtype_of(dtype), dims});
  return buffers;
}

template <class Value>
Value value_of(const xla::ffi::ErrorOr<Value>& value) {
  if (value.has_error()) throw nb::value_error(value.error().message().c_str());
  return value.value();
}

int64_t forward_workspace(const Shapes& operands, int64_t window_left, int64_t window_right,
                          double soft_cap, int64_t dropout_threshold) {
  return value_of(ffi::cuda_forward_workspace(
      buffer_shapes(operands), {window_left, window_right, soft_cap, dropout_threshold}));
}

int64_t backward_workspace(const Shapes& operands, const Shapes& results, bool deterministic,
                           int64_t window_left, int64_t window_right, double soft_cap,
                           int64_t dropout_threshold) {
  return value_of(ffi::cuda_backward_workspace(
      buffer_shapes(operands), buffer_shapes(results),
      {window_left, window_right, soft_cap, dropout_threshold}, deterministic));
}

std::string forward_kernel(const Shapes& operands, int64_t window_left, int64_t window_right,
                           double soft_cap, int64_t dropout_threshold, int capability) {
  return value_of(ffi::cuda_forward_kernel(buffer_shapes(operands),
                                           {window_left, window_right, soft_cap, dropout_threshold},
                                           capability));
}

std::string backward_kernel(const Shapes& operands, const Shapes& results, bool deterministic,
                            int64_t window_left, int64_t window_right, double soft_cap,
                            int64_t dropout_threshold, int capability) {
  return value_of(ffi::cuda_backward_kernel(
      buffer_shapes(operands), buffer_shapes(results),
      {window_left, window_right, soft_cap, dropout_threshold}, deterministic, capability));
}

nb::capsule capsule_of(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::typed<nb::dict, nb::str, nb::capsule> registrations() {
  nb::dict targets;
  targets["jaxflash_forward"] = capsule_of(ffi::cuda_forward);
  targets["jaxflash_backward"] = capsule_of(ffi::cuda_backward);
  return targets;
}

nb::typed<nb::dict, nb::str, nb::object> build_facts() {
  const cuda::BuildFacts built = cuda::build_facts();
  nb::dict facts;
  facts["version"] = JAXFLASH_VERSION;
  facts["compiler"] = built.compiler;
  facts["xla_ffi_api"] = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  facts["batch_dims"] = kMaxBatchDims;
  facts["cuda_version"] = nb::make_tuple(built.cuda_version / 1000, built.cuda_version % 1000 / 10);
  facts["architectures"] = nb::str(built.architectures).attr("split")();
  return facts;
}

}  // namespace

NB_MODULE(_cuda, module) {
  module.doc() = "CUDA attention kernels of jaxflash as XLA custom calls.";
  module.def("registrations", &registrations, "Custom-call targets by name, as capsules.");
  module.def(
      "build_facts", &build_facts,
      "Version, compiler, XLA FFI version, limits, CUDA version and architectures built for.");
  module.def("forward_workspace", &forward_workspace, nb::arg("operands"), nb::kw_only(),
             nb::arg("window_left"), nb::arg("window_right"), nb::arg("soft_cap"),
             nb::arg("dropout_threshold"),
             "Bytes of workspace of a forward call, from (dtype name, shape) of its operands.");
  module.def("backward_workspace", &backward_workspace, nb::arg("operands"), nb::arg("results"),
             nb::kw_only(), nb::arg("deterministic"), nb::arg("window_left"),
             nb::arg("window_right"), nb::arg("soft_cap"), nb::arg("dropout_threshold"),
             "Bytes of workspace of a backward call, also from those of its five cotangents.");
  module.def("forward_kernel", &forward_kernel, nb::arg("operands"), nb::kw_only(),
             nb::arg("window_left"), nb::arg("window_right"), nb::arg("soft_cap"),
             nb::arg("dropout_threshold"), nb::arg("capability"),
             "What computes such a call on a GPU of a compute capability (90 for 9.0), in words; "
             "empty where no kernel does.");
  module.def("backward_kernel", &backward_kernel, nb::arg("operands"), nb::arg("results"),
             nb::kw_only(), nb::arg("deterministic"), nb::arg("window_left"),
             nb::arg("window_right"), nb::arg("soft_cap"), nb::arg("dropout_threshold"),
             nb::arg("capability"), "Likewise of a backward call.");
}

}  // namespace jaxflash
