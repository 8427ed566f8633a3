// Memory of this process in which TensorFlow's large tensors lie, and which its peers of the
// machine map.
// Decisions: 0003, 0121 (docs/decisions).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "whale_ops/core/base/types.h"

namespace whale {

// A file that exists in memory only (memfd), of the largest size that may ever be wanted and mapped
// once: what nobody has touched takes no memory, and a place in it is the same number in every
// process that maps it. In a child of fork it becomes a copy, as all other memory does.
class WHALE_EXPORT Arena {
 public:
  // Null until open() has made it.
  static Arena* instance();
  // 0, or errno. Once, by a thread that has no others beside it that look for it.
  static int open(size_t bytes);

  int descriptor() const { return descriptor_; }
  size_t bytes() const { return bytes_; }
  // Memory for as long as the process lives; null when there is no more. Any thread.
  void* take(size_t bytes);
  bool holds(const void* data) const { return offset_of(data) < bytes_; }
  // Where it lies, if the arena holds it; else some number that is not below bytes().
  size_t offset_of(const void* data) const {
    return static_cast<size_t>(static_cast<const char*>(data) - base_);
  }

 private:
  char* base_ = nullptr;
  size_t bytes_ = 0;
  int descriptor_ = -1;
  std::atomic<size_t> taken_{0};
};

}  // namespace whale
