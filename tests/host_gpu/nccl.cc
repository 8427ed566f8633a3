// NCCL (libnccl.so.2) for GPUs that are the host's: as much of it as whale_ops/gpu/nccl.h calls,
// between threads and between processes. As NCCL's, communicators that do not block connect and
// queue meanwhile and say so, their first operation too; what is queued waits for the others for
// ever, until the communicator is aborted; and to abort one waits for the GPU, on which another
// one's may hang, unless all are aborted in one group. Nobody tells it of a rank that is gone.
//
//   HOST_NCCL_FAULT   RANK:connect:SIGNAL or RANK:exchange:SIGNAL: this rank of all sends itself a
//                     signal while it connects, or when its fourth operation begins on the GPU
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "tests/host_gpu/streams.h"
#include "whale_ops/core/collective/reduce.h"

namespace host_gpu {
namespace {

using whale::DType;
using whale::Reduction;

constexpr int kSuccess = 0, kSystemError = 2, kInvalidArgument = 4, kInProgress = 7;
constexpr size_t kPieceBytes = size_t{64} << 10;
constexpr int kMostRanks = 16, kFaultAt = 4;
constexpr auto kPause = std::chrono::microseconds(20),
               kFirstLaunch = std::chrono::microseconds(3000);

// From one rank to another, in pieces; all ranks of a communicator have it mapped.
struct Channel {
  std::atomic<uint64_t> sent{0}, taken{0};
  char piece[kPieceBytes];
};
struct Shared {
  std::atomic<int> arrived{0};
  Channel channels[kMostRanks][kMostRanks];
};

struct Transfer {
  int peer = 0;
  char* at = nullptr;
  size_t bytes = 0;
};

// One call: what goes out and comes in, in order with each peer, and what is computed of it then.
struct Task {
  std::vector<Transfer> out, in;
  std::vector<std::pair<char*, size_t>> results;  // hold NaN until they come
  std::function<void()> finish;
};

struct Fault {
  int rank = -1;
  bool connects = false;
  int signal = 0;
};

Fault planted() {
  const char* text = std::getenv("HOST_NCCL_FAULT");
  Fault fault;
  char where[16] = "";
  if (text == nullptr ||
      std::sscanf(text, "%d:%15[a-z]:%d", &fault.rank, where, &fault.signal) != 3)
    return {};
  fault.connects = std::strcmp(where, "connect") == 0;
  return fault;
}

struct Communicator {
  int rank = 0, size = 0;
  bool blocks = true;
  Shared* shared = nullptr;
  std::atomic<int> state{kSuccess};
  std::atomic<bool> aborted{false};
  std::atomic<Gpu*> gpu{nullptr};
  std::thread helper;  // connects, or queues the first operation
  bool used = false;
  int carried_out = 0;

  ~Communicator() {
    if (helper.joinable()) helper.join();
    if (shared != nullptr) munmap(shared, sizeof(Shared));
  }
  void help(std::function<void()> work) {
    if (helper.joinable()) helper.join();
    state = kInProgress;
    helper = std::thread(std::move(work));
    if (blocks) helper.join();
  }

  void connect(const std::string& path) {
    const Fault fault = planted();
    if (fault.rank == rank && fault.connects) std::raise(fault.signal);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    void* made = file < 0
                     ? MAP_FAILED
                     : mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    if (made == MAP_FAILED) {
      state = kSystemError;
      return;
    }
    shared = static_cast<Shared*>(made);
    ++shared->arrived;
    while (shared->arrived < size && !aborted) std::this_thread::sleep_for(kPause);
    state = kSuccess;
  }

  // On the stream.
  void carry_out(const std::vector<Task>& tasks) {
    const Fault fault = planted();
    if (++carried_out == kFaultAt && fault.rank == rank && !fault.connects)
      std::raise(fault.signal);
    std::vector<std::deque<Transfer>> out(kMostRanks), in(kMostRanks);
    for (const Task& task : tasks) {
      for (const auto& [at, bytes] : task.results) poison(at, bytes);
      for (const Transfer& one : task.out) out[static_cast<size_t>(one.peer)].push_back(one);
      for (const Transfer& one : task.in) in[static_cast<size_t>(one.peer)].push_back(one);
    }
    for (bool left = true; left;) {
      bool moved = left = false;
      for (int peer = 0; peer < size; ++peer) {
        Channel& to = shared->channels[rank][peer];
        moved |= move(&out[static_cast<size_t>(peer)], &to, true);
        moved |= move(&in[static_cast<size_t>(peer)], &shared->channels[peer][rank], false);
        left |= !out[static_cast<size_t>(peer)].empty() || !in[static_cast<size_t>(peer)].empty();
      }
      if (aborted) return;
      if (left && !moved) std::this_thread::sleep_for(kPause);
    }
    for (const Task& task : tasks) {
      if (task.finish != nullptr) task.finish();
    }
  }

  // The next piece, if the other end is ready for it.
  static bool move(std::deque<Transfer>* left, Channel* channel, bool out) {
    while (!left->empty() && left->front().bytes == 0) left->pop_front();
    if (left->empty() || (channel->sent == channel->taken) != out) return false;
    Transfer& one = left->front();
    const size_t bytes = std::min(one.bytes, kPieceBytes);
    out ? std::memcpy(channel->piece, one.at, bytes) : std::memcpy(one.at, channel->piece, bytes);
    ++(out ? channel->sent : channel->taken);
    one.at += bytes;
    one.bytes -= bytes;
    if (one.bytes == 0) left->pop_front();
    return true;
  }
};
using CommunicatorPtr = std::shared_ptr<Communicator>;

struct Queued {
  CommunicatorPtr communicator;
  Stream* stream = nullptr;
  std::vector<Task> tasks;
};
thread_local int depth = 0;
thread_local std::vector<Queued> grouped;
thread_local std::vector<CommunicatorPtr> aborting;

int queue(Queued what) {
  Communicator& one = *what.communicator;
  one.gpu = what.stream->gpu();
  const auto put = [what] {
    what.stream->call([what] { what.communicator->carry_out(what.tasks); });
  };
  if (std::exchange(one.used, true)) return put(), kSuccess;
  // The first one connects the GPUs.
  one.help([put, &one] {
    std::this_thread::sleep_for(kFirstLaunch);
    put();
    one.state = kSuccess;
  });
  return one.blocks ? kSuccess : kInProgress;
}

int call(CommunicatorPtr* handle, void* stream, Task task) {
  if (handle == nullptr || stream == nullptr) return kInvalidArgument;
  Communicator& one = **handle;
  if (one.state != kSuccess) return one.state == kInProgress ? kInvalidArgument : one.state.load();
  auto* on = static_cast<Stream*>(stream);
  if (depth == 0) return queue({*handle, on, {std::move(task)}});
  const auto same = std::find_if(grouped.begin(), grouped.end(), [&](const Queued& other) {
    return other.communicator == *handle && other.stream == on;
  });
  if (same == grouped.end()) {
    grouped.push_back({*handle, on, {std::move(task)}});
  } else {
    same->tasks.push_back(std::move(task));
  }
  return one.blocks ? kSuccess : kInProgress;
}

void wait_for_end(const CommunicatorPtr& one) {
  if (one->helper.joinable()) one->helper.join();
  if (Gpu* gpu = one->gpu; gpu != nullptr) gpu->drain();
}

DType dtype_of(int type) {
  switch (type) {
    case 6: return DType::kFloat16;
    case 7: return DType::kFloat32;
    case 8: return DType::kFloat64;
    case 9: return DType::kBFloat16;
    default: return DType::kRaw;
  }
}
size_t bytes_of(int type, size_t count) {
  return count * std::max<size_t>(1, whale::element_bytes(dtype_of(type)));
}

char* place(const void* at) { return static_cast<char*>(const_cast<void*>(at)); }

bool overlap(const char* a, size_t a_bytes, const char* b, size_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

// Every rank's part comes to those of `to` (-1: all), which add them up.
Task reduction(const Communicator& one, const std::vector<const char*>& parts, void* output,
               size_t count, int type, int operation, int to) {
  constexpr Reduction kOperations[] = {Reduction::kSum, Reduction::kProd, Reduction::kMax,
                                       Reduction::kMin};
  const size_t bytes = bytes_of(type, count);
  Task task;
  for (int peer = 0; peer < one.size; ++peer) {
    if (to < 0 || to == peer)
      task.out.push_back({peer, place(parts[static_cast<size_t>(peer)]), bytes});
  }
  if (to >= 0 && to != one.rank) return task;
  auto came = std::make_shared<std::vector<std::string>>(static_cast<size_t>(one.size),
                                                         std::string(bytes, '\0'));
  for (int peer = 0; peer < one.size; ++peer)
    task.in.push_back({peer, (*came)[static_cast<size_t>(peer)].data(), bytes});
  const bool in_place = std::any_of(parts.begin(), parts.end(), [&](const char* part) {
    return overlap(part, bytes, place(output), bytes);
  });
  if (!in_place) task.results.emplace_back(place(output), bytes);
  task.finish = [came, output, count, type, reduces = kOperations[operation]] {
    std::vector<whale::Term> terms;
    for (const std::string& part : *came) terms.push_back({part.data(), false});
    whale::reduce(dtype_of(type), reduces, output, false, terms, count);
  };
  return task;
}

}  // namespace
}  // namespace host_gpu

using namespace host_gpu;  // what follows is NCCL's

extern "C" {

struct ncclUniqueId {
  char internal[128];
};
struct ncclConfig {  // ncclConfig_t of NCCL 2.14
  size_t size;
  unsigned magic, version;
  int blocking;
};

HOST_GPU_EXPORT const char* ncclGetErrorString(int code) {
  return code == kSystemError ? "unhandled system error" : "invalid argument";
}
HOST_GPU_EXPORT const char* ncclGetLastError(void*) { return ""; }
HOST_GPU_EXPORT int ncclGetVersion(int* version) { return *version = 22809, kSuccess; }
HOST_GPU_EXPORT int ncclGetUniqueId(ncclUniqueId* id) {
  const int file = memfd_create("host-nccl", MFD_CLOEXEC);  // until the process ends
  if (file < 0 || ftruncate(file, sizeof(Shared)) != 0) return kSystemError;
  std::snprintf(id->internal, sizeof(id->internal), "/proc/%d/fd/%d", getpid(), file);
  return kSuccess;
}
HOST_GPU_EXPORT int ncclCommInitRankConfig(void** made, int ranks, ncclUniqueId id, int rank,
                                           ncclConfig* config) {
  if (ranks > kMostRanks || rank < 0 || rank >= ranks || config->magic != 0xcafebeef)
    return kInvalidArgument;
  auto one = std::make_shared<Communicator>();
  one->rank = rank;
  one->size = ranks;
  one->blocks = config->blocking != 0;
  *made = new CommunicatorPtr(one);
  one->help([raw = one.get(), path = std::string(id.internal)] { raw->connect(path); });
  return one->blocks ? one->state.load() : kInProgress;
}
HOST_GPU_EXPORT int ncclCommGetAsyncError(CommunicatorPtr* handle, int* state) {
  return *state = (*handle)->state, kSuccess;
}
HOST_GPU_EXPORT int ncclCommAbort(CommunicatorPtr* handle) {
  const CommunicatorPtr one = *handle;
  delete handle;
  one->aborted = true;
  if (depth > 0) return aborting.push_back(one), kSuccess;
  return wait_for_end(one), kSuccess;
}
HOST_GPU_EXPORT int ncclCommDestroy(CommunicatorPtr* handle) {
  const CommunicatorPtr one = *handle;
  delete handle;
  return wait_for_end(one), kSuccess;
}
HOST_GPU_EXPORT int ncclGroupStart() { return ++depth, kSuccess; }
HOST_GPU_EXPORT int ncclGroupEnd() {
  const InCall in_call;
  if (--depth > 0) return kSuccess;
  int result = kSuccess;
  for (Queued& one : std::exchange(grouped, {})) result = std::max(result, queue(std::move(one)));
  for (const CommunicatorPtr& one : std::exchange(aborting, {})) wait_for_end(one);
  return result;
}

HOST_GPU_EXPORT int ncclAllReduce(const void* in, void* out, size_t count, int type, int operation,
                                  CommunicatorPtr* handle, void* stream) {
  const InCall in_call;
  const Communicator& one = **handle;
  const std::vector<const char*> parts(static_cast<size_t>(one.size), place(in));
  return call(handle, stream, reduction(one, parts, out, count, type, operation, -1));
}
HOST_GPU_EXPORT int ncclReduceScatter(const void* in, void* out, size_t count, int type,
                                      int operation, CommunicatorPtr* handle, void* stream) {
  const InCall in_call;
  const Communicator& one = **handle;
  std::vector<const char*> parts;
  for (int peer = 0; peer < one.size; ++peer)
    parts.push_back(place(in) + static_cast<size_t>(peer) * bytes_of(type, count));
  return call(handle, stream, reduction(one, parts, out, count, type, operation, -1));
}
HOST_GPU_EXPORT int ncclReduce(const void* in, void* out, size_t count, int type, int operation,
                               int root, CommunicatorPtr* handle, void* stream) {
  const InCall in_call;
  const Communicator& one = **handle;
  const std::vector<const char*> parts(static_cast<size_t>(one.size), place(in));
  return call(handle, stream, reduction(one, parts, out, count, type, operation, root));
}
HOST_GPU_EXPORT int ncclAllGather(const void* in, void* out, size_t count, int type,
                                  CommunicatorPtr* handle, void* stream) {
  const InCall in_call;
  const Communicator& one = **handle;
  const size_t bytes = bytes_of(type, count);
  Task task;
  for (int peer = 0; peer < one.size; ++peer) {
    char* to = place(out) + static_cast<size_t>(peer) * bytes;
    task.out.push_back({peer, place(in), bytes});
    task.in.push_back({peer, to, bytes});
    if (!overlap(to, bytes, place(in), bytes)) task.results.emplace_back(to, bytes);
  }
  return call(handle, stream, std::move(task));
}
HOST_GPU_EXPORT int ncclBroadcast(const void* in, void* out, size_t count, int type, int root,
                                  CommunicatorPtr* handle, void* stream) {
  const InCall in_call;
  const Communicator& one = **handle;
  const size_t bytes = bytes_of(type, count);
  Task task;
  for (int peer = 0; peer < one.size && one.rank == root; ++peer)
    task.out.push_back({peer, place(in), bytes});
  task.in.push_back({root, place(out), bytes});
  if (one.rank != root) task.results.emplace_back(place(out), bytes);
  return call(handle, stream, std::move(task));
}
HOST_GPU_EXPORT int ncclSend(const void* in, size_t count, int type, int peer,
                             CommunicatorPtr* handle, void* stream) {
  const InCall in_call;
  Task task;
  task.out.push_back({peer, place(in), bytes_of(type, count)});
  return call(handle, stream, std::move(task));
}
HOST_GPU_EXPORT int ncclRecv(void* out, size_t count, int type, int peer, CommunicatorPtr* handle,
                             void* stream) {
  const InCall in_call;
  Task task;
  task.in.push_back({peer, place(out), bytes_of(type, count)});
  task.results.emplace_back(place(out), bytes_of(type, count));
  return call(handle, stream, std::move(task));
}

}  // extern "C"
