// What the engine's thread sleeps on: a word in shared memory that threads of this process and
// other processes ring, and what else tells that something has come.
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

  // Any thread of any process; `pipe`: the owner's, as this process has it. What was written before
  // is seen by the one who wakes.
  void ring(int pipe);
  // Wakes who sleeps in this way.
  void wake(uint32_t how, int pipe);
};

// The owner's side.
class WHALE_EXPORT Doorbell {
 public:
  Doorbell();
  Doorbell(const Doorbell&) = delete;

  void ring() const { bell_->ring(pipe_[1]); }
  // File descriptor of the page that holds the bell, for other processes to map; -1 where the
  // system has none.
  int descriptor() const { return descriptor_; }
  // Of the pipe that wakes who waits for descriptors as well, for other processes to open.
  int pipe() const { return pipe_[1]; }
  // A number to give to wait(): rings from now on end that wait.
  uint32_t rings() const { return bell_->rings.load(std::memory_order_seq_cst); }
  // Says that the owner's thread is about to wait for the bell, and for descriptors if there are
  // any; who rings wakes it from now on.
  void fall_asleep(const std::vector<int>& descriptors);
  // Sleeps until the bell has been rung more often than `rings` says, or one of these descriptors
  // can be read, at most `timeout_ns`.
  void wait(uint32_t rings, int64_t timeout_ns, const std::vector<int>& descriptors);
  void awake();
  // Another thread looks in the place of the owner's: who rings need not wake that. Returns how it
  // sleeps.
  uint32_t stand_in();
  // Ends this; who rang since `rings` was read, before the last look, wakes the owner's thread.
  void stand_down(uint32_t how, uint32_t rings);

 private:
  Bell local_{};  // where there is no shared memory: then no other process knows the bell either
  Bell* bell_ = &local_;
  int descriptor_ = -1;
  int pipe_[2] = {-1, -1};
};

}  // namespace whale
