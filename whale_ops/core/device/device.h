// What the core asks of a library for a device's memory (whale_ops/cuda): all-reduces that are queued in one order on all ranks.
// No CUDA here: streams are TensorFlow's handles of them.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "whale_ops/core/base/types.h"

namespace whale {

// A tensor in the device's memory: `count` elements; `output` may be `input`.
struct DeviceTensor {
  const void* input = nullptr;
  void* output = nullptr;
  int64_t count = 0;
};

// One all-reduce of several tensors; elements have the dtype `wire` while they travel, and results are times `scale`.
struct DeviceReduction {
  std::vector<DeviceTensor> tensors;
  DType dtype = DType::kFloat32;
  DType wire = DType::kFloat32;
  Reduction reduction = Reduction::kSum;
  float scale = 1.0f;
};

// The same as reductions of at most `most_elements` each, in order; tensors are cut where they have to be, empty ones left out.
inline std::vector<DeviceReduction> in_chunks(const DeviceReduction& whole, size_t element_bytes, int64_t most_elements) {
  DeviceReduction empty = whole;
  empty.tensors.clear();
  std::vector<DeviceReduction> chunks;
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
      input += static_cast<size_t>(count) * element_bytes;
      output += static_cast<size_t>(count) * element_bytes;
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
  // A mark behind what is queued on the stream so far. Any thread, the others' marks at the same time too.
  virtual Status mark(void* stream, void** mark) = 0;
  virtual void release(void* mark) = 0;
  // Queues the reduction behind the mark, and moves the mark behind the reduction. One thread; all ranks in the same order. May wait
  // for the other ranks.
  virtual Status launch(const DeviceReduction& what, void* mark) = 0;
  // Whether the device has come to the mark; does not wait.
  virtual Status finished(void* mark, bool* yes) = 0;
  // Ends what is under way, whose results do not count any more: when this returns the device does not use its tensors. Nothing is
  // launched afterwards.
  virtual void abandon() = 0;
};

// Every rank gives `bytes` bytes, `all` receives those of all ranks in rank order. Collective; on the host.
using DeviceGather = std::function<Status(const void* mine, size_t bytes, void* all)>;

// What a device's library offers under the name `whale_device_plugin`.
struct DevicePlugin {
  const char* core;  // digest of the core's headers that it was built from (whale_ops/build.py)
  // How many devices there are.
  Status (*count)(int* devices);
  // `transport`: a name that the library knows; `ordinal`: of the device; `buffer_bytes`: what it may hold packed. Collective.
  Status (*open)(const char* transport, int rank, int size, int ordinal, size_t buffer_bytes, DeviceGather gather, std::unique_ptr<Device>* device);
};

}  // namespace whale
