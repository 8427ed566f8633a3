// Exchanges of GPU memory: by NCCL between GPUs, or by reading each other's memory on one host.
#pragma once

#include <memory>

#include "whale_ops/core/device/device.h"
#include "whale_ops/gpu/driver.h"

namespace whale::cuda {

// One rank's end, with one GPU. Ranks make the calls that they have in common in the same order,
// since neither NCCL nor an exchange by events can tell which of several operations a rank means.
class DeviceTransport {
 public:
  virtual ~DeviceTransport() = default;
  virtual const char* name() const = 0;
  // Reduces `input`, `count` elements of dtype `what.wire`, over the ranks of `what.group` into
  // `output`, which may be the same memory; queued on the stream.
  virtual Status all_reduce(const DeviceOperation& what, const void* input, void* output,
                            int64_t count, CUstream stream) = 0;
  // Exchanges of all other kinds, on the operation's own tensors, whose parts are contiguous.
  virtual Status exchange(const DeviceOperation& what, CUstream stream) = 0;
  // Returns an error of an operation under way that would not end by itself.
  virtual Status failure() { return Status::Ok(); }
  // Called once nothing else will be queued, before this is destroyed: makes the stream wait until
  // no other rank uses this rank's memory.
  virtual Status let_others_end(CUstream /*stream*/) { return Status::Ok(); }
  // After an error: makes everything that is queued end, whatever the other ranks do. No calls
  // follow.
  virtual void abandon() = 0;
};

// For ranks with a GPU each, on one host or several. Collective. An error if libnccl.so.2 is
// neither loaded nor found. `failure`: called while other ranks are waited for. The GPU's context
// has to be current, also in all calls of the transport.
Status open_nccl(int rank, int size, DeviceGather gather, DeviceFailure failure,
                 std::unique_ptr<DeviceTransport>* transport);

// For ranks of one host whose GPUs can read each other's memory, or that share a GPU, which NCCL
// does not allow. `max_bytes`: size of the memory that a rank shows to others. Every operation
// synchronises the ranks of its group on the host. Collective.
Status open_ipc(const Gpu& gpu, int rank, int size, size_t max_bytes, DeviceGather gather,
                DeviceFailure failure, std::unique_ptr<DeviceTransport>* transport);

}  // namespace whale::cuda
