// Memory of this process for TensorFlow's large tensors, which its peers on the machine map.
// Decisions: 0003, 0121 (docs/decisions).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "whale_ops/core/base/types.h"

namespace whale {

// A file in memory (memfd) of the largest size that may ever be needed, mapped once: pages that
// nobody has touched take no memory, and an offset is valid in every process that maps the file. In
// a forked child it becomes a private copy, as all other memory does.
class WHALE_EXPORT Arena {
 public:
  // Returns null until open() has been called.
  static Arena* instance();
  // Creates the arena; returns 0 or errno. Call it once, while no other thread looks for the arena.
  static int open(size_t bytes);

  int descriptor() const { return descriptor_; }
  size_t bytes() const { return bytes_; }
  // Allocates memory for the lifetime of the process; returns null if there is none left. Callable
  // from any thread.
  void* take(size_t bytes);
  bool holds(const void* data) const { return offset_of(data) < bytes_; }
  // Returns the offset of an address in the arena; a number not below bytes() if it is not in the
  // arena.
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
