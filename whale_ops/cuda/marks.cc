#include "whale_ops/cuda/marks.h"

#include <utility>

#include "whale_ops/cuda/transport.h"

namespace whale::cuda {

Marks::~Marks() {
  for (cudaEvent_t event : free_) cudaEventDestroy(event);
}

Status Marks::mark(void* stream, void** mark) {
  cudaEvent_t event = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!free_.empty()) {
      event = free_.back();
      free_.pop_back();
    }
  }
  Status status = check(cudaSetDevice(ordinal_), "cudaSetDevice");  // of a thread of TensorFlow's, whose only GPU it is
  if (status.ok() && event == nullptr) status = check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  if (status.ok()) status = check(cudaEventRecord(event, static_cast<cudaStream_t>(stream)), "cudaEventRecord");
  *mark = event;
  if (!status.ok()) release(std::exchange(*mark, nullptr));
  return status;
}

void Marks::release(void* mark) {
  if (mark == nullptr) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(static_cast<cudaEvent_t>(mark));
}

Status Marks::finished(void* mark, bool* yes) {
  const cudaError_t state = cudaEventQuery(static_cast<cudaEvent_t>(mark));
  *yes = state == cudaSuccess;
  return state == cudaErrorNotReady ? Status::Ok() : check(state, "cudaEventQuery");
}

}  // namespace whale::cuda
