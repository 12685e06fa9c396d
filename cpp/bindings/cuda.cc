// Python module jaxflash._cuda: build facts. It has no kernels yet.
#include <nanobind/nanobind.h>

#include "cuda/common/build_facts.h"
#include "xla/ffi/api/c_api.h"

namespace nb = nanobind;

namespace jaxflash {
namespace {

nb::typed<nb::dict, nb::str, nb::object> build_facts() {
  const cuda::BuildFacts built = cuda::build_facts();
  nb::dict facts;
  facts["version"] = JAXFLASH_VERSION;
  facts["compiler"] = built.compiler;
  facts["xla_ffi_api"] = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  facts["cuda_version"] = nb::make_tuple(built.cuda_version / 1000, built.cuda_version % 1000 / 10);
  facts["architectures"] = nb::str(built.architectures).attr("split")();
  return facts;
}

nb::typed<nb::dict, nb::str, nb::capsule> registrations() { return nb::dict(); }

}  // namespace

NB_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels of jaxflash.";
  m.def("build_facts", &build_facts, "What this module was built with and for.");
  m.def("registrations", &registrations, "XLA FFI handlers: target name to capsule.");
}

}  // namespace jaxflash
