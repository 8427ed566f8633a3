// All-reduces of device memory: through NCCL between GPUs, or by reading each other's memory where ranks share one.
#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "whale_ops/core/device/device.h"

namespace whale::cuda {

// Ends with an error that names the call.
Status check(cudaError_t error, const char* call);

// One rank's end, with one GPU. All ranks make the same calls in the same order: neither NCCL nor the exchange of events finds
// out by itself which of several operations under way a rank means.
class DeviceTransport {
 public:
  virtual ~DeviceTransport() = default;
  virtual const char* name() const = 0;
  // Adds `buffer`, of `count` elements, up over the ranks, in place, on the stream.
  virtual Status all_reduce(void* buffer, int64_t count, DType dtype, Reduction reduction, cudaStream_t stream) = 0;
  // After an error: what is queued ends, whatever the other ranks do. No all_reduce follows.
  virtual void abandon() = 0;
};

// Ranks with a GPU each, on one host or several. Collective. An error where this library was built without NCCL.
Status open_nccl(int rank, int size, const DeviceGather& gather, std::unique_ptr<DeviceTransport>* transport);

// Ranks of one host whose GPUs can read each other's memory, or that share a GPU, which NCCL refuses. `max_bytes`: of a buffer.
// Every operation meets the other ranks on the host. Collective.
Status open_ipc(int rank, int size, size_t max_bytes, DeviceGather gather, std::unique_ptr<DeviceTransport>* transport);

}  // namespace whale::cuda
