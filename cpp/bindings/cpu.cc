// Python module jaxflash._cpu: the CPU custom calls and what they were built with.
#include <nanobind/nanobind.h>

#include "cpu/launch.h"
#include "ffi/cpu_handlers.h"

namespace nb = nanobind;

#if defined(__clang__)
#define JAXFLASH_COMPILER __VERSION__
#else
#define JAXFLASH_COMPILER "GCC " __VERSION__
#endif

namespace {

nb::capsule capsule_of(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::typed<nb::dict, nb::str, nb::capsule> registrations() {
  nb::dict targets;
  targets["jaxflash_forward"] = capsule_of(jaxflash::ffi::cpu_forward);
  targets["jaxflash_backward"] = capsule_of(jaxflash::ffi::cpu_backward);
  return targets;
}

nb::typed<nb::dict, nb::str, nb::object> build_facts() {
  nb::dict facts;
  facts["version"] = JAXFLASH_VERSION;
  facts["compiler"] = JAXFLASH_COMPILER;
  facts["xla_ffi_api"] = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  facts["batch_dims"] = jaxflash::kMaxBatchDims;
  facts["tile_keys"] = jaxflash::cpu::kTileKeys;
  facts["instruction_set"] = jaxflash::cpu::instruction_set();
  nb::list sets;
  for (const char* const* set = jaxflash::cpu::instruction_sets(); *set != nullptr; ++set) {
    sets.append(*set);
  }
  facts["instruction_sets"] = nb::tuple(sets);
  return facts;
}

}  // namespace

NB_MODULE(_cpu, module) {
  module.doc() = "CPU attention kernels of jaxflash as XLA custom calls.";
  module.def("registrations", &registrations, "Custom-call targets by name, as capsules.");
  module.def(
      "build_facts", &build_facts,
      "Version, compiler, XLA FFI version, limits, instruction sets built and the one in use.");
}
