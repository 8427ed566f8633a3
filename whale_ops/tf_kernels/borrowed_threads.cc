// Thread pools beside TensorFlow's own, on cores that other ranks of the host lend while they wait.
#include "whale_ops/tf_kernels/borrowed_threads.h"

#include <sched.h>

#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/threadpool.h"

namespace whale_ops {
namespace {

using tensorflow::thread::ThreadPool;

std::mutex pools_mutex;
cpu_set_t lent_cores;  // empty: those of this process

// Wraps TensorFlow's thread pool in the interface by which an executor accepts another pool.
class OwnedPool : public tensorflow::thread::ThreadPoolInterface {
 public:
  explicit OwnedPool(std::unique_ptr<ThreadPool> pool) : pool_(std::move(pool)) {}
  void Schedule(std::function<void()> work) override { pool_->Schedule(std::move(work)); }
  void ScheduleWithHint(std::function<void()> work, int start, int end) override {
    pool_->ScheduleWithHint(std::move(work), start, end);
  }
  int NumThreads() const override { return pool_->NumThreads(); }
  int CurrentThreadId() const override { return pool_->CurrentThreadId(); }

 private:
  std::unique_ptr<ThreadPool> pool_;
};

std::unique_ptr<ThreadPool> make_pool(const char* name, int count, bool spins) {
  return std::make_unique<ThreadPool>(tensorflow::Env::Default(), tensorflow::ThreadOptions(), name,
                                      count, spins, nullptr);
}

}  // namespace

BorrowedThreads& BorrowedThreads::of(int count) {
  // Never destroyed, since a step may still be ending while the process exits.
  static auto* const made = new std::map<int, BorrowedThreads>();
  const std::lock_guard<std::mutex> lock(pools_mutex);
  const auto known = made->find(count);
  if (known != made->end()) return known->second;
  BorrowedThreads& found = (*made)[count];
  // Threads inherit the cores of the thread that creates them, which may be only this rank's own.
  std::thread([&found, count] {
    if (CPU_COUNT(&lent_cores) > 0) sched_setaffinity(0, sizeof(lent_cores), &lent_cores);
    found.within_operations = new OwnedPool(make_pool("whale_borrowed", count, true));
    ThreadPool* operations = make_pool("whale_operations", count, false).release();
    found.run_operation = [operations](std::function<void()> work) {
      operations->Schedule(std::move(work));
    };
  }).join();
  return found;
}

}  // namespace whale_ops

// Sets the cores that borrowed threads may run on, those of all ranks of the host. To be called
// before the first step that borrows threads; later calls affect only pools that are not created
// yet.
extern "C" __attribute__((visibility("default"))) void whale_lend_cores(const int* cores,
                                                                        int count) {
  const std::lock_guard<std::mutex> lock(whale_ops::pools_mutex);
  CPU_ZERO(&whale_ops::lent_cores);
  for (int i = 0; i < count; ++i) CPU_SET(cores[i], &whale_ops::lent_cores);
}
