#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "whale_ops/gpu/kernels.h"
#include "whale_ops/gpu/queue.h"
#include "whale_ops/gpu/transport.h"

namespace whale::cuda {
namespace {

constexpr size_t kAlignmentBytes = 256;

// What a rank tells the others once.
struct Card {
  CUipcMemHandle memory;
  CUipcEventHandle written, taken;
};

// Every rank copies what others need into memory that all ranks have mapped, and reads what it
// needs from theirs. Sums are made in group order, so that all ranks get the same bits. A stream
// can wait for an event of another process only after that event was recorded there, so the ranks
// synchronise on the host after recording. Waiting inside a kernel instead would be a deadlock on a
// GPU that runs the kernels of one rank at a time.
class IpcTransport final : public DeviceTransport {
 public:
  IpcTransport(const Gpu& gpu, int rank, int size, size_t max_bytes, DeviceGather gather,
               DeviceFailure failure)
      : gpu_(gpu),
        rank_(rank),
        max_bytes_(max_bytes),
        gather_(std::move(gather)),
        ranks_failure_(std::move(failure)),
        peers_(static_cast<size_t>(size)) {}

  ~IpcTransport() override {
    for (size_t i = 0; i < peers_.size(); ++i) {
      Peer& peer = peers_[i];
      if (peer.memory != 0)
        static_cast<int>(i) == rank_ ? driver().cuMemFree(peer.memory)
                                     : driver().cuIpcCloseMemHandle(peer.memory);
      if (peer.written != nullptr) driver().cuEventDestroy(peer.written);
      if (peer.taken != nullptr) driver().cuEventDestroy(peer.taken);
    }
  }

  Status open() {
    Peer& own = peers_[static_cast<size_t>(rank_)];
    Card card = {};
    Status status = check(driver().cuMemAlloc(&own.memory, max_bytes_), "cuMemAlloc");
    constexpr unsigned kFlags = kEventDisableTiming | kEventInterprocess;
    if (status.ok()) status = check(driver().cuEventCreate(&own.written, kFlags), "cuEventCreate");
    if (status.ok()) status = check(driver().cuEventCreate(&own.taken, kFlags), "cuEventCreate");
    if (status.ok())
      status = check(driver().cuIpcGetMemHandle(&card.memory, own.memory), "cuIpcGetMemHandle");
    if (status.ok())
      status =
          check(driver().cuIpcGetEventHandle(&card.written, own.written), "cuIpcGetEventHandle");
    if (status.ok())
      status = check(driver().cuIpcGetEventHandle(&card.taken, own.taken), "cuIpcGetEventHandle");
    std::vector<Card> cards(peers_.size());
    const Status met = gather_({}, &card, sizeof(card), cards.data());
    if (status.ok()) status = met;
    for (size_t i = 0; status.ok() && i < peers_.size(); ++i) {
      if (static_cast<int>(i) == rank_) continue;
      status = check(
          driver().cuIpcOpenMemHandle(&peers_[i].memory, cards[i].memory, kIpcLazyEnablePeerAccess),
          "cuIpcOpenMemHandle");
      if (status.ok())
        status = check(driver().cuIpcOpenEventHandle(&peers_[i].written, cards[i].written),
                       "cuIpcOpenEventHandle");
      if (status.ok())
        status = check(driver().cuIpcOpenEventHandle(&peers_[i].taken, cards[i].taken),
                       "cuIpcOpenEventHandle");
    }
    return agree({}, status);
  }

  const char* name() const override { return "ipc"; }

  Status all_reduce(const DeviceOperation& what, const void* input, void* output, int64_t count,
                    CUstream stream) override {
    const auto bytes = static_cast<size_t>(count) * bytes_of(what.wire);
    if (bytes_of(what.wire) == 0 || bytes > max_bytes_) {
      return Status::Error(Code::kInvalidArgument,
                           std::to_string(count) +
                               " elements do not fit into the buffer that GPUs share, of " +
                               std::to_string(max_bytes_) +
                               " bytes, or are not floats; divide the tensor, or cast it");
    }
    return in_turn(
        what.group, stream, [&] { return show(input, 0, bytes, stream); },
        [&] {
          return reduce(gpu_, at(what.group, 0), output, count, what.wire, what.reduction, stream);
        });
  }

  // Every rank copies what it has for the others into its shared memory, as much at a time as fits,
  // and each rank reads what is for it.
  Status exchange(const DeviceOperation& what, CUstream stream) override {
    const DeviceTensor& tensor = what.tensors[0];
    switch (what.kind) {
      case OpKind::kReduceScatter: return reduce_scatter(what, stream);
      case OpKind::kAllToAll: return all_to_all(what, stream);
      case OpKind::kAllGather: return from_each(what, what.counts, tensor, stream);
      case OpKind::kSend:
      case OpKind::kRecv: return from_each(what, {tensor.count, 0}, tensor, stream);
      case OpKind::kBroadcast: {
        Status status;
        for (const DeviceTensor& one : what.tensors) {
          std::vector<int64_t> counts(what.size(), 0);
          counts[static_cast<size_t>(what.root)] = one.count;
          if (status.ok()) status = from_each(what, counts, one, stream);
        }
        return status;
      }
      default:
        return Status::Error(Code::kInternal,
                             std::string("the transport CUDA IPC does not support the operation ") +
                                 name_of(what.kind));
    }
  }

  // A rank may close its device when its own part of the last operation has ended, while others
  // still read its memory: what they have queued, they have recorded before that operation was
  // queued everywhere (in_turn). What others read after an error does not matter.
  Status let_others_end(CUstream stream) override {
    const Status failed = ranks_failure_();
    return failed.ok() ? wait_for_readers(stream) : failed;
  }

  // Nothing to do: streams wait only for events that were recorded before, and a lost rank's events
  // complete when its process ends.
  void abandon() override { used_ = false; }

 private:
  struct Peer {
    CUdeviceptr memory = 0;
    CUevent written = nullptr;
    CUevent taken = nullptr;
  };

  // Every rank has `counts` elements for all ranks; they are concatenated in the output of ranks
  // that have one.
  Status from_each(const DeviceOperation& what, const std::vector<int64_t>& counts,
                   const DeviceTensor& tensor, CUstream stream) {
    const auto own = static_cast<size_t>(what.index);
    const std::vector<int64_t> offsets = offsets_of(counts);
    const auto piece = static_cast<int64_t>(max_bytes_ / what.element_bytes);
    Status status;
    for (int64_t begin = 0; status.ok() && begin < *std::max_element(counts.begin(), counts.end());
         begin += piece) {
      const auto part = [&](size_t member) {
        return bytes(what, std::clamp<int64_t>(counts[member] - begin, 0, piece));
      };
      status = in_turn(
          what.group, stream,
          [&] {
            return show(static_cast<const char*>(tensor.input) + bytes(what, begin), 0, part(own),
                        stream);
          },
          [&] {
            Status taken;
            for (size_t member = 0; member < what.size() && tensor.output != nullptr; ++member) {
              char* to = static_cast<char*>(tensor.output) + bytes(what, offsets[member] + begin);
              if (taken.ok()) taken = take(what.group[member], 0, to, part(member), stream);
            }
            return taken;
          });
    }
    return status;
  }

  // Every rank has a part for each rank; the parts share the memory.
  Status all_to_all(const DeviceOperation& what, CUstream stream) {
    const std::vector<int64_t> from = offsets_of(what.counts), to = offsets_of(what.recv_counts);
    const auto own = static_cast<size_t>(what.index);
    const int64_t piece = room(what);
    Status status;
    for (int64_t begin = 0; status.ok() && begin < what.largest; begin += piece) {
      const auto left = [&](int64_t count) {
        return bytes(what, std::clamp<int64_t>(count - begin, 0, piece));
      };
      status = in_turn(
          what.group, stream,
          [&] {
            Status shown;
            for (size_t member = 0; member < what.size(); ++member) {
              const char* part = static_cast<const char*>(what.tensors[0].input) +
                                 bytes(what, from[member] + begin);
              if (shown.ok())
                shown = show(part, member * bytes(what, piece), left(what.counts[member]), stream);
            }
            return shown;
          },
          [&] {
            Status taken;
            for (size_t member = 0; member < what.size(); ++member) {
              char* part =
                  static_cast<char*>(what.tensors[0].output) + bytes(what, to[member] + begin);
              if (taken.ok())
                taken = take(what.group[member], own * bytes(what, piece), part,
                             left(what.recv_counts[member]), stream);
            }
            return taken;
          });
    }
    return status;
  }

  Status reduce_scatter(const DeviceOperation& what, CUstream stream) {
    const std::vector<int64_t> offsets = offsets_of(what.counts);
    const auto own = static_cast<size_t>(what.index);
    const int64_t piece = room(what);
    Status status;
    for (int64_t begin = 0;
         status.ok() && begin < *std::max_element(what.counts.begin(), what.counts.end());
         begin += piece) {
      const auto left = [&](size_t member) {
        return std::clamp<int64_t>(what.counts[member] - begin, 0, piece);
      };
      status = in_turn(
          what.group, stream,
          [&] {
            Status shown;
            for (size_t member = 0; member < what.size(); ++member) {
              const char* part = static_cast<const char*>(what.tensors[0].input) +
                                 bytes(what, offsets[member] + begin);
              if (shown.ok())
                shown = show(part, member * bytes(what, piece), bytes(what, left(member)), stream);
            }
            return shown;
          },
          [&] {
            if (left(own) == 0) return Status::Ok();
            char* to = static_cast<char*>(what.tensors[0].output) + bytes(what, begin);
            return reduce(gpu_, at(what.group, own * bytes(what, piece)), to, left(own), what.dtype,
                          what.reduction, stream);
          });
    }
    return status;
  }

  static size_t bytes(const DeviceOperation& what, int64_t count) {
    return static_cast<size_t>(count) * what.element_bytes;
  }
  // Elements of one of as many parts as there are ranks; each part begins at an aligned address.
  int64_t room(const DeviceOperation& what) const {
    return static_cast<int64_t>(max_bytes_ / what.size() / kAlignmentBytes * kAlignmentBytes /
                                what.element_bytes);
  }
  std::vector<const void*> at(const std::vector<int>& group, size_t offset) const {
    std::vector<const void*> found;
    for (const int rank : group) found.push_back(memory_of(rank) + offset);
    return found;
  }
  char* memory_of(int rank) const {
    return reinterpret_cast<char*>(peers_[static_cast<size_t>(rank)].memory);
  }
  Status show(const void* from, size_t offset, size_t bytes, CUstream stream) const {
    return queue_copy(memory_of(rank_) + offset, from, bytes, stream);
  }
  Status take(int rank, size_t offset, void* to, size_t bytes, CUstream stream) const {
    return queue_copy(to, memory_of(rank) + offset, bytes, stream);
  }

  // Calls `write`, which fills this rank's memory, when nobody reads it any more, and `read`, which
  // reads the others' memory, when they have filled it. Both queue on the stream.
  template <typename Write, typename Read>
  Status in_turn(const std::vector<int>& group, CUstream stream, const Write& write,
                 const Read& read) {
    const Peer& own = peers_[static_cast<size_t>(rank_)];
    Status status = wait_for_readers(stream);
    if (status.ok()) status = write();
    if (status.ok()) status = check(driver().cuEventRecord(own.written, stream), "cuEventRecord");
    status = agree(group, status);
    for (const int rank : group) {
      if (status.ok())
        status =
            check(driver().cuStreamWaitEvent(stream, peers_[static_cast<size_t>(rank)].written, 0),
                  "cuStreamWaitEvent");
    }
    if (status.ok()) status = read();
    if (status.ok()) status = check(driver().cuEventRecord(own.taken, stream), "cuEventRecord");
    used_ = true;
    return agree(group, status);
  }

  // Makes the stream wait for those who read this rank's memory in the last operation, whichever
  // ranks they were.
  Status wait_for_readers(CUstream stream) const {
    Status status;
    for (const Peer& peer : peers_) {
      if (status.ok() && used_)
        status = check(driver().cuStreamWaitEvent(stream, peer.taken, 0), "cuStreamWaitEvent");
    }
    return status;
  }

  // Synchronises with the other ranks. An error of one rank becomes an error of all, so that nobody
  // waits for a rank that has given up.
  Status agree(const std::vector<int>& group, const Status& status) {
    const auto mine = static_cast<int32_t>(status.code);
    std::vector<int32_t> all(group.empty() ? peers_.size() : group.size());
    const Status met = gather_(group, &mine, sizeof(mine), all.data());
    if (!status.ok() || !met.ok()) return status.ok() ? met : status;
    for (size_t i = 0; i < all.size(); ++i) {
      if (all[i] == 0) continue;
      return Status::Error(Code::kUnavailable,
                           "rank " +
                               std::to_string(group.empty() ? static_cast<int>(i) : group[i]) +
                               " had an error of its GPU; look at the log of that rank");
    }
    return Status::Ok();
  }

  const Gpu& gpu_;
  const int rank_;
  const size_t max_bytes_;
  const DeviceGather gather_;
  const DeviceFailure ranks_failure_;
  std::vector<Peer> peers_;  // by rank, this one too
  bool used_ = false;
};

}  // namespace

Status open_ipc(const Gpu& gpu, int rank, int size, size_t max_bytes, DeviceGather gather,
                DeviceFailure failure, std::unique_ptr<DeviceTransport>* transport) {
  auto made = std::make_unique<IpcTransport>(gpu, rank, size, max_bytes, std::move(gather),
                                             std::move(failure));
  const Status status = made->open();
  if (status.ok()) *transport = std::move(made);
  return status;
}

}  // namespace whale::cuda
