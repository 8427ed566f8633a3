#include "whale_ops/core/device/device_rank.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <map>
#include <utility>

#include "whale_ops/core/device/staged.h"
#include "whale_ops/core/progress/exchange.h"

namespace whale {
namespace {

// How often the device is asked whether it has finished, while operations are under way.
constexpr auto kLookEvery = std::chrono::microseconds(20);

struct Registry {
  std::mutex mutex;
  std::map<std::pair<std::string, int>, std::shared_ptr<DeviceRank>> ranks;
};

// Never destroyed, because TensorFlow's threads may still use it while the process exits.
Registry& registry() {
  static auto* made = new Registry();
  return *made;
}

}  // namespace

DeviceRank::DeviceRank(std::shared_ptr<Endpoint> endpoint)
    : endpoint_(std::move(endpoint)), order_(std::make_shared<LaunchOrder>(endpoint_, "device")) {}

DeviceRank::~DeviceRank() { stop(); }

Status DeviceRank::open(const std::shared_ptr<Endpoint>& endpoint, const DevicePlugin* plugin,
                        const char* transport, int ordinal, size_t buffer_bytes) {
  const std::shared_ptr<DeviceRank> made(new DeviceRank(endpoint));
  DeviceRank* self = made.get();  // the device does not outlive this object
  const DeviceGather gather = [self](const std::vector<int>& group, const void* mine, size_t bytes,
                                     void* all) { return self->gather(group, mine, bytes, all); };
  const DeviceFailure failure = [self] { return self->endpoint_->failure(); };
  Status status;
  if (std::strcmp(transport, kPinned) == 0) {
    std::unique_ptr<DeviceCopies> copies = plugin == nullptr ? host_copies() : nullptr;
    if (plugin != nullptr) status = plugin->copies(ordinal, &copies);
    if (status.ok())
      status = open_staged(endpoint, std::move(copies), buffer_bytes, &made->device_);
  } else if (plugin == nullptr) {
    status = Status::Error(Code::kInvalidArgument,
                           std::string("a rank without a device takes part in exchanges by '") +
                               kPinned + "' only; set communication.backend to it");
  } else {
    status = plugin->open(transport, endpoint->rank(), endpoint->size(), ordinal, buffer_bytes,
                          gather, failure, &made->device_);
  }
  if (!status.ok()) return status;
  made->thread_ = std::thread([self] { self->run(); });
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().ranks[{endpoint->name(), endpoint->rank()}] = made;
  return status;
}

std::shared_ptr<DeviceRank> DeviceRank::find(const std::string& communicator, int rank,
                                             Status* status) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  const auto found = registry().ranks.find({communicator, rank});
  if (found != registry().ranks.end()) return found->second;
  *status = Status::Error(Code::kUnavailable,
                          "rank " + std::to_string(rank) + " of communicator '" + communicator +
                              "' has opened no device; set communication.backend before wh.init, "
                              "and run the step before wh.shutdown");
  return nullptr;
}

void DeviceRank::close(const Endpoint& endpoint) {
  std::shared_ptr<DeviceRank> found;
  {
    const std::lock_guard<std::mutex> lock(registry().mutex);
    const auto entry = registry().ranks.find({endpoint.name(), endpoint.rank()});
    if (entry == registry().ranks.end()) return;
    found = std::move(entry->second);
    registry().ranks.erase(entry);
  }
  found->stop();
}

void DeviceRank::start(DeviceCall call) {
  auto running = std::make_shared<Running>();
  running->call = std::move(call);
  running->ready_ns = now_ns();
  const auto mark = [self = shared_from_this(), running] {
    return self->device_->mark(running->call.stream, &running->mark);
  };
  LaunchOrder::Call order{running->call.what.key,
                          std::move(running->call.text),
                          running->call.what.group,
                          std::move(running->call.tells),
                          nullptr,
                          nullptr};
  if (running->call.complete != nullptr) {
    order.met = [running, mark](const LaunchOrder::Told& told) {
      const Status status = running->call.complete(told, &running->call.what);
      return status.ok() ? mark() : status;
    };
  } else if (const Status marked = mark(); !marked.ok()) {
    endpoint_->abort(marked);  // the others wait for this rank
    return end(running, marked);
  }
  order.launch = [self = shared_from_this(), running](const Status& status) {
    running->turn = status;
    {
      const std::lock_guard<std::mutex> lock(self->mutex_);
      if (!self->stopping_) {
        self->turns_.push_back(running);
        self->changed_.notify_one();
        return;
      }
    }
    self->end(running, status.ok()
                           ? Status::Error(Code::kUnavailable,
                                           "the device was closed before this operation began")
                           : status);
  };
  running->start_ns = now_ns() - running->ready_ns;
  order_->ready(std::move(order));
}

// Called only by the thread that opens or launches, so that gathers of a group happen in the same
// order on every rank.
Status DeviceRank::gather(const std::vector<int>& group, const void* mine, size_t bytes,
                          void* all) {
  std::promise<Status> outcome;
  const std::string key = "device/gather" + (group.empty() ? "" : " " + join_ranks(group));
  gather_bytes(
      endpoint_, endpoint_->reserve(), key, "", "", group,
      std::string(static_cast<const char*>(mine), bytes),
      [&](Status status, std::vector<std::string> parts) {
        auto* to = static_cast<char*>(all);
        for (const std::string& part : parts) {
          if (part.size() != bytes)
            status = Status::Error(
                Code::kInternal,
                "the ranks exchange data of different sizes about their devices; report this");
        }
        for (size_t i = 0; status.ok() && i < parts.size(); ++i)
          std::copy(parts[i].begin(), parts[i].end(), to + i * bytes);
        outcome.set_value(status);
      });
  return outcome.get_future().get();
}

void DeviceRank::run() {
  for (;;) {
    std::vector<RunningPtr> turns;  // unlike a deque, no memory where there are none: most times
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const auto has_turn = [this] { return stopping_ || !turns_.empty(); };
      if (running_.empty()) {
        changed_.wait(lock, has_turn);
      } else if (turns_.empty()) {
        changed_.wait_for(lock, kLookEvery);
      }
      turns.swap(turns_);
      if (turns.empty() && running_.empty() && stopping_) return;
    }
    for (const RunningPtr& turn : turns) begin(turn);
    look();
  }
}

void DeviceRank::begin(const RunningPtr& running) {
  if (!failure_.ok() || !running->turn.ok())
    return end(running, failure_.ok() ? running->turn : failure_);
  running->launch_ns = now_ns();
  Status status = device_->launch(running->call.what, running->mark);
  running_.push_back(running);  // also after an error, since part of it may have been queued
  if (status.ok() && running->call.in_stream && device_->orders_streams()) {
    // Has to come before anything is queued that reads the results or reuses the inputs' memory.
    status = device_->let_wait(running->call.stream, running->mark);
    if (status.ok()) tell(running, status);
  }
  if (!status.ok()) {
    failure_ = status;
    endpoint_->abort(status);  // the other ranks have queued the operation, or will
  }
}

// Finishes the operations that the device has completed; after an error of any rank, all of them.
void DeviceRank::look() {
  while (!running_.empty()) {
    bool yes = false;
    if (failure_.ok()) {
      failure_ = device_->finished(running_.front()->mark, &yes);
      if (!failure_.ok()) endpoint_->abort(failure_);
    }
    if (yes) {
      end(running_.front(), Status::Ok());
      running_.pop_front();
      continue;
    }
    if (failure_.ok()) failure_ = endpoint_->failure();
    if (failure_.ok()) return;
    device_->abandon();
    for (const RunningPtr& running : std::exchange(running_, {})) end(running, failure_);
  }
}

void DeviceRank::end(const RunningPtr& running, const Status& status) {
  if (running->mark != nullptr) device_->release(running->mark);
  if (!running->told) tell(running, status);
}

void DeviceRank::tell(const RunningPtr& running, const Status& status) {
  running->told = true;
  if (status.ok()) {
    const DeviceOperation& what = running->call.what;
    Record record;
    record.key = running->call.in_stream && device_->orders_streams() ? kInStream : kWaitedFor;
    record.kind = what.kind;
    record.algorithm = "device";
    record.call = told_++;
    for (const DeviceTensor& tensor : what.tensors)
      record.logical_bytes += tensor.count * static_cast<int64_t>(what.element_bytes);
    record.ready_ns = running->ready_ns;
    record.first_ns = std::max(running->ready_ns, running->launch_ns - running->start_ns);
    record.end_ns = now_ns();
    endpoint_->recorder().add(record);
  }
  running->call.done(status);
}

void DeviceRank::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace whale
