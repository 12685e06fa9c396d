// The kernels of one instruction set, as the dispatcher sees them.
#pragma once

#include "cpu/launch.h"

namespace jaxflash::cpu {

struct Kernels {
  const char* instruction_set;
  bool (*forward)(const Problem&, const ForwardResults&, Executor&);
  bool (*backward)(const Problem&, const BackwardInputs&, const BackwardResults&, Executor&);
};

namespace baseline {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}

}  // namespace jaxflash::cpu
