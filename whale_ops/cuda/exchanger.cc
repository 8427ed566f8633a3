#include "whale_ops/cuda/exchanger.h"

#include <string>
#include <utility>

namespace whale::cuda {
namespace {

size_t bytes_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

}  // namespace

Status Exchanger::open(std::unique_ptr<DeviceTransport> transport, int ordinal, size_t buffer_bytes, std::unique_ptr<Exchanger>* exchanger) {
  std::unique_ptr<Exchanger> made(new Exchanger(ordinal));
  made->transport_ = std::move(transport);
  made->buffer_bytes_ = buffer_bytes;
  int lowest = 0, highest = 0;
  Status status = check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
  // First in line: other ranks wait for its small kernels, and only this GPU for those of the computation.
  if (status.ok()) status = check(cudaStreamCreateWithPriority(&made->stream_, cudaStreamNonBlocking, highest), "cudaStreamCreateWithPriority");
  if (status.ok()) status = check(cudaMalloc(&made->buffer_, buffer_bytes), "cudaMalloc");
  if (status.ok()) *exchanger = std::move(made);
  return status;
}

Exchanger::~Exchanger() {
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);
  if (buffer_ != nullptr) cudaFree(buffer_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

Status Exchanger::launch(const DeviceOperation& what, void* mark) {
  const bool reduces = what.kind == OpKind::kAllReduce;
  if ((reduces || what.kind == OpKind::kReduceScatter) && !is_supported(what.dtype, reduces ? what.wire : what.dtype)) {
    return Status::Error(Code::kInvalidArgument, "tensors cannot be added up between GPUs in that dtype; give another dtype");
  }
  const auto event = static_cast<cudaEvent_t>(mark);
  Status status = check(cudaSetDevice(ordinal_), "cudaSetDevice");
  if (status.ok()) status = check(cudaStreamWaitEvent(stream_, event, 0), "cudaStreamWaitEvent");
  if (status.ok()) status = copy(what.before);
  if (reduces) {
    for (const DeviceOperation& chunk : in_chunks(what, static_cast<int64_t>(buffer_bytes_ / bytes_of(what.wire)))) {
      if (status.ok()) status = all_reduce(chunk);
    }
  } else if (status.ok()) {
    status = transport_->exchange(what, stream_);
  }
  if (status.ok()) status = copy(what.after);
  const Status recorded = check(cudaEventRecord(event, stream_), "cudaEventRecord");
  return status.ok() ? recorded : status;
}

Status Exchanger::copy(const std::vector<DeviceCopy>& copies) {
  Status status;
  for (const DeviceCopy& one : copies) {
    if (!status.ok() || one.width == 0 || one.rows == 0) continue;
    status = check(cudaMemcpy2DAsync(one.to, one.to_pitch, one.from, one.from_pitch, one.width, one.rows, cudaMemcpyDeviceToDevice, stream_),
                   "cudaMemcpy2DAsync");
  }
  return status;
}

// What follows on the stream uses the buffer when this has been unpacked.
Status Exchanger::all_reduce(const DeviceOperation& chunk) {
  std::vector<Span> inputs, outputs;
  int64_t count = 0;
  for (const DeviceTensor& tensor : chunk.tensors) {
    inputs.push_back({const_cast<void*>(tensor.input), tensor.count});
    outputs.push_back({tensor.output, tensor.count});
    count += tensor.count;
  }
  Status status = check(pack(inputs, chunk.dtype, buffer_, chunk.wire, 1.0f, stream_), "the kernel that packs");
  if (status.ok()) status = transport_->all_reduce(chunk, buffer_, count, stream_);
  if (status.ok()) status = check(unpack(buffer_, chunk.wire, outputs, chunk.dtype, chunk.scale, stream_), "the kernel that unpacks");
  return status;
}

void Exchanger::abandon() {
  transport_->abandon();
  cudaStreamSynchronize(stream_);
}

}  // namespace whale::cuda
