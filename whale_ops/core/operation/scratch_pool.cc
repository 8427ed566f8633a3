#include "whale_ops/core/operation/scratch_pool.h"

#include <utility>

namespace whale {
namespace {

constexpr size_t kRetainedBytes = 64 << 20;

}  // namespace

ScratchPool::Block ScratchPool::take(size_t bytes) {
  size_t best = free_.size();
  for (size_t i = 0; i < free_.size(); ++i) {
    if (free_[i].bytes >= bytes && (best == free_.size() || free_[i].bytes < free_[best].bytes))
      best = i;
  }
  if (best == free_.size()) return {std::unique_ptr<char[]>(new char[bytes]), bytes};
  Block block = std::move(free_[best]);
  free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(best));
  retained_bytes_ -= block.bytes;
  return block;
}

void ScratchPool::give(Block block) {
  if (block.bytes == 0 || retained_bytes_ + block.bytes > kRetainedBytes) return;
  retained_bytes_ += block.bytes;
  free_.push_back(std::move(block));
}

}  // namespace whale
