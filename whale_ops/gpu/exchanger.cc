#include "whale_ops/gpu/exchanger.h"

#include <algorithm>
#include <utility>

#include "whale_ops/gpu/queue.h"

namespace whale::cuda {
namespace {

// What is small: this part of a buffer, 256 KiB of 32 MiB, which an H100 packs in 0.2 us
// (docs/gpu.md), less than the host takes for one event between streams.
constexpr size_t kSmallPart = 128, kLeastBytes = 256;

}  // namespace

Status Exchanger::open(std::unique_ptr<DeviceTransport> transport, const Gpu& gpu,
                       size_t buffer_bytes, std::unique_ptr<Exchanger>* exchanger) {
  std::unique_ptr<Exchanger> made(new Exchanger(gpu));
  made->transport_ = std::move(transport);
  made->buffer_bytes_ = buffer_bytes;
  const Current current(gpu);
  Status status = current.status();
  // Highest priority, since other ranks wait for the small kernels of an exchange, and only this
  // GPU for those of the computation.
  for (CUstream* stream : {&made->stream_, &made->packing_, &made->unpacking_}) {
    if (status.ok()) status = gpu.create_stream(stream);
  }
  const auto create_event = [&status](CUevent* event) {
    if (status.ok())
      status = check(driver().cuEventCreate(event, kEventDisableTiming), "cuEventCreate");
  };
  const auto allocate = [&status](CUdeviceptr* memory, size_t bytes) {
    if (status.ok()) status = check(driver().cuMemAlloc(memory, bytes), "cuMemAlloc");
  };
  create_event(&made->behind_);
  allocate(&made->small_, std::max(buffer_bytes / kSmallPart, kLeastBytes));
  for (Buffer& buffer : made->buffers_) {
    create_event(&buffer.free);
    allocate(&buffer.memory, buffer_bytes);
  }
  if (status.ok()) *exchanger = std::move(made);
  return status;
}

Exchanger::~Exchanger() {
  const Current current(gpu_);
  if (stream_ != nullptr) {
    transport_->let_others_end(stream_);
    synchronize();
  }
  for (const CUdeviceptr memory : {small_, buffers_[0].memory, buffers_[1].memory}) {
    if (memory != 0) driver().cuMemFree(memory);
  }
  for (CUevent event : {behind_, buffers_[0].free, buffers_[1].free}) {
    if (event != nullptr) driver().cuEventDestroy(event);
  }
  for (CUstream stream : {packing_, stream_, unpacking_}) {
    if (stream != nullptr) driver().cuStreamDestroy(stream);
  }
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
  CUstream last = stream_;
  if (status.ok())
    status = reduces ? all_reduce(what, event, &last) : transport_->exchange(what, stream_);
  for (const DeviceCopy& one : what.after) {
    if (status.ok()) status = queue_copy(one, last);
  }
  const Status recorded = check(driver().cuEventRecord(event, last), "cuEventRecord");
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

Status Exchanger::make_wait(CUstream later, CUstream earlier) {
  if (later == earlier) return Status::Ok();
  const Status status = check(driver().cuEventRecord(behind_, earlier), "cuEventRecord");
  return status.ok() ? check(driver().cuStreamWaitEvent(later, behind_, 0), "cuStreamWaitEvent")
                     : status;
}

Status Exchanger::all_reduce(const DeviceOperation& what, CUevent mark, CUstream* last) {
  const bool as_it_is = what.tensors.size() == 1 && what.wire == what.dtype && what.scale == 1.0f;
  const size_t element_bytes = bytes_of(what.wire);
  const auto chunks = in_chunks(what, static_cast<int64_t>(buffer_bytes_ / element_bytes));
  size_t bytes = 0;
  for (const DeviceTensor& tensor : what.tensors)
    bytes += static_cast<size_t>(tensor.count) * element_bytes;
  const bool is_small = bytes <= buffer_bytes_ / kSmallPart;
  Status status;
  if (!as_it_is && !is_small) {
    *last = unpacking_;
    if (!what.before.empty()) status = make_wait(packing_, stream_);
  }
  for (const std::vector<DeviceTensor>& chunk : chunks) {
    if (!status.ok()) break;
    const DeviceTensor& first = chunk[0];
    status = as_it_is
                 ? transport_->all_reduce(what, first.input, first.output, first.count, stream_)
             : is_small ? reduce_packed(what, chunk, small_, stream_, stream_)
                        : reduce_in_turn(what, chunk, mark);
  }
  return status;
}

Status Exchanger::reduce_in_turn(const DeviceOperation& what,
                                 const std::vector<DeviceTensor>& chunk, CUevent mark) {
  const Buffer& buffer = buffers_[turn_++ % buffers_.size()];
  // An event that was never recorded lets whoever waits go on.
  Status status;
  for (CUevent event : {mark, buffer.free}) {
    if (status.ok())
      status = check(driver().cuStreamWaitEvent(packing_, event, 0), "cuStreamWaitEvent");
  }
  if (status.ok()) status = reduce_packed(what, chunk, buffer.memory, packing_, unpacking_);
  return status.ok() ? check(driver().cuEventRecord(buffer.free, unpacking_), "cuEventRecord")
                     : status;
}

Status Exchanger::reduce_packed(const DeviceOperation& what, const std::vector<DeviceTensor>& chunk,
                                CUdeviceptr memory, CUstream packing, CUstream unpacking) {
  std::vector<Span> inputs, outputs;
  int64_t count = 0;
  for (const DeviceTensor& tensor : chunk) {
    inputs.push_back({const_cast<void*>(tensor.input), tensor.count});
    outputs.push_back({tensor.output, tensor.count});
    count += tensor.count;
  }
  void* buffer = reinterpret_cast<void*>(memory);
  // Sums in float16 overflow above 65504. Dividing by a power of two that is not below the number
  // of ranks keeps them no larger than the summands.
  float divisor = 1.0f;
  if (what.reduction == Reduction::kSum && what.wire == DType::kFloat16 &&
      what.wire != what.dtype) {
    while (divisor < static_cast<float>(what.size())) divisor *= 2.0f;
  }
  Status status = pack(gpu_, inputs, what.dtype, buffer, what.wire, 1.0f / divisor, packing);
  if (status.ok()) status = make_wait(stream_, packing);
  if (status.ok()) status = transport_->all_reduce(what, buffer, buffer, count, stream_);
  if (status.ok()) status = make_wait(unpacking, stream_);
  if (status.ok())
    status = unpack(gpu_, buffer, what.wire, outputs, what.dtype, what.scale * divisor, unpacking);
  return status;
}

void Exchanger::synchronize() {
  for (CUstream stream : {packing_, stream_, unpacking_}) driver().cuStreamSynchronize(stream);
}

void Exchanger::abandon() {
  const Current current(gpu_);
  transport_->abandon();
  synchronize();
}

}  // namespace whale::cuda
