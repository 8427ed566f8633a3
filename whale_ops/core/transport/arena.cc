#include "whale_ops/core/transport/arena.h"

#include <pthread.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstdlib>

#include "whale_ops/core/transport/process_memory.h"

namespace whale {
namespace {

Arena* arena = nullptr;

}  // namespace

Arena* Arena::instance() { return arena; }

int Arena::open(size_t bytes) {
  bytes = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  int descriptor = -1;
  void* memory = map_new("whale_tensors", bytes, &descriptor);
  if (memory == nullptr) return errno;
  arena = new Arena();
  arena->base_ = static_cast<char*>(memory);
  arena->bytes_ = bytes;
  arena->descriptor_ = descriptor;
  // In a forked child the arena becomes a private copy, so that the child does not write into its
  // parent's tensors.
  pthread_atfork(nullptr, nullptr, [] {
    constexpr int kFlags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
    if (mmap(arena->base_, arena->bytes_, PROT_READ | PROT_WRITE, kFlags, arena->descriptor_, 0) ==
        MAP_FAILED)
      std::abort();
  });
  return 0;
}

void* Arena::take(size_t bytes) {
  bytes = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  size_t begin = taken_.load();
  do {
    if (bytes > bytes_ - begin) return nullptr;
  } while (!taken_.compare_exchange_weak(begin, begin + bytes));
  return base_ + begin;
}

}  // namespace whale
