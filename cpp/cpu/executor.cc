#include "cpu/executor.h"

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>

namespace jaxflash::cpu {

Executor::~Executor() = default;

TaskQueue::TaskQueue(int64_t count) : count_(count), next_(0) {}

int64_t TaskQueue::next() {
  const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
  return task < count_ ? task : -1;
}

namespace {

// Outlives the call that made it: a pool may start a helper after all tasks are done.
struct SharedRun {
  SharedRun(int64_t task_count, Worker worker, const void* context)
      : queue(task_count), worker(worker), context(context) {}

  // Runs the worker unless the caller has stopped waiting for new ones.
  void help() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (closed) return;
      ++running;
    }
    const bool helped = worker(context, queue);
    std::lock_guard<std::mutex> lock(mutex);
    succeeded = succeeded || helped;
    if (--running == 0) idle.notify_all();
  }

  TaskQueue queue;
  const Worker worker;
  const void* const context;  // valid until closed
  std::mutex mutex;
  std::condition_variable idle;
  int running = 0;
  bool closed = false;
  bool succeeded = false;  // some worker has seen the queue empty
};

}  // namespace

bool run_tasks(Executor& executor, int64_t task_count, Worker worker, const void* context) {
  if (task_count <= 0) return true;
  auto run = std::make_shared<SharedRun>(task_count, worker, context);
  const int64_t helpers = std::min(executor.thread_count(), task_count) - 1;
  try {
    for (int64_t i = 0; i < helpers; ++i) executor.schedule([run] { run->help(); });
  } catch (const std::bad_alloc&) {
    // Fewer helpers, then: whoever is here does the tasks.
  }
  run->help();
  // Waits for the helpers that have started; those that have not will find the run closed.
  std::unique_lock<std::mutex> lock(run->mutex);
  run->closed = true;
  run->idle.wait(lock, [&] { return run->running == 0; });
  return run->succeeded;
}

}  // namespace jaxflash::cpu
