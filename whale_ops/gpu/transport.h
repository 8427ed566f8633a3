// Exchanges of device memory: through NCCL between GPUs, or by reading each other's memory where
// ranks share one.
#pragma once

#include <memory>

#include "whale_ops/core/device/device.h"
#include "whale_ops/gpu/driver.h"

namespace whale::cuda {

// One rank's end, with one GPU. Ranks make the calls that they both take part in in the same order:
// neither NCCL nor the exchange of events finds out by itself which of several operations under way
// a rank means.
class DeviceTransport {
 public:
  virtual ~DeviceTransport() = default;
  virtual const char* name() const = 0;
  // Adds `input`, of `count` elements of dtype `what.wire`, up over the ranks of `what.group`, into
  // `output`, which may be the same, on the stream.
  virtual Status all_reduce(const DeviceOperation& what, const void* input, void* output,
                            int64_t count, CUstream stream) = 0;
  // All other kinds, from and to the operation's own tensors, whose parts lie side by side.
  virtual Status exchange(const DeviceOperation& what, CUstream stream) = 0;
  // An error of what is under way, which would not end by itself.
  virtual Status failure() { return Status::Ok(); }
  // After an error: what is queued ends, whatever the other ranks do. Nothing follows.
  virtual void abandon() = 0;
};

// Ranks with a GPU each, on one host or several. Collective. An error where libnccl.so.2 is neither
// loaded nor found. `failure`: asked while others are waited for. The GPU's context is current,
// also whenever a transport is called.
Status open_nccl(int rank, int size, DeviceGather gather, DeviceFailure failure,
                 std::unique_ptr<DeviceTransport>* transport);

// Ranks of one host whose GPUs can read each other's memory, or that share a GPU, which NCCL
// refuses. `max_bytes`: of what a rank shows the others at a time. Every operation meets the other
// ranks of its group on the host. Collective.
Status open_ipc(const Gpu& gpu, int rank, int size, size_t max_bytes, DeviceGather gather,
                std::unique_ptr<DeviceTransport>* transport);

}  // namespace whale::cuda
