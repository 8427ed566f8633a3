#include "whale_ops/gpu/marks.h"

#include <utility>

namespace whale::cuda {

Marks::~Marks() {
  for (CUevent event : free_) driver().cuEventDestroy(event);
}

Status Marks::mark(void* stream, void** mark) {
  CUevent event = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!free_.empty()) {
      event = free_.back();
      free_.pop_back();
    }
  }
  const Current current(gpu_);  // called on threads of TensorFlow
  Status status = current.status();
  if (status.ok() && event == nullptr)
    status = check(driver().cuEventCreate(&event, kEventDisableTiming), "cuEventCreate");
  if (status.ok())
    status = check(driver().cuEventRecord(event, static_cast<CUstream>(stream)), "cuEventRecord");
  *mark = event;
  if (!status.ok()) release(std::exchange(*mark, nullptr));
  return status;
}

void Marks::release(void* mark) {
  if (mark == nullptr) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(static_cast<CUevent>(mark));
}

Status Marks::finished(void* mark, bool* yes) {
  const CUresult state = driver().cuEventQuery(static_cast<CUevent>(mark));
  *yes = state == kSuccess;
  return state == kNotReady ? Status::Ok() : check(state, "cuEventQuery");
}

}  // namespace whale::cuda
