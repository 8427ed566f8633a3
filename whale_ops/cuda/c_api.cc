// What this library offers to the core, and a C ABI for tests/whale_ops/device/cuda_rank.py: one rank with one GPU, its own computation's stream,
// and host exchanges by callback. Functions of the latter return a status code (core/base/types.h); whale_cuda_last_error() is the message.
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "whale_ops/cuda/copies.h"
#include "whale_ops/cuda/exchanger.h"

namespace {

using whale::Code;
using whale::DType;
using whale::Status;

thread_local std::string last_error;

int report(const Status& status) {
  last_error = status.message;
  return static_cast<int>(status.code);
}

struct Rank {
  std::unique_ptr<whale::Device> device;
  cudaStream_t computation = nullptr;
  int number = 0, size = 0;
};

Status count(int* devices) { return whale::cuda::check(cudaGetDeviceCount(devices), "cudaGetDeviceCount"); }

Status open(const char* transport, int rank, int size, int ordinal, size_t buffer_bytes, whale::DeviceGather gather,
            std::unique_ptr<whale::Device>* device) {
  std::unique_ptr<whale::cuda::DeviceTransport> opened;
  std::unique_ptr<whale::cuda::Exchanger> exchanger;
  Status status = whale::cuda::check(cudaSetDevice(ordinal), "cudaSetDevice");
  if (!status.ok()) return status;
  if (std::strcmp(transport, "cuda-ipc") == 0) {
    status = whale::cuda::open_ipc(rank, size, buffer_bytes, std::move(gather), &opened);
  } else {
    status = whale::cuda::open_nccl(rank, size, std::move(gather), &opened);
  }
  if (status.ok()) status = whale::cuda::Exchanger::open(std::move(opened), ordinal, buffer_bytes, &exchanger);
  if (status.ok()) *device = std::move(exchanger);
  return status;
}

}  // namespace

extern "C" {

WHALE_EXPORT extern const whale::DevicePlugin whale_device_plugin;
const whale::DevicePlugin whale_device_plugin = {WHALE_CORE_DIGEST, count, open, whale::cuda::open_copies};

using WhaleCudaGather = int (*)(const void* mine, size_t bytes, void* all);

// Layout shared with tests/whale_ops/device/cuda_rank.py. Tensors lie in the host's memory; all ranks are the group.
struct WhaleCudaOperation {
  int32_t kind, root, dtype, wire, reduction, repeats;
  float scale;
  int64_t element_bytes, largest, tensors_size, counts_size;
  void** inputs;  // of each tensor
  void** outputs;
  const int64_t* input_counts;  // elements
  const int64_t* output_counts;
  const int64_t* counts;  // as in whale::DeviceOperation
  const int64_t* recv_counts;
  double seconds;  // of one of `repeats`, from the first one's start to the last one's end; filled in
};

WHALE_EXPORT const char* whale_cuda_last_error() { return last_error.c_str(); }

WHALE_EXPORT int whale_cuda_devices(int* count) { return report(::count(count)); }

WHALE_EXPORT int whale_cuda_device_name(int device, char* name, size_t bytes) {
  cudaDeviceProp properties = {};
  const Status status = whale::cuda::check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  std::snprintf(name, bytes, "%s", properties.name);
  return report(status);
}

// `transport`: "nccl" or "cuda-ipc".
WHALE_EXPORT int whale_cuda_open(const char* transport, int rank, int size, int device, size_t buffer_bytes, WhaleCudaGather gather, void** handle) {
  const whale::DeviceGather exchange = [gather](const std::vector<int>&, const void* mine, size_t bytes, void* all) {
    return gather(mine, bytes, all) == 0 ? Status::Ok() : Status::Error(Code::kUnavailable, "the ranks could not meet on the host");
  };
  auto made = std::make_unique<Rank>();
  made->number = rank;
  made->size = size;
  Status status = open(transport, rank, size, device, buffer_bytes, exchange, &made->device);
  if (status.ok()) status = whale::cuda::check(cudaStreamCreate(&made->computation), "cudaStreamCreate");
  if (status.ok()) *handle = made.release();
  return report(status);
}

// Tensors are copied to the device, exchanged there, and copied back, all on streams.
WHALE_EXPORT int whale_cuda_run(void* handle, WhaleCudaOperation* operation) {
  using whale::cuda::check;
  auto* rank = static_cast<Rank*>(handle);
  whale::DeviceOperation what;
  what.kind = static_cast<whale::OpKind>(operation->kind);
  for (int i = 0; i < rank->size; ++i) what.group.push_back(i);
  what.index = rank->number;
  what.root = operation->root;
  what.dtype = static_cast<DType>(operation->dtype);
  what.wire = static_cast<DType>(operation->wire);
  what.reduction = static_cast<whale::Reduction>(operation->reduction);
  what.scale = operation->scale;
  what.element_bytes = static_cast<size_t>(operation->element_bytes);
  what.counts.assign(operation->counts, operation->counts + operation->counts_size);
  what.recv_counts.assign(operation->recv_counts, operation->recv_counts + operation->counts_size);
  what.largest = operation->largest;
  Status status;
  std::vector<void*> memory;
  const auto place = [&](const void* from, int64_t count) -> void* {
    void* made = nullptr;
    const size_t bytes = static_cast<size_t>(count) * what.element_bytes;
    if (status.ok()) status = check(cudaMallocAsync(&made, bytes + 1, rank->computation), "cudaMallocAsync");
    if (status.ok() && from != nullptr) {
      status = check(cudaMemcpyAsync(made, from, bytes, cudaMemcpyHostToDevice, rank->computation), "cudaMemcpyAsync");
    }
    memory.push_back(made);
    return made;
  };
  for (int64_t i = 0; i < operation->tensors_size; ++i) {
    const void* input = place(operation->inputs[i], operation->input_counts[i]);
    void* output = what.kind == whale::OpKind::kSend ? nullptr : place(nullptr, operation->output_counts[i]);
    what.tensors.push_back({input, output, what.kind == whale::OpKind::kRecv ? operation->output_counts[i] : operation->input_counts[i]});
  }
  if (status.ok()) status = check(cudaStreamSynchronize(rank->computation), "cudaStreamSynchronize");
  void* mark = nullptr;
  if (status.ok()) status = rank->device->mark(rank->computation, &mark);
  const int64_t start_ns = whale::now_ns();
  for (int i = 0; i < operation->repeats && status.ok(); ++i) status = rank->device->launch(what, mark);
  for (bool finished = false; status.ok() && !finished;) status = rank->device->finished(mark, &finished);
  operation->seconds = static_cast<double>(whale::now_ns() - start_ns) * 1e-9 / operation->repeats;
  rank->device->release(mark);
  for (int64_t i = 0; i < operation->tensors_size && status.ok(); ++i) {
    if (what.tensors[static_cast<size_t>(i)].output == nullptr) continue;
    const size_t bytes = static_cast<size_t>(operation->output_counts[i]) * what.element_bytes;
    status = check(cudaMemcpyAsync(operation->outputs[i], what.tensors[static_cast<size_t>(i)].output, bytes, cudaMemcpyDeviceToHost, rank->computation),
                   "cudaMemcpyAsync");
  }
  for (void* data : memory) {
    if (data != nullptr) cudaFreeAsync(data, rank->computation);
  }
  if (status.ok()) status = check(cudaStreamSynchronize(rank->computation), "cudaStreamSynchronize");
  return report(status);
}

WHALE_EXPORT void whale_cuda_close(void* handle) {
  auto* rank = static_cast<Rank*>(handle);
  rank->device.reset();
  cudaStreamDestroy(rank->computation);
  delete rank;
}

}  // extern "C"
