// GPUs whose memory is the host's and whose streams are threads: what is queued on a stream happens
// later, in its order, so that whoever reads a result without having waited for it finds NaN, or
// what was there before. Shared by libcuda.so.1 (driver.cc) and TensorFlow's devices (plugin.cc).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#define HOST_GPU_EXPORT __attribute__((visibility("default")))

namespace host_gpu {

// A place in a stream, which comes when all before it has happened.
class HOST_GPU_EXPORT Point {
 public:
  void set();
  void wait();
  bool has_come();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool come_ = false;
};
using PointPtr = std::shared_ptr<Point>;

class Gpu;

class HOST_GPU_EXPORT Stream {
 public:
  explicit Stream(Gpu* gpu);
  ~Stream();  // after all that is queued
  Gpu* gpu() const { return gpu_; }

  // Runs `work` when the stream comes to it. `target`: memory that it will write, which holds NaN
  // from the time when the stream has done what lies in front of it.
  void call(std::function<void()> work, void* target = nullptr, size_t bytes = 0);
  // How often this thread has done so, on any stream.
  static int64_t calls_of_thread();
  // What a kernel has computed comes into memory `lasts_ns` after what lies before it, and not
  // before `since_ns`: what Gpu::hide has taken out of `at` under that number.
  void write(char* at, int64_t number, int64_t since_ns, int64_t lasts_ns);
  // What is queued from now on happens after `wait` has returned, or after the point has come.
  void wait(std::function<void()> wait);
  void wait(const PointPtr& point);
  // A point that comes at once where the stream has nothing left, without waking its thread, which
  // would take longer than most calls of a driver do.
  PointPtr record();
  void drain() { record()->wait(); }
  // Returns when nothing is queued but what `write` has.
  void settle();
  bool is_settled();

 private:
  enum class Kind { kCall, kWrite, kWait, kPoint };
  struct Item {
    Kind kind = Kind::kCall;
    std::function<void()> work;
    void* target = nullptr;
    size_t bytes = 0;
    int64_t since_ns = 0, lasts_ns = 0;
  };
  void queue(Item item);
  void run();

  Gpu* const gpu_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_, settled_;
  std::deque<Item> items_;
  int unsettled_ = 0;
  bool stopping_ = false;
  std::thread thread_;  // the last one: it uses all others
};

// What a library for GPUs may get wrong; a program has to show it.
enum class Fault : int {
  kNone,
  kNoWaitForMark,     // streams do not wait for marks on TensorFlow's
  kNoWaitForWritten,  // nor for what another rank's have written
  kNoWaitForTaken,    // nor until another rank's have read
  kEarlyMark,         // marks on TensorFlow's stream have come when they are made
  kMarkElsewhere,     // they are made on another stream, which is idle
  kEarlyRecord,       // marks on all other streams have come when they are made
  kEarlyQuery,        // whoever asks whether a mark has come hears yes
  kNoWaitInStream,    // TensorFlow's stream does not wait for marks on others
};
HOST_GPU_EXPORT Fault planted_fault();

// Adds up how long threads of a program are in calls of the driver and of NCCL that queue work:
// what these stand-ins take, and not the program.
class HOST_GPU_EXPORT InCall {
 public:
  InCall();
  ~InCall();
  static int64_t total_ns();

 private:
  const int64_t since_ns_;
};

// A GPU as HOST_GPUS lists it: `bytes[:slowness[:late_us[:name[:used]]]]`, with commas between
// GPUs.
struct Settings {
  size_t memory_bytes = 0;
  double slowness = 1;  // kernels take so many times as long as on the host
  int late_us = 0;  // a kernel takes up to so much longer, and what else is queued waits as long
  std::string name = "NVIDIA Something";
  size_t used_bytes = 0;  // by programs of others
  int place = 0;          // in HOST_GPUS
};

class HOST_GPU_EXPORT Gpu {
 public:
  Gpu(int ordinal, Settings settings)
      : ordinal_(ordinal),
        settings_(std::move(settings)),
        late_us_(settings_.late_us),
        used_bytes_(settings_.used_bytes) {}
  int ordinal() const { return ordinal_; }
  const Settings& settings() const { return settings_; }
  int late_us() const { return late_us_; }
  void be_late(int us) { late_us_ = us; }

  Stream* make_stream();
  void destroy(Stream* stream);
  void drain();
  // TensorFlow's: null where it has none yet.
  Stream* compute_stream() const { return compute_; }
  void compute_on(Stream* stream) { compute_ = stream; }

  bool take_room(size_t bytes);
  void give_room(size_t bytes) { used_bytes_ -= bytes; }
  size_t used_bytes() const { return used_bytes_; }

  // Held while a kernel computes, so that nothing comes into memory meanwhile; what follows is
  // called under it.
  std::mutex& memory_mutex() { return memory_mutex_; }
  // Takes bytes away, for Stream::write, and leaves NaN. Returns their number.
  int64_t hide(char* at, size_t bytes);
  // Brings back what is hidden there until `take_back`, but for what has been written since.
  void lend(const char* at, size_t bytes);
  void take_back();
  // Brings everything back at once.
  void reveal_all();
  // What is hidden there stays away: the memory is another's.
  void forget(const char* at, size_t bytes);
  // Brings back what was hidden under the number, if nobody has done it; takes the mutex.
  void bring_back(char* at, int64_t number);

 private:
  struct Hidden {
    std::string bytes;
    int64_t number = 0;
    bool lent = false;
  };
  std::map<char*, Hidden>::iterator first_behind(const char* at);

  const int ordinal_;
  const Settings settings_;
  std::atomic<int> late_us_;
  std::mutex mutex_;  // guards the streams
  std::set<Stream*> streams_;
  std::atomic<Stream*> compute_{nullptr};
  std::atomic<size_t> used_bytes_;
  std::mutex memory_mutex_;         // guards what follows
  std::map<char*, Hidden> hidden_;  // by where it was; none overlap
  int64_t hidden_count_ = 0;
  std::vector<char*> lent_;
};

// Those that CUDA_VISIBLE_DEVICES leaves, in the order of CUDA_DEVICE_ORDER.
HOST_GPU_EXPORT const std::vector<std::unique_ptr<Gpu>>& gpus();
// The GPU in whose memory an address lies; null: the host's.
HOST_GPU_EXPORT Gpu* find_owner(const void* at);
// Null where there is no room.
HOST_GPU_EXPORT void* allocate(Gpu* gpu, size_t bytes);
HOST_GPU_EXPORT void deallocate(void* memory);
// NaN in each dtype of floats, and -1 in those of whole numbers.
HOST_GPU_EXPORT void poison(void* at, size_t bytes);
HOST_GPU_EXPORT int64_t now_ns();

}  // namespace host_gpu
