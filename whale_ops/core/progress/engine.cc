// Decisions: 0027, 0198. (docs/decisions)
#include "whale_ops/core/progress/engine.h"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <future>

namespace whale {
namespace {

// How the engine's thread waits for messages from other processes, by the time since something last
// happened. First it polls without pause (a small message takes a few microseconds), unless that
// was in vain lately; then it sleeps until another process rings its bell. MPI does not ring, so
// there it yields between polls, and then sleeps for short times. If the rank has only one core,
// every poll takes some microseconds from the computation that the other ranks wait for; so a sleep
// lasts a fixed part of the time waited so far, which bounds the number of polls, and lengthens the
// wait by that part at most.
constexpr int64_t kSpinNs = 20'000;
constexpr int64_t kYieldNs = 200'000;
// Over a network, the next operation of a chain is submitted some ten microseconds after the last
// one: to stay awake until then, yielding, costs less than being woken. In memory the submitting
// thread carries its operation on by itself.
constexpr int64_t kLingerNs = 60'000;
constexpr int64_t kShortSleepNs = 30'000;
constexpr int64_t kPartOfWait = 8;
constexpr int64_t kLongSleepNs = 250'000;
constexpr int64_t kIdleSleepNs = 500'000;  // if no operation of this rank waits
// Threads may start operations while this one sleeps, so it has to wake up in time to check for
// long waits.
constexpr int64_t kMaxSleepNs = 100'000'000;
// An operation of at most so many bytes is carried on by the thread that submits it: handing it to
// the engine's thread and back would take longer than the operation.
constexpr int64_t kSmallBytes = 64 << 10;
// How long the submitting thread waits for other ranks, which come within some microseconds or much
// later.
constexpr int64_t kPatienceNs = 20'000;

// Whether this thread stands in for the engine's.
thread_local bool stands_in = false;

std::atomic<bool> forked{false};

// If computing threads fill the cores, a thread that wakes up waits for the end of the running
// thread's time slice, up to a clock tick (4 ms) for each thread in front of it: longer than most
// exchanges take. The engine runs for some ten microseconds at a time. Linux 6.12 and later let a
// thread that asks for short slices run before threads with longer ones; older versions ignore or
// refuse the request, which does no harm.
constexpr uint64_t kSliceNs = 100'000;

void ask_for_short_slices() {
  // struct sched_attr of linux/sched/types.h, version 0, which not every C library declares.
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
  } attributes{};
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) != 0 ||
      attributes.policy != SCHED_OTHER)
    return;
  attributes.size = sizeof(attributes);
  attributes.runtime = kSliceNs;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace

Engine& Engine::instance() {
  static Engine* const engine = new Engine();
  return *engine;
}

Status Engine::check_not_forked() {
  if (!forked) return Status::Ok();
  return Status::Error(
      Code::kUnavailable,
      "this process was forked from one that had a communicator, and threads and MPI do not "
      "survive a fork; start the process with the 'spawn' method, or fork before wh.init");
}

Status Engine::add(const std::string& name, std::vector<std::unique_ptr<Transport>> transports,
                   std::vector<std::shared_ptr<Endpoint>>* endpoints) {
  const Status status = check_not_forked();
  if (!status.ok()) return status;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto taken = registry_.lower_bound({name, INT32_MIN});
  if (taken != registry_.end() && taken->first.first == name) {
    return Status::Error(Code::kInvalidArgument,
                         "a communicator named '" + name +
                             "' exists in this process; choose another name or leave it first");
  }
  for (auto& transport : transports) {
    auto endpoint = std::make_shared<Endpoint>(name, std::move(transport), [this] { wake(); });
    registry_[{name, endpoint->rank()}] = endpoint;
    endpoints_.push_back(endpoint);
    endpoints->push_back(std::move(endpoint));
  }
  start_locked();
  wake();
  return Status::Ok();
}

void Engine::start_locked() {
  if (running_) return;
  running_ = true;
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  // Registered after MPI's libraries were loaded, so it runs before their destructors.
  std::atexit([] { Engine::instance().stop(); });
  thread_ = std::thread([this] { run(); });
}

void Engine::call(const std::function<void()>& task) {
  std::promise<void> finished;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    start_locked();
    tasks_.push_back([&] {
      task();
      finished.set_value();
    });
    wake();
  }
  finished.get_future().wait();
}

std::shared_ptr<Endpoint> Engine::find(const std::string& name, int rank, Status* status) {
  *status = check_not_forked();
  if (!status->ok()) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<Endpoint>> found;
  for (const auto& [key, endpoint] : registry_) {
    if (key.first == name && (rank < 0 || key.second == rank)) found.push_back(endpoint);
  }
  if (found.size() == 1) return found[0];
  if (found.empty()) {
    *status = Status::Error(
        Code::kUnavailable,
        "no communicator '" + name + "'" +
            (rank < 0 ? std::string() : " with rank " + std::to_string(rank)) +
            " in this process; call wh.init before running the graph, and wh.shutdown after");
  } else {
    *status = Status::Error(Code::kInvalidArgument, "communicator '" + name + "' has " +
                                                        std::to_string(found.size()) +
                                                        " ranks in this process; give the rank");
  }
  return nullptr;
}

void Engine::forget(const Endpoint& endpoint) {
  const std::lock_guard<std::mutex> lock(mutex_);
  registry_.erase({endpoint.name(), endpoint.rank()});
}

void Engine::wake() { doorbell_.ring(); }

void Engine::submit(const std::shared_ptr<Endpoint>& endpoint, uint64_t id, Request request) {
  std::unique_lock<std::mutex> progress(progress_, std::defer_lock);
  if (stands_in || !endpoint->by_memory() || bytes_of(request) > kSmallBytes ||
      !progress.try_lock() || endpoint->closed()) {
    endpoint->submit(id, std::move(request));
    return;
  }
  stands_in = true;
  const uint32_t how = doorbell_.stand_in();
  endpoint->submit(id, std::move(request));
  const uint32_t rings = endpoint->carry_on(id, kPatienceNs, doorbell_);
  doorbell_.stand_down(how, rings);
  stands_in = false;
}

void Engine::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!running_ || stopping_ || forked) return;
    stopping_ = true;
  }
  wake();
  thread_.join();
}

void Engine::run() {
  pthread_setname_np(pthread_self(), "whale_engine");
  prctl(PR_SET_TIMERSLACK, 1000);  // wake up within 1 us of the time, not 50 us
  ask_for_short_slices();
  int64_t last_work_ns = now_ns();
  std::vector<std::shared_ptr<Endpoint>> endpoints;
  std::unique_lock<std::mutex> progress(progress_);
  bool asks = false;  // polls again without a pause, since something has happened
  for (;;) {
    // Read before looking, so that a ring while looking ends the wait.
    const uint32_t rings = doorbell_.rings();
    std::vector<std::function<void()>> tasks;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (stopping_) return;
      endpoints_.erase(std::remove_if(endpoints_.begin(), endpoints_.end(),
                                      [](const auto& e) { return e->closed(); }),
                       endpoints_.end());
      endpoints = endpoints_;
      tasks.swap(tasks_);
    }
    for (const auto& task : tasks) task();
    const int64_t now = now_ns();
    int64_t deadline_ns = now + kMaxSleepNs;
    bool worked = false;
    Watch watch;
    for (const auto& endpoint : endpoints) worked |= endpoint->poll(now);
    for (const auto& endpoint : endpoints) {
      deadline_ns = std::min(deadline_ns, endpoint->next_deadline_ns());
      watch.polling |= endpoint->needs_polling();
      watch.active |= endpoint->has_active();
      watch.between |= endpoint->between_processes();
      if (const int descriptor = endpoint->descriptor(); descriptor >= 0)
        watch.descriptors.push_back(descriptor);
    }
    if (worked) {
      if (asks) patience_.note(true);
      asks = false;
      last_work_ns = now;
      continue;
    }
    if (watch.between && watch.active && now - last_work_ns < kSpinNs &&
        (asks || patience_.waits())) {
      asks = true;
      continue;
    }
    if (asks) patience_.note(false);
    asks = false;
    idle(&progress, rings, watch, std::max<int64_t>(0, deadline_ns - now), now - last_work_ns);
  }
}

void Engine::idle(std::unique_lock<std::mutex>* progress, uint32_t rings, const Watch& watch,
                  int64_t sleep_ns, int64_t quiet_ns) {
  const bool network = watch.polling || !watch.descriptors.empty();
  if (network && watch.between && quiet_ns < (watch.active ? kYieldNs : kLingerNs)) {
    progress->unlock();
    sched_yield();
    progress->lock();
    return;
  }
  if (watch.polling) {
    const int64_t patience_ns = std::clamp(quiet_ns / kPartOfWait, kShortSleepNs, kLongSleepNs);
    sleep_ns = std::min(sleep_ns, watch.active ? patience_ns : kIdleSleepNs);
  }
  if (sleep_ns == 0) return;
  doorbell_.fall_asleep(watch.descriptors);
  progress->unlock();
  doorbell_.wait(rings, sleep_ns, watch.descriptors);
  progress->lock();
  doorbell_.awake();
}

}  // namespace whale
