// Memory of one worker thread, and the loop over its tasks.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "cpu/executor.h"
#include "cpu/vector.h"

namespace jaxflash::cpu::JAXFLASH_ISA {

// Arrays cut one after another from a block, each aligned to a cache line. A first pass without a
// block only measures, so that the sizes are written once.
class Scratch {
 public:
  explicit Scratch(char* block) : block_(block) {}

  template <class T>
  T* take(int64_t count) {
    char* const at = block_ == nullptr ? nullptr : block_ + used_;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + kLine - 1) / kLine * kLine;
    return reinterpret_cast<T*>(at);
  }

  int64_t used() const { return used_; }

 private:
  static constexpr int64_t kLine = 64;
  char* block_;
  int64_t used_ = 0;
};

// Calls task(arrays, index) for every task of the queue, on as many threads as the executor has.
// `Arrays` is constructible from (sizes, Scratch&) and made once a thread. False without memory.
template <class Arrays, class Sizes, class Task>
inline bool for_each_task(Executor& executor, int64_t count, const Sizes& sizes, const Task& task) {
  struct Context {
    const Sizes& sizes;
    const Task& task;
  } context{sizes, task};
  const auto worker = [](const void* opaque, TaskQueue& queue) {
    const auto& shared = *static_cast<const Context*>(opaque);
    Scratch measure(nullptr);
    Arrays{shared.sizes, measure};
    char* const block = static_cast<char*>(std::aligned_alloc(64, measure.used() + 64));
    if (block == nullptr) return false;
    Scratch scratch(block);
    Arrays arrays{shared.sizes, scratch};
    for (int64_t index = queue.next(); index >= 0; index = queue.next()) {
      shared.task(arrays, index);
    }
    std::free(block);
    return true;
  };
  return run_tasks(executor, count, worker, &context);
}

}  // namespace jaxflash::cpu::JAXFLASH_ISA
