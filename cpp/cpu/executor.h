// Sharing tasks among threads. Knows no thread pool: whoever launches brings one.
//
// Nothing here is defined inline: the kernels include this header in translation units compiled for
// different instruction sets, and a shared inline function could be linked from the wrong one.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace jaxflash::cpu {

// A pool of threads that run closures, in any order, at any time.
class Executor {
 public:
  virtual ~Executor();
  virtual int64_t thread_count() const = 0;
  virtual void schedule(std::function<void()> work) = 0;
};

// Deals out the tasks 0 .. count-1, each once. Threads that finish early take more.
class TaskQueue {
 public:
  explicit TaskQueue(int64_t count);

  // The next task, or -1 when all are taken.
  int64_t next();

 private:
  const int64_t count_;
  std::atomic<int64_t> next_;
};

// Takes tasks from the queue until it yields -1. Returns false if it can't get memory, and leaves
// its tasks to the others.
using Worker = bool (*)(const void* context, TaskQueue& queue);

// Runs `worker` on the calling thread and, as far as the pool has threads to spare, on others.
// Returns once every one that started has returned: true if all tasks are done, that is, unless no
// worker could get memory.
//
// The caller only ever waits for workers that have started, never for the pool to start one, so a
// busy pool, a pool of one thread and nested calls cannot deadlock.
bool run_tasks(Executor& executor, int64_t task_count, Worker worker, const void* context);

}  // namespace jaxflash::cpu
