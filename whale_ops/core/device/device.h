// The interface between the core and a library for a device's memory (whale_ops/gpu): exchanges
// that all ranks queue in one order. No CUDA here: a stream is the handle that TensorFlow has for
// it.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "whale_ops/core/base/types.h"

namespace whale {

// A tensor in the device's memory, with `count` elements; `output` may be the same memory as
// `input`.
struct DeviceTensor {
  const void* input = nullptr;
  void* output = nullptr;
  int64_t count = 0;
};

// A copy within the device's memory: `rows` runs of `width` bytes, with a stride for each side.
struct DeviceCopy {
  const void* from = nullptr;
  void* to = nullptr;
  size_t from_pitch = 0;
  size_t to_pitch = 0;
  size_t width = 0;
  size_t rows = 0;
};

// One exchange, as one rank sees it. Elements are contiguous, and so are the parts of a tensor.
struct DeviceOperation {
  // Equal on all ranks of the group; the n-th operation under a key on one rank meets the n-th on
  // the others.
  std::string key;
  OpKind kind = OpKind::kAllReduce;  // any kind except kBarrier
  // The communicator's ranks that take part, in group order; for Send and Recv: the sender, then
  // the receiver.
  std::vector<int> group;
  int index = 0;                  // of this rank in the group
  int root = 0;                   // Broadcast: index of the rank whose values are sent
  DType dtype = DType::kFloat32;  // kRaw: elements of `element_bytes` bytes, which are only moved
  size_t element_bytes = 4;
  // AllReduce, Broadcast: any number of tensors, exchanged together. Other kinds: one tensor; Send
  // has no output, Recv no input.
  std::vector<DeviceTensor> tensors;
  // AllReduce, ReduceScatter. Elements of an all-reduce are converted to the dtype `wire` while
  // they travel, and results are multiplied by `scale`.
  Reduction reduction = Reduction::kSum;
  DType wire = DType::kFloat32;
  float scale = 1.0f;
  // Elements, as in core/collective/algorithms.h. AllGather, ReduceScatter: elements of each rank's
  // part. AllToAll: elements to send to each rank.
  std::vector<int64_t> counts;
  std::vector<int64_t> recv_counts;  // AllToAll: elements to receive from each rank
  // AllToAll: the most elements that any rank of the group sends to another one; equal on all
  // ranks.
  int64_t largest = 0;
  std::vector<DeviceCopy> before;  // copies that make parts contiguous before the exchange
  std::vector<DeviceCopy> after;   // copies that take them apart afterwards

  size_t size() const { return group.size(); }
};

// Returns the offset of each part, from the parts' numbers of elements.
inline std::vector<int64_t> offsets_of(const std::vector<int64_t>& counts) {
  std::vector<int64_t> offsets(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), offsets.begin(), int64_t{0});
  return offsets;
}

// Cuts the tensors of an all-reduce into chunks of at most `most_elements`, in order. Tensors are
// cut where necessary; empty ones are left out.
inline std::vector<std::vector<DeviceTensor>> in_chunks(const DeviceOperation& whole,
                                                        int64_t most_elements) {
  std::vector<std::vector<DeviceTensor>> chunks;
  int64_t room = 0;
  for (const DeviceTensor& tensor : whole.tensors) {
    const auto* input = static_cast<const char*>(tensor.input);
    auto* output = static_cast<char*>(tensor.output);
    for (int64_t left = tensor.count; left > 0;) {
      if (room == 0) {
        chunks.emplace_back();
        room = most_elements;
      }
      const int64_t count = std::min(room, left);
      chunks.back().push_back({input, output, count});
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
  // TensorFlow's type of the devices that own this memory, such as "GPU".
  virtual const char* kind() const = 0;
  // Creates a mark behind what is queued on the stream so far (on a GPU: an event). Callable from
  // any thread, also while other threads create marks.
  virtual Status mark(void* stream, void** mark) = 0;
  virtual void release(void* mark) = 0;
  // Queues the operation behind the mark, and moves the mark behind the operation. Called by one
  // thread. Ranks launch the operations that they have in common in the same order. May wait for
  // the other ranks of the group.
  virtual Status launch(const DeviceOperation& what, void* mark) = 0;
  // Whether the device has reached the mark; does not wait.
  virtual Status finished(void* mark, bool* yes) = 0;
  // Whether streams can wait for an operation without the host, because all of it is queued by
  // launch().
  virtual bool orders_streams() const { return false; }
  // Makes what is queued on the stream from now on wait for the mark; the host does not wait.
  virtual Status let_wait(void* /*stream*/, void* /*mark*/) {
    return Status::Error(
        Code::kInternal,
        "this device cannot make a stream wait for an operation between ranks; report this");
  }
  // Gives up what is under way, whose results no longer matter: when this returns, the device no
  // longer uses its tensors. Nothing is launched afterwards.
  virtual void abandon() = 0;
};

// A device that can copy to and from host memory, for exchanges through the host (staged.h).
class DeviceCopies {
 public:
  virtual ~DeviceCopies() = default;
  // The same as in Device.
  virtual const char* kind() const = 0;
  virtual Status mark(void* stream, void** mark) = 0;
  virtual void release(void* mark) = 0;
  virtual Status finished(void* mark, bool* yes) = 0;
  // Allocates host memory that the device can read and write directly.
  virtual Status host_memory(size_t bytes, std::shared_ptr<void>* memory) = 0;
  // Queues copies that start behind the mark `after` (null: at once), and puts `mark` behind them,
  // creating it if it is null. All copies out of the device's memory are in one order, and so are
  // all into it; the two directions do not wait for each other. Called by one thread.
  virtual Status copy(const std::vector<DeviceCopy>& copies, bool out, void* after,
                      void** mark) = 0;
  // Waits until the device uses none of the memory that it was given. Nothing is queued afterwards.
  virtual void drain() = 0;
};

// Gathers `bytes` bytes from every rank of the group (empty: all ranks) into `all`, in group order.
// Collective, on the host.
using DeviceGather =
    std::function<Status(const std::vector<int>& group, const void* mine, size_t bytes, void* all)>;

// Returns the communicator's error if another rank has ended or failed, so that whoever waits for a
// device can give up. Callable from any thread.
using DeviceFailure = std::function<Status()>;

// The functions that a device's library exports under the name `whale_device_plugin`.
struct DevicePlugin {
  const char* core;  // digest of the core's headers that it was built from (whale_ops/build.py)
  // Counts the devices.
  Status (*count)(int* devices);
  // Opens a device; collective. `transport`: a name that the library knows; `ordinal`: number of
  // the device; `buffer_bytes`: size of its buffer for packed tensors.
  Status (*open)(const char* transport, int rank, int size, int ordinal, size_t buffer_bytes,
                 DeviceGather gather, const DeviceFailure& failure,
                 std::unique_ptr<Device>* device);
  // Opens the device for copies only, for exchanges through the host. Not collective.
  Status (*copies)(int ordinal, std::unique_ptr<DeviceCopies>* copies);
};

}  // namespace whale
