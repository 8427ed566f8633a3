// Adds tensors in device memory up over the ranks, beside the computation.
#pragma once

#include <memory>
#include <vector>

#include "kernels.h"
#include "transport.h"

namespace whale::cuda {

// Packs, sends and unpacks on a stream of its own. The computation's stream is only asked for events: start() takes what
// was queued there before, wait() holds up what is queued there after.
class Reducer {
 public:
  // `max_bytes`: of the packed tensors.
  static Status open(std::unique_ptr<DeviceTransport> transport, size_t max_bytes, std::unique_ptr<Reducer>* reducer);
  ~Reducer();

  // Every tensor becomes `scale` times its sum (or other reduction) over the ranks; on the wire it has dtype `wire`.
  // Collective: same order, sizes and dtypes on all ranks.
  Status start(const std::vector<Span>& tensors, DType dtype, DType wire, Reduction reduction, float scale, cudaStream_t computation);
  Status wait(cudaStream_t computation);
  // Whether the device has finished what was started last; asks, and does not block.
  Status finished(bool* yes) const;

 private:
  Reducer() = default;

  std::unique_ptr<DeviceTransport> transport_;
  size_t max_bytes_ = 0;
  void* buffer_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t ready_ = nullptr;  // of the computation
  cudaEvent_t done_ = nullptr;   // of this stream
};

}  // namespace whale::cuda
