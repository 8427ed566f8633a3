// Operations that start in one order on all ranks.
#include <algorithm>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/whale_ops/core/core_test.h"
#include "whale_ops/core/device/launch_order.h"
#include "whale_ops/core/progress/endpoint.h"
#include "whale_ops/core/progress/engine.h"
#include "whale_ops/core/transport/in_process.h"

namespace {

using whale::Code;

// Ranks that start operations in one order. A rank's device is a list of what was started there.
class Devices {
 public:
  Devices(const char* name, int size) : devices_(size) {
    require(whale::Engine::instance()
                .add(name, whale::make_in_process_transports(size), &endpoints_)
                .ok(),
            name);
    for (int rank = 0; rank < size; ++rank)
      devices_[rank].order = std::make_shared<whale::LaunchOrder>(endpoints_[rank], "device");
  }
  ~Devices() {
    for (const auto& endpoint : endpoints_) {
      whale::Engine::instance().forget(*endpoint);
      endpoint->leave();
    }
  }
  // `then`: called when it has started.
  void ready(
      int rank, const std::string& key, const std::string& text,
      const std::function<void()>& then = [] {}) {
    std::vector<int> all(devices_.size());
    std::iota(all.begin(), all.end(), 0);
    devices_[rank].order->ready(
        {key, text, all, {}, nullptr, [this, rank, key, then](const whale::Status& status) {
           if (status.ok()) then();
           const std::lock_guard<std::mutex> lock(mutex_);
           Device& device = devices_[rank];
           status.ok() ? device.started.push_back(key) : device.errors.push_back(status);
           changed_.notify_all();
         }});
  }
  const std::vector<std::string>& started(int rank, size_t count) {
    wait([&] { return devices_[rank].started.size() >= count; });
    return devices_[rank].started;
  }
  const whale::Status& error(int rank) {
    wait([&] { return !devices_[rank].errors.empty(); });
    return devices_[rank].errors[0];
  }
  whale::Endpoint& endpoint(int rank) { return *endpoints_[rank]; }

 private:
  struct Device {
    std::shared_ptr<whale::LaunchOrder> order;
    std::vector<std::string> started;
    std::vector<whale::Status> errors;
  };
  template <typename Over>
  void wait(Over over) {
    std::unique_lock<std::mutex> lock(mutex_);
    require(changed_.wait_for(lock, std::chrono::duration<double>(kTimeoutS), over),
            "operations start in time");
  }
  std::vector<std::shared_ptr<whale::Endpoint>> endpoints_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Device> devices_;
};

// The order of a rank's own in which it has its operations ready, of each round.
std::vector<std::vector<int>> orders_of(int rank, int operations, int rounds) {
  std::mt19937 draw(rank);
  std::vector<int> order(operations);
  std::iota(order.begin(), order.end(), 0);
  std::vector<std::vector<int>> found;
  for (int round = 0; round < rounds; ++round) {
    std::shuffle(order.begin(), order.end(), draw);
    found.push_back(order);
  }
  return found;
}

}  // namespace

// Every rank is ready in an order of its own, for the same keys several times. On odd ranks each
// third operation needs the one before it to have started, on the others it is ready at any time:
// an order that did not ask those would wait for ever.
void one_order_of_starts(int size) {
  constexpr int kOperations = 30, kRounds = 3;
  Devices devices("order", size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([rank, &devices] {
      const auto orders = orders_of(rank, kOperations, kRounds);
      for (int round = 0; round < kRounds; ++round) {
        for (const int index : orders[round]) {
          const std::string key = "operation " + std::to_string(index),
                            next = "operation " + std::to_string(index + 1);
          if (rank % 2 == 0 || index % 3 == 0) {
            devices.ready(rank, key, "float32");
          } else if (index % 3 == 1) {
            devices.ready(rank, key, "float32",
                          [rank, next, &devices] { devices.ready(rank, next, "float32"); });
          }
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  const std::vector<std::string> first = devices.started(0, kOperations * kRounds);
  require(first.size() == kOperations * kRounds, "every operation starts once");
  for (int rank = 1; rank < size; ++rank)
    require(devices.started(rank, first.size()) == first, "all ranks start in the same order");
}

void starts_that_fail() {
  {
    Devices devices("order that disagrees", 3);
    for (int rank = 0; rank < 3; ++rank) devices.ready(rank, "k", rank == 1 ? "[7]" : "[8]");
    for (int rank = 0; rank < 3; ++rank) {
      require(devices.error(rank).code == Code::kInvalidArgument,
              "ranks that disagree about what they start get an error");
      require(devices.error(rank).message.find("[7]") != std::string::npos, "which says how");
      require(devices.started(rank, 0).empty(), "and none has started it");
    }
  }
  Devices devices("order that ends", 3);
  for (int rank = 0; rank < 2; ++rank) devices.ready(rank, "k", "[8]");
  devices.endpoint(2).abort(whale::Status::Error(Code::kAborted, "enough"));
  for (int rank = 0; rank < 2; ++rank)
    require(devices.error(rank).code == Code::kAborted, "an abort ends the waiting for a turn");
}
