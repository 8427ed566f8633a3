#include "tests/host_gpu/streams.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <utility>

namespace host_gpu {

void Point::set() {
  const std::lock_guard<std::mutex> lock(mutex_);
  come_ = true;
  changed_.notify_all();
}

void Point::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return come_; });
}

bool Point::has_come() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return come_;
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void poison(void* at, size_t bytes) {
  if (bytes > 0) std::memset(at, 0xff, bytes);  // an empty tensor may lie nowhere
}

Stream::Stream(Gpu* gpu) : gpu_(gpu), thread_([this] { run(); }) {}

Stream::~Stream() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

namespace {
thread_local int64_t thread_calls = 0;
}  // namespace

int64_t Stream::calls_of_thread() { return thread_calls; }

void Stream::call(std::function<void()> work, void* target, size_t bytes) {
  ++thread_calls;
  queue({Kind::kCall, std::move(work), target, bytes, now_ns(), 0});
}

void Stream::write(char* at, int64_t number, int64_t since_ns, int64_t lasts_ns) {
  queue({Kind::kWrite, [gpu = gpu_, at, number] { gpu->bring_back(at, number); }, nullptr, 0,
         since_ns, lasts_ns});
}

void Stream::wait(std::function<void()> wait) {
  queue({Kind::kWait, std::move(wait), nullptr, 0, 0, 0});
}

void Stream::wait(const PointPtr& point) {
  if (!point->has_come()) wait([point] { point->wait(); });
}

PointPtr Stream::record() {
  auto point = std::make_shared<Point>();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (items_.empty()) {
    point->set();
  } else {
    items_.push_back({Kind::kPoint, [point] { point->set(); }, nullptr, 0, 0, 0});
  }
  return point;
}

void Stream::settle() {
  std::unique_lock<std::mutex> lock(mutex_);
  settled_.wait(lock, [this] { return unsettled_ == 0; });
}

bool Stream::is_settled() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return unsettled_ == 0;
}

void Stream::queue(Item item) {
  const std::lock_guard<std::mutex> lock(mutex_);
  unsettled_ += item.kind == Kind::kCall || item.kind == Kind::kWait;
  items_.push_back(std::move(item));
  if (items_.size() == 1) changed_.notify_one();
}

void Stream::run() {
  // A GPU takes no processor away: waking its thread does not put off the thread that queues.
  const sched_param unused{};
  pthread_setschedparam(pthread_self(), SCHED_BATCH, &unused);
  std::mt19937 draw(std::random_device{}());
  int64_t come_ns = 0;  // when what was before had happened
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !items_.empty(); });
    if (items_.empty()) return;
    const Item& item = items_.front();  // only this thread takes it away
    lock.unlock();
    if (item.target != nullptr) poison(item.target, item.bytes);
    if (item.kind == Kind::kCall || item.kind == Kind::kWrite) {
      // Every second one in the mean is not late: what does not wait may be before what is.
      const int64_t most_ns = int64_t{1000} * gpu_->late_us();
      std::uniform_int_distribution<int64_t> drawn_ns(-most_ns, most_ns);
      const int64_t late_ns = std::max<int64_t>(drawn_ns(draw), 0);
      come_ns = item.kind == Kind::kWrite
                    ? std::max(come_ns, item.since_ns) + item.lasts_ns + late_ns
                    : std::max(come_ns, item.since_ns + late_ns);
      if (const int64_t left_ns = come_ns - now_ns(); left_ns > 0)
        std::this_thread::sleep_for(std::chrono::nanoseconds(left_ns));
    }
    item.work();
    if (item.kind == Kind::kWait) come_ns = now_ns();
    lock.lock();
    if (item.kind == Kind::kCall || item.kind == Kind::kWait) {
      if (--unsettled_ == 0) settled_.notify_all();
    }
    items_.pop_front();
  }
}

Stream* Gpu::make_stream() {
  auto* made = new Stream(this);
  const std::lock_guard<std::mutex> lock(mutex_);
  streams_.insert(made);
  return made;
}

void Gpu::destroy(Stream* stream) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    streams_.erase(stream);
    if (compute_ == stream) compute_ = nullptr;
  }
  delete stream;
}

void Gpu::drain() {
  std::vector<PointPtr> points;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Stream* one : streams_) points.push_back(one->record());
  }
  for (const PointPtr& point : points) point->wait();
}

bool Gpu::take_room(size_t bytes) {
  size_t used = used_bytes_;
  do {
    if (used + bytes > settings_.memory_bytes) return false;
  } while (!used_bytes_.compare_exchange_weak(used, used + bytes));
  return true;
}

// The first one that ends behind `at`.
std::map<char*, Gpu::Hidden>::iterator Gpu::first_behind(const char* at) {
  auto found = hidden_.upper_bound(const_cast<char*>(at));
  if (found != hidden_.begin()) {
    const auto before = std::prev(found);
    if (before->first + before->second.bytes.size() > at) return before;
  }
  return found;
}

int64_t Gpu::hide(char* at, size_t bytes) {
  forget(at, bytes);
  hidden_[at] = {std::string(at, bytes), ++hidden_count_, false};
  poison(at, bytes);
  return hidden_count_;
}

void Gpu::lend(const char* at, size_t bytes) {
  for (auto one = first_behind(at); one != hidden_.end() && one->first < at + bytes; ++one) {
    if (std::exchange(one->second.lent, true)) continue;
    std::memcpy(one->first, one->second.bytes.data(), one->second.bytes.size());
    lent_.push_back(one->first);
  }
}

void Gpu::take_back() {
  for (char* at : std::exchange(lent_, {})) {
    const auto found = hidden_.find(at);
    if (found == hidden_.end() || !std::exchange(found->second.lent, false)) continue;
    const std::string& bytes = found->second.bytes;
    if (std::memcmp(at, bytes.data(), bytes.size()) == 0) {
      poison(at, bytes.size());
    } else {
      hidden_.erase(found);
    }
  }
}

void Gpu::reveal_all() {
  for (const auto& [at, hidden] : hidden_)
    std::memcpy(at, hidden.bytes.data(), hidden.bytes.size());
  hidden_.clear();
}

void Gpu::forget(const char* at, size_t bytes) {
  for (auto one = first_behind(at); one != hidden_.end() && one->first < at + bytes;)
    one = hidden_.erase(one);
}

void Gpu::bring_back(char* at, int64_t number) {
  const std::lock_guard<std::mutex> lock(memory_mutex_);
  const auto found = hidden_.find(at);
  if (found == hidden_.end() || found->second.number != number) return;
  std::memcpy(at, found->second.bytes.data(), found->second.bytes.size());
  hidden_.erase(found);
}

}  // namespace host_gpu
