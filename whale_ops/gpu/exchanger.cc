#include "whale_ops/gpu/exchanger.h"

#include <utility>

#include "whale_ops/gpu/queue.h"

namespace whale::cuda {
Status Exchanger::open(std::unique_ptr<DeviceTransport> transport, const Gpu& gpu,
                       size_t buffer_bytes, std::unique_ptr<Exchanger>* exchanger) {
  std::unique_ptr<Exchanger> made(new Exchanger(gpu));
  made->transport_ = std::move(transport);
  made->buffer_bytes_ = buffer_bytes;
  const Current current(gpu);
  Status status = current.status();
  // Highest priority, since other ranks wait for the small kernels of an exchange, and only this
  // GPU for those of the computation.
  if (status.ok()) status = gpu.create_stream(&made->stream_);
  if (status.ok()) status = check(driver().cuMemAlloc(&made->buffer_, buffer_bytes), "cuMemAlloc");
  if (status.ok()) *exchanger = std::move(made);
  return status;
}

Exchanger::~Exchanger() {
  const Current current(gpu_);
  if (stream_ != nullptr) {
    transport_->let_others_end(stream_);
    driver().cuStreamSynchronize(stream_);
  }
  if (buffer_ != 0) driver().cuMemFree(buffer_);
  if (stream_ != nullptr) driver().cuStreamDestroy(stream_);
  transport_.reset();
}

Status Exchanger::launch(const DeviceOperation& what, void* mark) {
  const bool reduces = what.kind == OpKind::kAllReduce;
  if ((reduces || what.kind == OpKind::kReduceScatter) &&
      !is_supported(what.dtype, reduces ? what.wire : what.dtype)) {
    return Status::Error(
        Code::kInvalidArgument,
        "tensors of this dtype cannot be reduced between GPUs; cast them to another dtype");
  }
  const auto event = static_cast<CUevent>(mark);
  const Current current(gpu_);
  Status status = current.status();
  if (status.ok())
    status = check(driver().cuStreamWaitEvent(stream_, event, 0), "cuStreamWaitEvent");
  for (const DeviceCopy& one : what.before) {
    if (status.ok()) status = queue_copy(one, stream_);
  }
  if (status.ok()) status = reduces ? all_reduce(what) : transport_->exchange(what, stream_);
  for (const DeviceCopy& one : what.after) {
    if (status.ok()) status = queue_copy(one, stream_);
  }
  const Status recorded = check(driver().cuEventRecord(event, stream_), "cuEventRecord");
  return status.ok() ? recorded : status;
}

Status Exchanger::let_wait(void* stream, void* mark) {
  const Current current(gpu_);
  const Status& status = current.status();
  return status.ok() ? check(driver().cuStreamWaitEvent(static_cast<CUstream>(stream),
                                                        static_cast<CUevent>(mark), 0),
                             "cuStreamWaitEvent")
                     : status;
}

Status Exchanger::all_reduce(const DeviceOperation& what) {
  const bool as_it_is = what.tensors.size() == 1 && what.wire == what.dtype && what.scale == 1.0f;
  Status status;
  for (const std::vector<DeviceTensor>& chunk :
       in_chunks(what, static_cast<int64_t>(buffer_bytes_ / bytes_of(what.wire)))) {
    if (!status.ok()) break;
    const DeviceTensor& first = chunk[0];
    status = as_it_is
                 ? transport_->all_reduce(what, first.input, first.output, first.count, stream_)
                 : packed(what, chunk);
  }
  return status;
}

// Packs a chunk, exchanges it and unpacks it. What follows on the stream may reuse the buffer.
Status Exchanger::packed(const DeviceOperation& what, const std::vector<DeviceTensor>& chunk) {
  std::vector<Span> inputs, outputs;
  int64_t count = 0;
  for (const DeviceTensor& tensor : chunk) {
    inputs.push_back({const_cast<void*>(tensor.input), tensor.count});
    outputs.push_back({tensor.output, tensor.count});
    count += tensor.count;
  }
  void* buffer = reinterpret_cast<void*>(buffer_);
  // Sums in float16 overflow above 65504. Dividing by a power of two that is not below the number
  // of ranks keeps them no larger than the summands.
  float divisor = 1.0f;
  if (what.reduction == Reduction::kSum && what.wire == DType::kFloat16 &&
      what.wire != what.dtype) {
    while (divisor < static_cast<float>(what.size())) divisor *= 2.0f;
  }
  Status status = pack(gpu_, inputs, what.dtype, buffer, what.wire, 1.0f / divisor, stream_);
  if (status.ok()) status = transport_->all_reduce(what, buffer, buffer, count, stream_);
  if (status.ok())
    status = unpack(gpu_, buffer, what.wire, outputs, what.dtype, what.scale * divisor, stream_);
  return status;
}

void Exchanger::abandon() {
  const Current current(gpu_);
  transport_->abandon();
  driver().cuStreamSynchronize(stream_);
}

}  // namespace whale::cuda
