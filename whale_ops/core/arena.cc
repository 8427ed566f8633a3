#include "arena.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

namespace whale {
namespace {

constexpr size_t kPageBytes = 4096;

Arena* arena = nullptr;

}  // namespace

Arena* Arena::instance() { return arena; }

int Arena::open(size_t bytes) {
  bytes = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  const int descriptor = static_cast<int>(syscall(SYS_memfd_create, "whale_tensors", 1u /* close on exec */));
  if (descriptor < 0) return errno;
  void* memory = MAP_FAILED;
  if (fchmod(descriptor, 0600) == 0 && ftruncate(descriptor, static_cast<off_t>(bytes)) == 0) {
    memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  }
  if (memory == MAP_FAILED) {
    const int error = errno;
    close(descriptor);
    return error;
  }
  arena = new Arena();
  arena->base_ = static_cast<char*>(memory);
  arena->bytes_ = bytes;
  arena->descriptor_ = descriptor;
  // What a child writes to its tensors must not be written to its parent's.
  pthread_atfork(nullptr, nullptr, [] {
    constexpr int kFlags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
    if (mmap(arena->base_, arena->bytes_, PROT_READ | PROT_WRITE, kFlags, arena->descriptor_, 0) == MAP_FAILED) std::abort();
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
