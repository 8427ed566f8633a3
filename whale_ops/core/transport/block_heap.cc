#include "whale_ops/core/transport/block_heap.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "whale_ops/core/transport/process_memory.h"

namespace whale {

BlockHeap::BlockHeap(size_t limit_bytes, std::function<void*(size_t bytes)> take)
    : limit_bytes_(limit_bytes), take_(std::move(take)) {}

void* BlockHeap::allocate(size_t bytes, std::chrono::milliseconds patience) {
  const size_t rounded = (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  if (rounded < bytes) return nullptr;  // more than there are addresses
  void* found = nullptr;
  std::unique_lock<std::mutex> lock(mutex_);
  released_.wait_for(lock, patience, [&] {
    found = take_free(rounded);
    if (found == nullptr && grow(rounded)) found = take_free(rounded);
    return found != nullptr;
  });
  return found;
}

void* BlockHeap::take_free(size_t bytes) {
  const auto fitting = free_.lower_bound({bytes, nullptr});
  if (fitting == free_.end()) return nullptr;
  const auto block = blocks_.find(fitting->second);
  char* const begin = block->first;
  const size_t left = block->second.bytes - bytes;
  free_.erase(fitting);
  block->second = {bytes, true};
  if (left > 0) {
    blocks_[begin + bytes] = {left, false};
    free_.insert({left, begin + bytes});
  }
  statistics_.used_bytes += bytes;
  statistics_.most_used_bytes = std::max(statistics_.most_used_bytes, statistics_.used_bytes);
  statistics_.largest_bytes = std::max(statistics_.largest_bytes, bytes);
  ++statistics_.allocations;
  return begin;
}

bool BlockHeap::grow(size_t bytes) {
  // Only what a free block at the end lacks, if what comes follows it; else as much as all of it.
  size_t lacking = bytes;
  if (!blocks_.empty() && !blocks_.rbegin()->second.used) lacking -= blocks_.rbegin()->second.bytes;
  for (const size_t least : {lacking, bytes}) {
    const size_t wanted = (least + kPageBytes - 1) / kPageBytes * kPageBytes;
    if (wanted > limit_bytes_ - statistics_.taken_bytes) return false;
    void* const memory = take_(wanted);
    if (memory == nullptr) return false;
    statistics_.taken_bytes += wanted;
    add_free(static_cast<char*>(memory), wanted);
    if (free_.lower_bound({bytes, nullptr}) != free_.end()) return true;
  }
  return false;
}

void BlockHeap::forget_free(Blocks::iterator block) {
  free_.erase({block->second.bytes, block->first});
  blocks_.erase(block);
}

void BlockHeap::add_free(char* begin, size_t bytes) {
  const auto next = blocks_.lower_bound(begin);
  if (next != blocks_.begin()) {
    const auto before = std::prev(next);
    if (!before->second.used && before->first + before->second.bytes == begin) {
      begin = before->first;
      bytes += before->second.bytes;
      forget_free(before);
    }
  }
  if (next != blocks_.end() && !next->second.used && begin + bytes == next->first) {
    bytes += next->second.bytes;
    forget_free(next);
  }
  blocks_[begin] = {bytes, false};
  free_.insert({bytes, begin});
}

void BlockHeap::release(void* memory) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto block = blocks_.find(static_cast<char*>(memory));
    if (block == blocks_.end() || !block->second.used) {
      std::fprintf(stderr, "whale: no tensor's memory begins at %p, or it is free already\n",
                   memory);
      std::abort();
    }
    const size_t bytes = block->second.bytes;
    statistics_.used_bytes -= bytes;
    blocks_.erase(block);
    add_free(static_cast<char*>(memory), bytes);
  }
  released_.notify_all();
}

BlockHeap::Statistics BlockHeap::statistics() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  Statistics found = statistics_;
  found.largest_free_bytes = free_.empty() ? 0 : free_.rbegin()->first;
  return found;
}

void BlockHeap::reset_peak() {
  const std::lock_guard<std::mutex> lock(mutex_);
  statistics_.most_used_bytes = statistics_.used_bytes;
  statistics_.largest_bytes = 0;
  statistics_.allocations = 0;
}

}  // namespace whale
