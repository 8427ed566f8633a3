// Events as marks on streams (core/device/device.h); released events are reused.
#pragma once

#include <mutex>
#include <vector>

#include "whale_ops/core/device/device.h"
#include "whale_ops/gpu/driver.h"

namespace whale::cuda {

class Marks {
 public:
  // Callable from any thread.
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
