// All-reduces of device memory: through NCCL between GPUs, or by reading each other's memory where ranks share one.
#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <memory>
#include <vector>

#include "../core/types.h"

namespace whale::cuda {

// Every rank gives `bytes` bytes, `all` receives those of all ranks in rank order. Collective; on the host.
using HostGather = std::function<Status(const void* mine, size_t bytes, void* all)>;

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
};

// Ranks with a GPU each, on one host or several. Collective. An error where this library was built without NCCL.
Status open_nccl(int rank, int size, const HostGather& gather, std::unique_ptr<DeviceTransport>* transport);

// Ranks of one host whose GPUs can read each other's memory, or that share a GPU, which NCCL refuses. `max_bytes`: of a buffer.
// Every operation meets the other ranks on the host. Collective.
Status open_ipc(int rank, int size, size_t max_bytes, HostGather gather, std::unique_ptr<DeviceTransport>* transport);

}  // namespace whale::cuda
