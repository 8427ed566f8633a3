#include "whale_ops/core/transport/doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

#include "whale_ops/core/transport/process_memory.h"

namespace whale {
namespace {

// Not the private kind: the word is shared between processes.
void futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

}  // namespace

void Bell::ring() {
  rings.fetch_add(1, std::memory_order_seq_cst);
  // Whoever goes to sleep says so first and then compares `rings`: one of the two sees the other.
  if (asleep.load(std::memory_order_seq_cst) != 0) futex(&rings, FUTEX_WAKE, INT_MAX, nullptr);
}

Doorbell::Doorbell() {
  void* page = map_new("whale_bell", sizeof(Bell), &descriptor_);
  if (page != nullptr) bell_ = static_cast<Bell*>(page);
}

void Doorbell::wait(uint32_t rings, int64_t timeout_ns) {
  const timespec timeout{static_cast<time_t>(timeout_ns / 1'000'000'000),
                         static_cast<long>(timeout_ns % 1'000'000'000)};
  bell_->asleep.store(1, std::memory_order_seq_cst);
  futex(&bell_->rings, FUTEX_WAIT, rings, &timeout);
  bell_->asleep.store(0, std::memory_order_seq_cst);
}

}  // namespace whale
