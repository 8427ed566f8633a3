// One rank's exchanges in a device's memory: in one order on all ranks, each told when the device
// has done it.
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

// The tensors must live until `done`.
struct DeviceCall {
  std::string text;  // what must be equal on all ranks of the group (shapes, dtype)
  DeviceOperation what;
  void* stream = nullptr;  // the operation starts behind what is queued there
  // The operation is done when it has been queued: what is queued on `stream` afterwards waits for
  // it there. Where the device does not order streams it is done as all others are. An error that
  // comes later is that of the operations after it.
  bool in_stream = false;
  // What the rank tells its group before the operation starts: so many numbers on all ranks.
  std::vector<int64_t> tells;
  // Where the operation is not complete before: called when all are ready, on the engine's thread,
  // with what they tell.
  std::function<Status(const LaunchOrder::Told&, DeviceOperation*)> complete;
  // Called once, on any thread, when the device has written the results, or, of what is in stream,
  // will write them; or with an error. Must not block.
  std::function<void(const Status&)> done;
};

constexpr char kPinned[] = "pinned";  // the transport through the host's memory

// Under these keys the recorder counts operations when they are told to be done: from the call of
// `start`, waiting for their turn. What is left is this rank's own time, and, of what is waited
// for, the device's.
constexpr char kInStream[] = "device/done in stream", kWaitedFor[] = "device/done waited for";

class WHALE_EXPORT DeviceRank : public std::enable_shared_from_this<DeviceRank> {
 public:
  // Opens the device for the endpoint's rank; TensorFlow's ops find it from then on. Collective.
  // `transport`: kPinned, where ranks without a device of their own (`plugin` is null) take part
  // with the host's memory, or a name that the plugin knows.
  static Status open(const std::shared_ptr<Endpoint>& endpoint, const DevicePlugin* plugin,
                     const char* transport, int ordinal, size_t buffer_bytes);
  // Null with a status that says so, where none is open.
  static std::shared_ptr<DeviceRank> find(const std::string& communicator, int rank,
                                          Status* status);
  // Waits for what is under way and gives the device back; nothing where none is open. Before the
  // endpoint leaves.
  static void close(const Endpoint& endpoint);

  ~DeviceRank();
  const Device& device() const { return *device_; }
  const std::shared_ptr<Endpoint>& endpoint() const { return endpoint_; }

  // Starts an operation as soon as all ranks of its group are ready for it: the n-th call under a
  // key is that of the other ranks.
  void start(DeviceCall call);

 private:
  struct Running {
    DeviceCall call;
    void* mark = nullptr;
    Status turn;        // the error because of which it cannot start
    bool told = false;  // whether `done` has been called
    int64_t ready_ns = 0, launch_ns = 0;
    int64_t start_ns = 0;  // that `start` has taken
  };
  using RunningPtr = std::shared_ptr<Running>;

  explicit DeviceRank(std::shared_ptr<Endpoint> endpoint);
  Status gather(const std::vector<int>& group, const void* mine, size_t bytes, void* all);
  void run();
  void begin(const RunningPtr& running);
  void look();
  void end(const RunningPtr& running, const Status& status);
  void tell(const RunningPtr& running, const Status& status);
  void stop();

  const std::shared_ptr<Endpoint> endpoint_;
  const std::shared_ptr<LaunchOrder> order_;
  std::unique_ptr<Device> device_;
  std::thread thread_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<RunningPtr> turns_;  // in the order in which they start
  bool stopping_ = false;

  // The thread's.
  std::deque<RunningPtr> running_;
  uint64_t told_ = 0;
  Status failure_;
};

}  // namespace whale
