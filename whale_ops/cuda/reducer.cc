#include "reducer.h"

#include <string>
#include <utility>

namespace whale::cuda {

Status Reducer::open(std::unique_ptr<DeviceTransport> transport, size_t max_bytes, std::unique_ptr<Reducer>* reducer) {
  std::unique_ptr<Reducer> made(new Reducer());
  made->transport_ = std::move(transport);
  made->max_bytes_ = max_bytes;
  int lowest = 0, highest = 0;
  Status status = check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
  // First in line: other ranks wait for its small kernels, and only this GPU for those of the computation.
  if (status.ok()) status = check(cudaStreamCreateWithPriority(&made->stream_, cudaStreamNonBlocking, highest), "cudaStreamCreateWithPriority");
  if (status.ok()) status = check(cudaEventCreateWithFlags(&made->ready_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  if (status.ok()) status = check(cudaEventCreateWithFlags(&made->done_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  if (status.ok()) status = check(cudaMalloc(&made->buffer_, max_bytes), "cudaMalloc");
  if (status.ok()) *reducer = std::move(made);
  return status;
}

Reducer::~Reducer() {
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);
  if (buffer_ != nullptr) cudaFree(buffer_);
  if (done_ != nullptr) cudaEventDestroy(done_);
  if (ready_ != nullptr) cudaEventDestroy(ready_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

Status Reducer::start(const std::vector<Span>& tensors, DType dtype, DType wire, Reduction reduction, float scale,
                      cudaStream_t computation) {
  int64_t count = 0;
  for (const Span& tensor : tensors) count += tensor.count;
  const size_t element_bytes = wire == DType::kFloat64 ? 8 : wire == DType::kFloat32 ? 4 : 2;
  if (!is_supported(dtype, wire) || static_cast<size_t>(count) * element_bytes > max_bytes_) {
    return Status::Error(Code::kInvalidArgument, std::to_string(count) + " elements do not fit the buffer of " + std::to_string(max_bytes_) +
                                                     " bytes, or cannot travel in that dtype; divide them or give another dtype");
  }
  Status status = check(cudaEventRecord(ready_, computation), "cudaEventRecord");
  if (status.ok()) status = check(cudaStreamWaitEvent(stream_, ready_, 0), "cudaStreamWaitEvent");
  if (status.ok()) status = check(pack(tensors, dtype, buffer_, wire, 1.0f, stream_), "the kernel that packs");
  if (status.ok()) status = transport_->all_reduce(buffer_, count, wire, reduction, stream_);
  if (status.ok()) status = check(unpack(buffer_, wire, tensors, dtype, scale, stream_), "the kernel that unpacks");
  if (status.ok()) status = check(cudaEventRecord(done_, stream_), "cudaEventRecord");
  return status;
}

Status Reducer::wait(cudaStream_t computation) { return check(cudaStreamWaitEvent(computation, done_, 0), "cudaStreamWaitEvent"); }

Status Reducer::finished(bool* yes) const {
  const cudaError_t state = cudaEventQuery(done_);
  *yes = state == cudaSuccess;
  return state == cudaErrorNotReady ? Status::Ok() : check(state, "cudaEventQuery");
}

}  // namespace whale::cuda
