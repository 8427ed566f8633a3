// Replaces TensorFlow's allocator of host memory, so that large tensors are in memory that the
// other ranks of the machine map.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <utility>

#include "tensorflow/core/framework/allocator_registry.h"
#include "whale_ops/core/transport/arena.h"
#include "whale_ops/core/transport/block_heap.h"

namespace whale_ops {
namespace {

using tensorflow::Allocator;
using tensorflow::AllocatorFactoryRegistry;
using whale::Arena;
using whale::BlockHeap;

// As in TensorFlow's own allocator (mkl_cpu_allocator.h), whose sizes and statistics this one
// keeps.
constexpr size_t kLargeBytes = 256 << 10;
// How long TensorFlow's allocators wait for memory that other operations give back.
constexpr std::chrono::seconds kPatience{10};
constexpr int kPriority = 300;  // above all of TensorFlow's allocators

class ArenaSubAllocator : public tensorflow::SubAllocator {
 public:
  ArenaSubAllocator() : SubAllocator({}, {}) {}
  void* Alloc(size_t /* alignment: less than a page's */, size_t bytes, size_t* received) override {
    *received = bytes;
    return Arena::instance()->take(bytes);
  }
  void Free(void* /* memory */, size_t /* bytes */) override {}  // freed when the process ends
  bool SupportsCoalescing() const override { return false; }
};

size_t limit_bytes() {
  const char* wanted = std::getenv("TF_MKL_ALLOC_MAX_BYTES");
  const size_t given = wanted == nullptr ? 0 : std::strtoull(wanted, nullptr, 10);
  return given != 0 ? given
                    : static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) *
                          static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

class ArenaAllocator : public Allocator {
 public:
  ArenaAllocator()
      : limit_bytes_(limit_bytes()),
        large_(limit_bytes_, [](size_t bytes) { return Arena::instance()->take(bytes); }) {}

  std::string Name() override { return "whale_arena"; }
  void* AllocateRaw(size_t alignment, size_t bytes) override {
    if (bytes >= kLargeBytes && alignment <= BlockHeap::kAlignment)
      return large_.allocate(bytes, kPatience);
    void* memory = nullptr;
    return posix_memalign(&memory, std::max(alignment, sizeof(void*)), bytes) == 0 ? memory
                                                                                   : nullptr;
  }
  void DeallocateRaw(void* memory) override {
    Arena::instance()->holds(memory) ? large_.release(memory) : std::free(memory);
  }
  decltype(std::declval<Allocator>().GetStats()) GetStats() override {
    const BlockHeap::Statistics own = large_.statistics();
    tensorflow::AllocatorStats found;
    found.num_allocs = own.allocations;
    found.bytes_in_use = static_cast<int64_t>(own.used_bytes);
    found.peak_bytes_in_use = static_cast<int64_t>(own.most_used_bytes);
    found.largest_alloc_size = static_cast<int64_t>(own.largest_bytes);
    found.bytes_limit = static_cast<int64_t>(limit_bytes_);
    found.largest_free_block_bytes = static_cast<int64_t>(own.largest_free_bytes);
    found.pool_bytes = static_cast<int64_t>(own.taken_bytes);
    return found;
  }
  bool ClearStats() override {
    large_.reset_peak();
    return true;
  }

 private:
  const size_t limit_bytes_;
  BlockHeap large_;
};

class ArenaFactory : public tensorflow::AllocatorFactory {
 public:
  Allocator* CreateAllocator() override { return new ArenaAllocator(); }
  tensorflow::SubAllocator* CreateSubAllocator(int /* numa_node */) override {
    return new ArenaSubAllocator();
  }
};

// Registering an allocator after the first use of one aborts the process. No public function tells
// whether there was a use, but a private member does, which this reads.
bool AllocatorFactoryRegistry::* first_alloc_made();
template <bool AllocatorFactoryRegistry::* member>
struct Reveal {
  friend bool AllocatorFactoryRegistry::* first_alloc_made() { return member; }
};
template struct Reveal<&AllocatorFactoryRegistry::first_alloc_made_>;

}  // namespace

// Puts TensorFlow's large tensors into shared memory from now on. Returns 0, -1 if TensorFlow has
// allocated tensors already, or errno.
extern "C" __attribute__((visibility("default"))) int whale_share_tensors() {
  if (Arena::instance() != nullptr) return 0;
  AllocatorFactoryRegistry* registry = AllocatorFactoryRegistry::singleton();
  if (registry->*first_alloc_made()) return -1;
  // The most that the allocator may take is its limit, in blocks rounded up to pages.
  if (const int error = Arena::open(limit_bytes() + (64 << 20)); error != 0) return error;
  registry->Register(__FILE__, __LINE__, "WhaleArenaAllocator", kPriority, new ArenaFactory());
  return 0;
}

}  // namespace whale_ops
