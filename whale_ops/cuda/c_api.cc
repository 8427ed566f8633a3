// A C ABI for tests/whale_ops/cuda_rank.py: one rank with one GPU, its own computation's stream, and host exchanges by callback.
// Functions return a status code (core/types.h); whale_cuda_last_error() is the message.
#include <cstring>
#include <memory>
#include <string>

#include "reducer.h"

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
  std::unique_ptr<whale::cuda::Reducer> reducer;
  cudaStream_t computation = nullptr;
};

}  // namespace

extern "C" {

using WhaleCudaGather = int (*)(const void* mine, size_t bytes, void* all);

WHALE_EXPORT const char* whale_cuda_last_error() { return last_error.c_str(); }

WHALE_EXPORT int whale_cuda_devices(int* count) { return report(whale::cuda::check(cudaGetDeviceCount(count), "cudaGetDeviceCount")); }

// `transport`: "nccl" or "ipc".
WHALE_EXPORT int whale_cuda_open(const char* transport, int rank, int size, int device, size_t max_bytes, WhaleCudaGather gather, void** handle) {
  const whale::cuda::HostGather exchange = [gather](const void* mine, size_t bytes, void* all) {
    return gather(mine, bytes, all) == 0 ? Status::Ok() : Status::Error(Code::kUnavailable, "the ranks could not meet on the host");
  };
  auto made = std::make_unique<Rank>();
  std::unique_ptr<whale::cuda::DeviceTransport> opened;
  Status status = whale::cuda::check(cudaSetDevice(device), "cudaSetDevice");
  if (status.ok()) status = whale::cuda::check(cudaStreamCreate(&made->computation), "cudaStreamCreate");
  if (!status.ok()) return report(status);
  if (std::strcmp(transport, "ipc") == 0) {
    status = whale::cuda::open_ipc(rank, size, max_bytes, exchange, &opened);
  } else {
    status = whale::cuda::open_nccl(rank, size, exchange, &opened);
  }
  if (status.ok()) status = whale::cuda::Reducer::open(std::move(opened), max_bytes, &made->reducer);
  if (status.ok()) *handle = made.release();
  return report(status);
}

// Tensors of host memory are copied to the device, reduced there, and copied back, all on streams.
WHALE_EXPORT int whale_cuda_all_reduce(void* handle, void** tensors, const int64_t* counts, int size, int dtype, int element_bytes, int wire,
                                       int reduction, float scale) {
  auto* rank = static_cast<Rank*>(handle);
  std::vector<whale::cuda::Span> spans(static_cast<size_t>(size));
  Status status;
  for (int i = 0; i < size && status.ok(); ++i) {
    const size_t bytes = static_cast<size_t>(counts[i] * element_bytes);
    spans[i].count = counts[i];
    status = whale::cuda::check(cudaMallocAsync(&spans[i].data, bytes + 1, rank->computation), "cudaMallocAsync");
    if (!status.ok()) break;
    status = whale::cuda::check(cudaMemcpyAsync(spans[i].data, tensors[i], bytes, cudaMemcpyHostToDevice, rank->computation), "cudaMemcpyAsync");
  }
  if (status.ok()) {
    status = rank->reducer->start(spans, static_cast<DType>(dtype), static_cast<DType>(wire), static_cast<whale::Reduction>(reduction), scale,
                                  rank->computation);
  }
  if (status.ok()) status = rank->reducer->wait(rank->computation);
  for (int i = 0; i < size; ++i) {
    const size_t bytes = static_cast<size_t>(counts[i] * element_bytes);
    if (status.ok()) {
      status = whale::cuda::check(cudaMemcpyAsync(tensors[i], spans[i].data, bytes, cudaMemcpyDeviceToHost, rank->computation), "cudaMemcpyAsync");
    }
    if (spans[i].data != nullptr) cudaFreeAsync(spans[i].data, rank->computation);
  }
  if (status.ok()) status = whale::cuda::check(cudaStreamSynchronize(rank->computation), "cudaStreamSynchronize");
  bool finished = false;
  if (status.ok()) status = rank->reducer->finished(&finished);
  if (status.ok() && !finished) status = Status::Error(Code::kInternal, "the computation went on before the reduction was done");
  return report(status);
}

WHALE_EXPORT void whale_cuda_close(void* handle) {
  auto* rank = static_cast<Rank*>(handle);
  rank->reducer.reset();
  cudaStreamDestroy(rank->computation);
  delete rank;
}

}  // extern "C"
