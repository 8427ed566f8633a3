// One rank's exchanges in a device's memory: started in the same order on all ranks, and reported
// when the device has finished them.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "whale_ops/core/device/device.h"
#include "whale_ops/core/device/launch_order.h"

namespace whale {

// One exchange that a kernel asks for. The tensors must live until `done` is called.
struct DeviceCall {
  std::string text;  // what must be equal on all ranks of the group (shapes, dtype)
  DeviceOperation what;
  void* stream = nullptr;  // the operation starts behind what is queued there
  // If true, the operation counts as done when it has been queued: what is queued on `stream`
  // afterwards waits for it there. Devices that do not order streams ignore this. An error that
  // comes later is reported by the operations that follow.
  bool in_stream = false;
  // Numbers that this rank tells its group before the operation starts; equally many on all ranks.
  std::vector<int64_t> tells;
  // Completes an operation that depends on what the other ranks tell: called when all ranks are
  // ready, on the engine's thread, with their numbers.
  std::function<Status(const LaunchOrder::Told&, DeviceOperation*)> complete;
  // Called once, on any thread: when the device has written the results (with in_stream: when it is
  // sure that it will), or with an error. Must not block.
  std::function<void(const Status&)> done;
};

constexpr char kPinned[] = "pinned";  // the transport through the host's memory

// Keys under which the recorder counts when operations are reported as done, in stream or after
// having been waited for. Their time runs from the call of `start`, waiting for their turn
// included.
constexpr char kInStream[] = "device/done in stream", kWaitedFor[] = "device/done waited for";

class WHALE_EXPORT DeviceRank : public std::enable_shared_from_this<DeviceRank> {
 public:
  // Opens the device for the endpoint's rank, so that TensorFlow's ops find it; collective.
  // `transport`: a name that the plugin knows, or kPinned, with which ranks without a device of
  // their own (`plugin` is null) take part with host memory.
  static Status open(const std::shared_ptr<Endpoint>& endpoint, const DevicePlugin* plugin,
                     const char* transport, int ordinal, size_t buffer_bytes);
  // Returns null, and a status that says why, if no device is open.
  static std::shared_ptr<DeviceRank> find(const std::string& communicator, int rank,
                                          Status* status);
  // Waits for what is under way and closes the device; does nothing if none is open. Has to be
  // called before the endpoint leaves.
  static void close(const Endpoint& endpoint);

  ~DeviceRank();
  const Device& device() const { return *device_; }
  const std::shared_ptr<Endpoint>& endpoint() const { return endpoint_; }

  // Starts an operation as soon as all ranks of its group are ready for it. The n-th call under a
  // key on one rank meets the n-th on the others.
  void start(DeviceCall call);

 private:
  struct Running {
    DeviceCall call;
    void* mark = nullptr;
    Status turn;        // the error that keeps it from starting
    bool told = false;  // whether `done` has been called
    int64_t ready_ns = 0, launch_ns = 0;
    int64_t start_ns = 0;  // when `start` was called
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
  std::vector<RunningPtr> turns_;  // operations in the order in which they start
  bool stopping_ = false;

  // Used by this object's own thread only.
  std::deque<RunningPtr> running_;
  uint64_t told_ = 0;
  Status failure_;
};

}  // namespace whale
