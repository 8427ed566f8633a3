// Queues copies on a stream, within GPU memory or between GPU and pinned host memory; the addresses
// tell the direction.
#pragma once

#include <algorithm>

#include "whale_ops/core/device/device.h"
#include "whale_ops/gpu/driver.h"

namespace whale::cuda {

// The driver copies no rows that lie farther apart (CU_DEVICE_ATTRIBUTE_MAX_PITCH of all GPUs).
constexpr size_t kMostPitchBytes = 0x7fffffff;

inline Status queue_copy(void* to, const void* from, size_t bytes, CUstream stream) {
  if (bytes == 0) return Status::Ok();
  return check(driver().cuMemcpyAsync(address(to), address(from), bytes, stream), "cuMemcpyAsync");
}

inline Status queue_copy(const DeviceCopy& one, CUstream stream) {
  if (one.rows <= 1) return queue_copy(one.to, one.from, one.rows * one.width, stream);
  if (one.width == 0) return Status::Ok();
  if (std::max(one.from_pitch, one.to_pitch) > kMostPitchBytes) {  // then there are few rows
    Status status;
    for (size_t row = 0; row < one.rows && status.ok(); ++row) {
      status =
          queue_copy(static_cast<char*>(one.to) + row * one.to_pitch,
                     static_cast<const char*>(one.from) + row * one.from_pitch, one.width, stream);
    }
    return status;
  }
  CUmemcpy2D copy = {};
  copy.srcMemoryType = copy.dstMemoryType = kMemoryUnified;
  copy.srcDevice = address(one.from);
  copy.srcPitch = one.from_pitch;
  copy.dstDevice = address(one.to);
  copy.dstPitch = one.to_pitch;
  copy.WidthInBytes = one.width;
  copy.Height = one.rows;
  return check(driver().cuMemcpy2DAsync(&copy, stream), "cuMemcpy2DAsync");
}

}  // namespace whale::cuda
