// Events as marks on streams (core/device/device.h), used again when they are given back.
#pragma once

#include <mutex>
#include <vector>

#include "whale_ops/core/device/device.h"
#include "whale_ops/gpu/driver.h"

namespace whale::cuda {

class Marks {
 public:
  // Any thread.
  explicit Marks(const Gpu& gpu) : gpu_(gpu) {}
  ~Marks();
  Status mark(void* stream, void** mark);
  void release(void* mark);
  static Status finished(void* mark, bool* yes);

 private:
  const Gpu& gpu_;
  std::mutex mutex_;  // guards what follows
  std::vector<CUevent> free_;
};

}  // namespace whale::cuda
