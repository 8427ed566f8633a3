// A device that only copies (core/device/device.h), whose memory is the host's: a thread carries
// out what is queued, some time later.
#pragma once

#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/whale_ops/gpu/host_exchange.h"

namespace {

// What it does wrong, by its number.
enum class CopyFault { kNone = 0, kFails = 1, kHangs = 2, kPins = 3, kSlow = 4 };

class LateCopies final : public whale::DeviceCopies {
 public:
  explicit LateCopies(CopyFault fault)
      : fault_(fault), threads_{std::thread([this] { run(0); }), std::thread([this] { run(1); })} {}
  ~LateCopies() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
    if (!marks_.empty()) std::terminate();  // a mark was not given back
  }

  const char* kind() const override { return "CPU"; }
  Status mark(void*, void** mark) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto* made = new Event();
    marks_.insert(made);
    *mark = made;
    return Status::Ok();
  }
  void release(void* mark) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    marks_.erase(static_cast<Event*>(mark));
    delete static_cast<Event*>(mark);
  }
  Status finished(void* mark, bool* yes) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto* event = static_cast<Event*>(mark);
    *yes = event->come == event->queued;
    return Status::Ok();
  }
  Status host_memory(size_t bytes, std::shared_ptr<void>* memory) override {
    if (fault_ == CopyFault::kPins)
      return Status::Error(Code::kUnavailable, "no memory can be pinned");
    memory->reset(std::malloc(bytes), std::free);
    return Status::Ok();
  }
  Status copy(const std::vector<whale::DeviceCopy>& copies, bool out, void* after,
              void** mark) override {
    if (fault_ == CopyFault::kFails && ++copied_ > 3)
      return Status::Error(Code::kUnavailable, "the device has fallen off the bus");
    if (*mark == nullptr) this->mark(nullptr, mark);
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto* before = static_cast<Event*>(after);
    auto* behind = static_cast<Event*>(*mark);
    queues_[out].push_back({copies, before, before == nullptr ? 0 : before->queued, behind});
    ++behind->queued;
    changed_.notify_all();
    return Status::Ok();
  }
  void drain() override {
    std::unique_lock<std::mutex> lock(mutex_);
    drained_ = true;  // what has not begun is left out, as the caller does not want it any more
    changed_.notify_all();
    changed_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  // As of CUDA: what waits for it waits for what was queued in front of it by then.
  struct Event {
    int64_t queued = 0, come = 0;
  };
  struct Entry {
    std::vector<whale::DeviceCopy> copies;
    const Event* after;
    int64_t after_queued;
    Event* mark;
  };

  void run(int out) {
    std::mt19937 draw(static_cast<unsigned>(out));
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      auto& queue = queues_[out];
      changed_.wait(lock, [&] {
        return stopping_ || drained_ ||
               (!queue.empty() && fault_ != CopyFault::kHangs &&
                (queue[0].after == nullptr || queue[0].after->come >= queue[0].after_queued));
      });
      if (stopping_ || drained_) return;
      Entry entry = std::move(queue.front());
      queue.pop_front();
      ++busy_;
      lock.unlock();
      const int64_t most_us = fault_ == CopyFault::kSlow ? 4000 : 60;
      std::this_thread::sleep_for(std::chrono::microseconds(
          std::uniform_int_distribution<int64_t>(most_us / 2, most_us)(draw)));
      for (const auto& one : entry.copies) ::copy(one);
      lock.lock();
      --busy_;
      ++entry.mark->come;
      changed_.notify_all();
    }
  }

  const CopyFault fault_;
  int copied_ = 0;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::set<Event*> marks_;
  std::deque<Entry> queues_[2];  // into the device's memory, out of it
  int busy_ = 0;
  bool drained_ = false, stopping_ = false;
  std::thread threads_[2];
};

}  // namespace
