#include "whale_ops/core/transport/doorbell.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "whale_ops/core/transport/process_memory.h"

namespace whale {
namespace {

// Longest sleep if there is no pipe that could wake a thread which waits for descriptors.
constexpr int64_t kWithoutPipeNs = 250'000;

// Not FUTEX_PRIVATE_FLAG: the word is shared between processes.
void futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

}  // namespace

void Bell::ring(int pipe) {
  rings.fetch_add(1, std::memory_order_seq_cst);
  // A thread that goes to sleep first announces that, and then compares `rings`; so either it sees
  // this ring or this thread sees that it sleeps.
  wake(asleep.load(std::memory_order_seq_cst), pipe);
}

void Bell::wake(uint32_t how, int pipe) {
  if (how == kOnWord) futex(&rings, FUTEX_WAKE, INT_MAX, nullptr);
  // An error means that the pipe is full, and a full pipe wakes as well.
  if (how == kOnPipe && pipe >= 0 && write(pipe, "", 1) < 0) return;
}

Doorbell::Doorbell() {
  void* page = map_new("whale_bell", sizeof(Bell), &descriptor_);
  if (page != nullptr) bell_ = static_cast<Bell*>(page);
  if (pipe2(pipe_, O_CLOEXEC | O_NONBLOCK) != 0) pipe_[0] = pipe_[1] = -1;
}

void Doorbell::fall_asleep(const std::vector<int>& descriptors) {
  bell_->asleep.store(descriptors.empty() ? Bell::kOnWord : Bell::kOnPipe,
                      std::memory_order_seq_cst);
}

void Doorbell::awake() { bell_->asleep.store(Bell::kAwake, std::memory_order_seq_cst); }

uint32_t Doorbell::stand_in() {
  return bell_->asleep.exchange(Bell::kAwake, std::memory_order_seq_cst);
}

void Doorbell::stand_down(uint32_t how, uint32_t rings) {
  bell_->asleep.store(how, std::memory_order_seq_cst);
  if (this->rings() != rings) bell_->wake(how, pipe_[1]);
}

void Doorbell::wait(uint32_t rings, int64_t timeout_ns, const std::vector<int>& descriptors) {
  if (!descriptors.empty() && pipe_[0] < 0) timeout_ns = std::min(timeout_ns, kWithoutPipeNs);
  const timespec timeout{static_cast<time_t>(timeout_ns / 1'000'000'000),
                         static_cast<long>(timeout_ns % 1'000'000'000)};
  if (descriptors.empty()) {
    futex(&bell_->rings, FUTEX_WAIT, rings, &timeout);
    return;
  }
  std::vector<pollfd> sources{{pipe_[0], POLLIN, 0}};
  for (const int descriptor : descriptors) sources.push_back({descriptor, POLLIN, 0});
  if (this->rings() == rings) ppoll(sources.data(), sources.size(), &timeout, nullptr);
  char rung[64];
  while (pipe_[0] >= 0 && (sources[0].revents & POLLIN) != 0 &&
         read(pipe_[0], rung, sizeof(rung)) == sizeof(rung)) {
  }
}

}  // namespace whale
