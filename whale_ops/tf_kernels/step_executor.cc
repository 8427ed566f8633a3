// Runs a step's operations on the thread that calls the step. TensorFlow's own executor hands them
// to a pool of threads while the caller sleeps. Where a rank has one core, a small step then spends
// most of its time waking threads, and on threads of the pool that look for work.
// Decision: 0227 (docs/decisions).
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "tensorflow/core/common_runtime/executor.h"
#include "tensorflow/core/common_runtime/executor_factory.h"
#include "tensorflow/core/common_runtime/local_executor_params.h"
#include "tensorflow/core/common_runtime/process_util.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/graph/graph.h"
#include "tensorflow/core/platform/denormal.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/setround.h"
#include "whale_ops/core/base/types.h"

namespace whale_ops {
namespace {

using tensorflow::Executor;
using Work = std::function<void()>;

// After so long a step may use further threads, so that one operation computes while another one
// waits. On one core they rather disturb each other, except where the core of another rank is free.
constexpr int64_t kAloneOnOneCoreNs = 10'000'000;
constexpr int64_t kAloneNs = 100'000;
// How often a thread looks whether work waits for a caller that is blocked in an operation.
constexpr std::chrono::milliseconds kWatch{10};
// With more cores, waking is cheap beside what a step computes, and TensorFlow's pool, in which
// each thread has a queue of its own, serves better.
constexpr int kMostCores = 4;

// What executors have to run: each step's work in a queue of its own. The thread that calls a step
// takes from its queue, so that no other step's operations hold it up. Helpers take from those of
// steps that have run for some time, and what comes after a step's end (a dataset's threads keep
// the runner that the dataset began with).
class StepThreads {
 public:
  // One call of a step.
  struct Run {
    std::deque<Work> queue;
    std::condition_variable caller;
    int64_t since_ns = 0;
    bool waits = false;  // the caller, for work
    bool over = false;
    bool left = false;  // by the caller
  };

  static StepThreads& instance() {
    static auto* const made = new StepThreads();  // threads may still run while the process exits
    return *made;
  }

  // cores: of this rank. inter_op: how many threads may run operations, the caller among them.
  void start(int cores, int inter_op) {
    const std::lock_guard<std::mutex> lock(mutex_);
    shares_ = inter_op > 1;
    alone_ns_ = cores > 1 ? kAloneNs : kAloneOnOneCoreNs;
    while (static_cast<int>(threads_.size()) < std::max(1, inter_op - 1)) {
      const bool watches = threads_.empty();
      threads_.emplace_back(tensorflow::Env::Default()->StartThread(
          {}, "whale_step", [this, watches] { help(watches); }));
    }
  }

  void push(Run* run, Work work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    (run->left ? left_ : run->queue).push_back(std::move(work));
    if (run->waits) {
      run->caller.notify_one();
    } else if (run->left || may_help(*run)) {
      helping_.notify_one();
    }
  }

  // Calls `begin` with a callback, and runs what is queued until the callback has been called.
  void call(Run* run, const std::function<void(Work)>& begin) {
    const tensorflow::port::ScopedFlushDenormal flush;
    const tensorflow::port::ScopedSetRound round(FE_TONEAREST);
    std::unique_lock<std::mutex> lock(mutex_);
    run->since_ns = whale::now_ns();
    runs_.push_back(run);
    if (watch_sleeps_) helping_.notify_all();
    lock.unlock();
    begin([this, run] {
      const std::lock_guard<std::mutex> ending(mutex_);
      run->over = true;
      run->caller.notify_one();
    });
    lock.lock();
    while (!run->over) {
      if (run->queue.empty()) {
        run->waits = true;
        run->caller.wait(lock);
        run->waits = false;
      } else {
        run_first(&run->queue, &lock);
      }
    }
    run->left = true;
    runs_.erase(std::find(runs_.begin(), runs_.end(), run));
    if (run->queue.empty()) return;
    std::move(run->queue.begin(), run->queue.end(), std::back_inserter(left_));
    run->queue.clear();
    helping_.notify_one();
  }

 private:
  bool may_help(const Run& run) const {
    return shares_ && whale::now_ns() - run.since_ns > alone_ns_;
  }

  std::deque<Work>* find_work() {
    if (!left_.empty()) return &left_;
    for (Run* run : runs_) {
      if (!run->queue.empty() && may_help(*run)) return &run->queue;
    }
    return nullptr;
  }

  static void run_first(std::deque<Work>* queue, std::unique_lock<std::mutex>* lock) {
    Work work = std::move(queue->front());
    queue->pop_front();
    lock->unlock();
    work();
    work = nullptr;  // what it holds ends without the lock, too
    lock->lock();
  }

  void help(bool watches) {
    const tensorflow::port::ScopedFlushDenormal flush;
    const tensorflow::port::ScopedSetRound round(FE_TONEAREST);
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (std::deque<Work>* queue = find_work(); queue != nullptr) {
        if (queue->size() > 1) helping_.notify_one();
        run_first(queue, &lock);
      } else if (watches && !runs_.empty()) {
        helping_.wait_for(lock, kWatch);
      } else {
        watch_sleeps_ |= watches;
        helping_.wait(lock);
        watch_sleeps_ &= !watches;
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable helping_;
  std::vector<std::unique_ptr<tensorflow::Thread>> threads_;
  std::vector<Run*> runs_;  // whose callers have not left
  std::deque<Work> left_;   // of runs whose callers have
  int64_t alone_ns_ = kAloneNs;
  bool shares_ = false;
  bool watch_sleeps_ = false;
};

// Runs a graph by TensorFlow's executor, on the calling thread and its helpers.
class StepExecutor : public Executor {
 public:
  // alone: whether the graph waits for no other device's graph of the same step.
  StepExecutor(std::unique_ptr<Executor> executor, bool alone)
      : executor_(std::move(executor)), alone_(alone) {}

 private:
  void RunAsyncInternal(const Args& asked, DoneCallback done) override {
    if (!alone_) {
      executor_->RunAsync(asked, std::move(done));
      return;
    }
    const auto run = std::make_shared<StepThreads::Run>();
    Args args = asked;
    args.runner = [run](Work work) { StepThreads::instance().push(run.get(), std::move(work)); };
    absl::Status outcome;
    StepThreads::instance().call(run.get(), [&](const Work& over) {
      executor_->RunAsync(args, [&outcome, over](const absl::Status& status) {
        outcome = status;
        over();
      });
    });
    done(outcome);
  }

  const std::unique_ptr<Executor> executor_;
  const bool alone_;
};

class StepExecutorFactory : public tensorflow::ExecutorFactory {
 public:
  // The name is that of EXECUTOR in whale/runtime/compile/function_calls.py.
  StepExecutorFactory() { Register("WhaleStep", this); }

  absl::Status NewExecutor(const tensorflow::LocalExecutorParams& params,
                           const tensorflow::Graph& graph,
                           std::unique_ptr<Executor>* made) override {
    Executor* usual = nullptr;
    TF_RETURN_IF_ERROR(tensorflow::NewLocalExecutor(params, graph, &usual));
    made->reset(usual);
    const auto* workers = params.device->tensorflow_cpu_worker_threads();
    if (workers == nullptr || workers->num_threads > kMostCores) return absl::OkStatus();
    StepThreads::instance().start(workers->num_threads, inter_op_threads(params, *workers));
    const auto nodes = graph.op_nodes();
    const bool alone = std::none_of(nodes.begin(), nodes.end(),
                                    [](const tensorflow::Node* node) { return node->IsRecv(); });
    *made = std::make_unique<StepExecutor>(std::move(*made), alone);
    return absl::OkStatus();
  }

 private:
  static int inter_op_threads(const tensorflow::LocalExecutorParams& params,
                              const tensorflow::DeviceBase::CpuWorkerThreads& workers) {
    auto* library = params.function_library;
    const tensorflow::ConfigProto* config = library == nullptr ? nullptr : library->config_proto();
    const int configured = config == nullptr ? 0 : config->inter_op_parallelism_threads();
    if (configured > 0) return configured;
    const int set = tensorflow::NumInterOpThreadsFromEnvironment();
    return set > 0 ? set : workers.num_threads;
  }
};

[[maybe_unused]] auto* const registered = new StepExecutorFactory();

}  // namespace
}  // namespace whale_ops
