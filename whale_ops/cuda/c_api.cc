// What this library offers to the core, and a C ABI for tests/whale_ops/device/cuda_rank.py: one rank with one GPU, its own computation's stream,
// and host exchanges by callback. Functions of the latter return a status code (core/base/types.h); whale_cuda_last_error() is the message.
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "whale_ops/cuda/reducer.h"

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
  std::unique_ptr<whale::Device> reducer;
  cudaStream_t computation = nullptr;
};

Status count(int* devices) { return whale::cuda::check(cudaGetDeviceCount(devices), "cudaGetDeviceCount"); }

Status open(const char* transport, int rank, int size, int ordinal, size_t buffer_bytes, whale::DeviceGather gather,
            std::unique_ptr<whale::Device>* device) {
  std::unique_ptr<whale::cuda::DeviceTransport> opened;
  std::unique_ptr<whale::cuda::Reducer> reducer;
  Status status = whale::cuda::check(cudaSetDevice(ordinal), "cudaSetDevice");
  if (!status.ok()) return status;
  if (std::strcmp(transport, "cuda-ipc") == 0) {
    status = whale::cuda::open_ipc(rank, size, buffer_bytes, std::move(gather), &opened);
  } else {
    status = whale::cuda::open_nccl(rank, size, gather, &opened);
  }
  if (status.ok()) status = whale::cuda::Reducer::open(std::move(opened), ordinal, buffer_bytes, &reducer);
  if (status.ok()) *device = std::move(reducer);
  return status;
}

}  // namespace

extern "C" {

WHALE_EXPORT extern const whale::DevicePlugin whale_device_plugin;
const whale::DevicePlugin whale_device_plugin = {WHALE_CORE_DIGEST, count, open};

using WhaleCudaGather = int (*)(const void* mine, size_t bytes, void* all);

WHALE_EXPORT const char* whale_cuda_last_error() { return last_error.c_str(); }

WHALE_EXPORT int whale_cuda_devices(int* count) { return report(::count(count)); }

// `transport`: "nccl" or "cuda-ipc".
WHALE_EXPORT int whale_cuda_open(const char* transport, int rank, int size, int device, size_t buffer_bytes, WhaleCudaGather gather, void** handle) {
  const whale::DeviceGather exchange = [gather](const void* mine, size_t bytes, void* all) {
    return gather(mine, bytes, all) == 0 ? Status::Ok() : Status::Error(Code::kUnavailable, "the ranks could not meet on the host");
  };
  auto made = std::make_unique<Rank>();
  Status status = open(transport, rank, size, device, buffer_bytes, exchange, &made->reducer);
  if (status.ok()) status = whale::cuda::check(cudaStreamCreate(&made->computation), "cudaStreamCreate");
  if (status.ok()) *handle = made.release();
  return report(status);
}

// Tensors of host memory are copied to the device, reduced there, and copied back, all on streams.
WHALE_EXPORT int whale_cuda_all_reduce(void* handle, void** tensors, const int64_t* counts, int size, int dtype, int element_bytes, int wire,
                                       int reduction, float scale) {
  auto* rank = static_cast<Rank*>(handle);
  whale::DeviceReduction what{std::vector<whale::DeviceTensor>(static_cast<size_t>(size)), static_cast<DType>(dtype), static_cast<DType>(wire),
                              static_cast<whale::Reduction>(reduction), scale};
  Status status;
  for (int i = 0; i < size && status.ok(); ++i) {
    whale::DeviceTensor& tensor = what.tensors[static_cast<size_t>(i)];
    const size_t bytes = static_cast<size_t>(counts[i] * element_bytes);
    tensor.count = counts[i];
    status = whale::cuda::check(cudaMallocAsync(&tensor.output, bytes + 1, rank->computation), "cudaMallocAsync");
    tensor.input = tensor.output;
    if (!status.ok()) break;
    status = whale::cuda::check(cudaMemcpyAsync(tensor.output, tensors[i], bytes, cudaMemcpyHostToDevice, rank->computation), "cudaMemcpyAsync");
  }
  void* mark = nullptr;
  if (status.ok()) status = rank->reducer->mark(rank->computation, &mark);
  if (status.ok()) status = rank->reducer->launch(what, mark);
  for (bool finished = false; status.ok() && !finished;) status = rank->reducer->finished(mark, &finished);
  rank->reducer->release(mark);
  for (int i = 0; i < size; ++i) {
    void* data = what.tensors[static_cast<size_t>(i)].output;
    const size_t bytes = static_cast<size_t>(counts[i] * element_bytes);
    if (status.ok()) {
      status = whale::cuda::check(cudaMemcpyAsync(tensors[i], data, bytes, cudaMemcpyDeviceToHost, rank->computation), "cudaMemcpyAsync");
    }
    if (data != nullptr) cudaFreeAsync(data, rank->computation);
  }
  if (status.ok()) status = whale::cuda::check(cudaStreamSynchronize(rank->computation), "cudaStreamSynchronize");
  return report(status);
}

WHALE_EXPORT void whale_cuda_close(void* handle) {
  auto* rank = static_cast<Rank*>(handle);
  rank->reducer.reset();
  cudaStreamDestroy(rank->computation);
  delete rank;
}

}  // extern "C"
