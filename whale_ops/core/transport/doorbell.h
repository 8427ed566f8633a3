// What the engine's thread sleeps on: a word in shared memory, which threads of this process and of
// other processes ring, and file descriptors.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "whale_ops/core/base/types.h"

namespace whale {

// Lies in memory that processes share. All zeros is a bell that nobody has rung.
struct WHALE_EXPORT Bell {
  enum Sleep : uint32_t { kAwake = 0, kOnWord = 1, kOnPipe = 2 };
  std::atomic<uint32_t> rings;
  std::atomic<uint32_t> asleep;

  // Rings the bell; callable from any thread of any process. `pipe`: the owner's pipe, as opened by
  // this process. The woken thread sees everything that was written before.
  void ring(int pipe);
  // Wakes the owner if it sleeps in the way `how`.
  void wake(uint32_t how, int pipe);
};

// The bell as its owner uses it.
class WHALE_EXPORT Doorbell {
 public:
  Doorbell();
  Doorbell(const Doorbell&) = delete;

  void ring() const { bell_->ring(pipe_[1]); }
  // File descriptor of the page with the bell, for other processes to map; -1 if the system has
  // none.
  int descriptor() const { return descriptor_; }
  // Write end of the pipe that also wakes a thread which waits for descriptors; other processes
  // open it.
  int pipe() const { return pipe_[1]; }
  // A number for wait(): rings after this call end that wait.
  uint32_t rings() const { return bell_->rings.load(std::memory_order_seq_cst); }
  // Announces that the owner's thread is about to wait for the bell, and for descriptors if there
  // are any: whoever rings wakes it from now on.
  void fall_asleep(const std::vector<int>& descriptors);
  // Sleeps until the bell has been rung more often than `rings`, or one of the descriptors is
  // readable, or `timeout_ns` have passed.
  void wait(uint32_t rings, int64_t timeout_ns, const std::vector<int>& descriptors);
  void awake();
  // Another thread stands in for the owner's, so that ringing need not wake the owner. Returns how
  // the owner sleeps.
  uint32_t stand_in();
  // Ends stand_in(). Wakes the owner's thread if the bell was rung since `rings` was read, before
  // the last look.
  void stand_down(uint32_t how, uint32_t rings);

 private:
  Bell local_{};  // if there is no shared memory; then no other process knows the bell either
  Bell* bell_ = &local_;
  int descriptor_ = -1;
  int pipe_[2] = {-1, -1};
};

}  // namespace whale
