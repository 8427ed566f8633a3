// Allocates blocks of memory that grows at its end.
// Decision: 0220 (docs/decisions).
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "whale_ops/core/base/types.h"

namespace whale {

// Gives out the smallest free block that is large enough, cut to size, and joins a block that comes
// back with its free neighbours. TensorFlow's BFCAllocator does so too, but gives a block whole
// that has less than twice what was asked for, and keeps 8 bytes for each 256 bytes of all memory
// that it has taken. Callable from any thread.
class WHALE_EXPORT BlockHeap {
 public:
  // Blocks begin at multiples of this, and take multiples of it.
  static constexpr size_t kAlignment = 256;

  // Counts of bytes and blocks, as TensorFlow's allocators keep them.
  struct Statistics {
    size_t used_bytes = 0, most_used_bytes = 0;  // now, and at most since reset_peak()
    size_t largest_bytes = 0;                    // largest block since then
    size_t taken_bytes = 0;                      // all memory, free blocks included
    size_t largest_free_bytes = 0;
    int64_t allocations = 0;  // since reset_peak()
  };

  // `take` returns so many more bytes, which are whole pages, or null; they need not follow the
  // ones before. At most `limit_bytes` are taken.
  BlockHeap(size_t limit_bytes, std::function<void*(size_t bytes)> take);

  // Returns a block. Where none is left, waits up to `patience` for blocks that come back; null if
  // that was in vain.
  void* allocate(size_t bytes, std::chrono::milliseconds patience);
  // Takes a block back; ends the process if there is none at this address, or if it is free.
  void release(void* memory);
  Statistics statistics() const;
  // Counts peak, largest block and allocations from now on.
  void reset_peak();

 private:
  struct Block {
    size_t bytes;
    bool used;
  };
  using Blocks = std::map<char*, Block>;

  // Takes the smallest free block of so many bytes, cut to size; null if there is none.
  void* take_free(size_t bytes);
  // Takes more memory, so that there is such a block; false if none is left.
  bool grow(size_t bytes);
  // Adds a free block, joined with free ones next to it.
  void add_free(char* begin, size_t bytes);
  void forget_free(Blocks::iterator block);

  const size_t limit_bytes_;
  const std::function<void*(size_t)> take_;
  mutable std::mutex mutex_;
  std::condition_variable released_;
  Blocks blocks_;                            // all, by their first byte
  std::set<std::pair<size_t, char*>> free_;  // the free ones, by size
  Statistics statistics_;
};

}  // namespace whale
