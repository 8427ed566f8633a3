// One rank's all-reduces in a device's memory: in one order on all ranks, each told when the device has done it.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "whale_ops/core/device/device.h"
#include "whale_ops/core/device/launch_order.h"

namespace whale {

class WHALE_EXPORT DeviceRank : public std::enable_shared_from_this<DeviceRank> {
 public:
  using Done = std::function<void(const Status&)>;

  // Opens the device for the endpoint's rank; TensorFlow's ops find it from then on. Collective.
  static Status open(const std::shared_ptr<Endpoint>& endpoint, const DevicePlugin& plugin, const char* transport, int ordinal, size_t buffer_bytes);
  // Null with a status that says so, where none is open.
  static std::shared_ptr<DeviceRank> find(const std::string& communicator, int rank, Status* status);
  // Waits for what is under way and gives the device back; nothing where none is open. Before the endpoint leaves.
  static void close(const Endpoint& endpoint);

  ~DeviceRank();
  const Device& device() const { return *device_; }
  const std::shared_ptr<Endpoint>& endpoint() const { return endpoint_; }

  // Starts an all-reduce behind what is queued on `stream` so far, as soon as all ranks are ready for it: the n-th call under a key is
  // that of the other ranks. `text`: what else must be equal on all ranks. The tensors must live until `done`, which is called once,
  // on any thread, when the device has written the results; must not block.
  void all_reduce(const std::string& key, const std::string& text, DeviceReduction what, void* stream, Done done);

 private:
  struct Call {
    DeviceReduction what;
    void* mark = nullptr;
    Done done;
    Status turn;  // the error because of which it cannot start
  };

  explicit DeviceRank(std::shared_ptr<Endpoint> endpoint);
  Status gather(const void* mine, size_t bytes, void* all);
  void run();
  void begin(Call call);
  void look();
  void end(Call call, const Status& status);
  void stop();

  const std::shared_ptr<Endpoint> endpoint_;
  const std::shared_ptr<LaunchOrder> order_;
  std::unique_ptr<Device> device_;
  std::thread thread_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Call> turns_;  // in the order in which they start
  bool stopping_ = false;

  // The thread's.
  std::deque<Call> running_;
  Status failure_;
};

}  // namespace whale
