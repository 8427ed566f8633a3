// What the core asks of a library for a device's memory (whale_ops/gpu): exchanges that are queued
// in one order on all ranks. No CUDA here: streams are TensorFlow's handles of them.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "whale_ops/core/base/types.h"

namespace whale {

// A tensor in the device's memory: `count` elements; `output` may be `input`.
struct DeviceTensor {
  const void* input = nullptr;
  void* output = nullptr;
  int64_t count = 0;
};

// A copy inside the device's memory: `rows` runs of `width` bytes, so many bytes apart.
struct DeviceCopy {
  const void* from = nullptr;
  void* to = nullptr;
  size_t from_pitch = 0;
  size_t to_pitch = 0;
  size_t width = 0;
  size_t rows = 0;
};

// One exchange, as one rank sees it. Elements lie one behind the other, a tensor's parts too.
struct DeviceOperation {
  // Equal on all ranks of the group; the n-th operation under a key is that of the others.
  std::string key;
  OpKind kind = OpKind::kAllReduce;  // all but kBarrier
  // The communicator's ranks that take part, in group order; Send, Recv: the sender, the receiver.
  std::vector<int> group;
  int index = 0;                  // of this rank in the group
  int root = 0;                   // Broadcast: index of who has the values
  DType dtype = DType::kFloat32;  // kRaw: of `element_bytes`, and only moved
  size_t element_bytes = 4;
  // AllReduce, Broadcast: any number, together. The others: one; Send has no output, Recv no input.
  std::vector<DeviceTensor> tensors;
  // AllReduce, ReduceScatter. Elements of an all-reduce have the dtype `wire` while they travel,
  // and results are times `scale`.
  Reduction reduction = Reduction::kSum;
  DType wire = DType::kFloat32;
  float scale = 1.0f;
  // Elements, as in core/collective/algorithms.h. AllGather, ReduceScatter: of each rank's part.
  // AllToAll: what goes to each rank.
  std::vector<int64_t> counts;
  std::vector<int64_t> recv_counts;  // AllToAll: what comes from each rank
  // AllToAll: of what any rank of the group sends to any; equal on all.
  int64_t largest = 0;
  std::vector<DeviceCopy> before;  // they lay the parts side by side
  std::vector<DeviceCopy> after;   // they take them apart

  size_t size() const { return group.size(); }
};

// Where each part begins that has so many elements.
inline std::vector<int64_t> offsets_of(const std::vector<int64_t>& counts) {
  std::vector<int64_t> offsets(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), offsets.begin(), int64_t{0});
  return offsets;
}

// An all-reduce as several of at most `most_elements` each, in order; tensors are cut where they
// have to be, empty ones left out.
inline std::vector<DeviceOperation> in_chunks(const DeviceOperation& whole, int64_t most_elements) {
  DeviceOperation empty = whole;
  empty.tensors.clear();
  std::vector<DeviceOperation> chunks;
  int64_t room = 0;
  for (const DeviceTensor& tensor : whole.tensors) {
    const auto* input = static_cast<const char*>(tensor.input);
    auto* output = static_cast<char*>(tensor.output);
    for (int64_t left = tensor.count; left > 0;) {
      if (room == 0) {
        chunks.push_back(empty);
        room = most_elements;
      }
      const int64_t count = std::min(room, left);
      chunks.back().tensors.push_back({input, output, count});
      input += static_cast<size_t>(count) * whole.element_bytes;
      output += static_cast<size_t>(count) * whole.element_bytes;
      left -= count;
      room -= count;
    }
  }
  return chunks;
}

// One rank's device.
class Device {
 public:
  virtual ~Device() = default;
  // TensorFlow's type of the devices whose memory it is: "GPU".
  virtual const char* kind() const = 0;
  // A mark behind what is queued on the stream so far. Any thread, the others' marks at the same
  // time too.
  virtual Status mark(void* stream, void** mark) = 0;
  virtual void release(void* mark) = 0;
  // Queues the operation behind the mark, and moves the mark behind the operation. One thread; what
  // two ranks both take part in they launch in the same order. May wait for the other ranks of the
  // group.
  virtual Status launch(const DeviceOperation& what, void* mark) = 0;
  // Whether the device has come to the mark; does not wait.
  virtual Status finished(void* mark, bool* yes) = 0;
  // Whether streams can wait for an operation by themselves: all of it is queued when it is
  // launched.
  virtual bool orders_streams() const { return false; }
  // What is queued on the stream from now on waits for the mark, and the host does not.
  virtual Status let_wait(void* /*stream*/, void* /*mark*/) {
    return Status::Error(Code::kInternal, "this device lets no stream wait");
  }
  // Ends what is under way, whose results do not count any more: when this returns the device does
  // not use its tensors. Nothing is launched afterwards.
  virtual void abandon() = 0;
};

// A device as one that copies, for exchanges through the host's memory (staged.h).
class DeviceCopies {
 public:
  virtual ~DeviceCopies() = default;
  // As in Device.
  virtual const char* kind() const = 0;
  virtual Status mark(void* stream, void** mark) = 0;
  virtual void release(void* mark) = 0;
  virtual Status finished(void* mark, bool* yes) = 0;
  // Memory of the host that the device reads and writes by itself.
  virtual Status host_memory(size_t bytes, std::shared_ptr<void>* memory) = 0;
  // Queues copies that start behind the mark `after` (null: at once), and puts `mark` behind them,
  // which is made where it is null. All copies out of the device's memory follow each other, and
  // all into it; the two do not wait for each other. One thread.
  virtual Status copy(const std::vector<DeviceCopy>& copies, bool out, void* after,
                      void** mark) = 0;
  // When this returns the device uses no memory that was named to it. Nothing is queued afterwards.
  virtual void drain() = 0;
};

// Every rank of the group (empty: all) gives `bytes` bytes, `all` receives those of all in group
// order. Collective; on the host.
using DeviceGather =
    std::function<Status(const std::vector<int>& group, const void* mine, size_t bytes, void* all)>;

// What another rank's end, or an error there, has made of the communicator: whoever waits for a
// device asks it now and then. Any thread.
using DeviceFailure = std::function<Status()>;

// What a device's library offers under the name `whale_device_plugin`.
struct DevicePlugin {
  const char* core;  // digest of the core's headers that it was built from (whale_ops/build.py)
  // How many devices there are.
  Status (*count)(int* devices);
  // `transport`: a name that the library knows; `ordinal`: of the device; `buffer_bytes`: what it
  // may hold packed. Collective.
  Status (*open)(const char* transport, int rank, int size, int ordinal, size_t buffer_bytes,
                 DeviceGather gather, const DeviceFailure& failure,
                 std::unique_ptr<Device>* device);
  // The same device, to be staged. Not collective.
  Status (*copies)(int ordinal, std::unique_ptr<DeviceCopies>* copies);
};

}  // namespace whale
