// Events as marks on streams (core/device/device.h), used again when they are given back.
#pragma once

#include <cuda_runtime.h>

#include <mutex>
#include <vector>

#include "whale_ops/core/device/device.h"

namespace whale::cuda {

class Marks {
 public:
  // `ordinal`: of the GPU. Any thread.
  explicit Marks(int ordinal) : ordinal_(ordinal) {}
  ~Marks();
  Status mark(void* stream, void** mark);
  void release(void* mark);
  static Status finished(void* mark, bool* yes);

 private:
  const int ordinal_;
  std::mutex mutex_;  // guards what follows
  std::vector<cudaEvent_t> free_;
};

}  // namespace whale::cuda
