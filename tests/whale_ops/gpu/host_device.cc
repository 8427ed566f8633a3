// Devices whose memory is the host's, for tests of everything around a device's library
// (core/device/device.h): TensorFlow's CPU is their device. Where ranks are threads of one process,
// what a rank launches stands in a queue, as on a stream, and is carried out by a thread of the
// fabric between them some time after it is first in the queues of all its ranks, as NCCL's kernels
// are: orders of starts that wait for each other, which would hang NCCL, are an error here, and so
// are operations that ranks of a group launch differently. Between processes ranks meet while they
// launch, through the host, as with CUDA IPC. With the transport "pinned" they only copy
// (late_copies.h).
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>

#include "tests/whale_ops/gpu/host_exchange.h"
#include "tests/whale_ops/gpu/late_copies.h"

// What the headers are: nothing to compare with in a program of one compilation.
#ifndef WHALE_CORE_DIGEST
#define WHALE_CORE_DIGEST ""
#endif

namespace {

class Fabric {
 public:
  explicit Fabric(int size)
      : queues_(static_cast<size_t>(size)),
        launched_(static_cast<size_t>(size)),
        thread_([this] { run(); }) {}
  ~Fabric() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  // `last`: null, or the mark that has come when this is through. `hangs`: it never is.
  void queue(int rank, DeviceOperation what, Mark* last, bool hangs) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Entry entry;
    entry.words = words_of(what);
    entry.number = launched_[static_cast<size_t>(rank)][what.group]++;
    entry.due_ns = hangs ? INT64_MAX : 0;
    entry.what = std::move(what);
    entry.last = last;
    queues_[static_cast<size_t>(rank)].push_back(std::move(entry));
    changed_.notify_all();
  }
  // What is queued has no place in the memory of this rank any more.
  void clear(int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    queues_[static_cast<size_t>(rank)].clear();
  }
  Status finished(const Mark& mark, bool* yes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    *yes = mark.finished;
    return *yes ? Status::Ok() : failure_;
  }
  void finish(Mark* mark) {
    const std::lock_guard<std::mutex> lock(mutex_);
    mark->finished = true;
  }

 private:
  Entry* first(int rank) {
    auto& queue = queues_[static_cast<size_t>(rank)];
    return queue.empty() ? nullptr : &queue.front();
  }
  static bool same(const Entry& a, const Entry& b) {
    return a.number == b.number && a.what.group == b.what.group;
  }

  // The first operations of all its ranks, if they are one.
  std::vector<Entry*> together(const Entry& entry) {
    std::vector<Entry*> members;
    for (const int rank : entry.what.group) {
      members.push_back(first(rank));
      if (members.back() == nullptr || !same(*members.back(), entry)) return {};
    }
    return members;
  }

  // Whether the rank's first operation waits, in the end, for one that stands behind an operation
  // of `path`.
  bool circle(int rank, std::set<int>* path) {
    const Entry* mine = first(rank);
    if (mine == nullptr || !together(*mine).empty()) return false;
    if (!path->insert(rank).second) return true;
    for (const int peer : mine->what.group) {
      const Entry* other = first(peer);
      if (other != nullptr && !same(*other, *mine) && circle(peer, path)) return true;
    }
    path->erase(rank);
    return false;
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopping_) {
      int64_t next_ns = INT64_MAX;
      bool went_on = false;
      for (int rank = 0; rank < static_cast<int>(queues_.size()) && failure_.ok(); ++rank) {
        Entry* entry = first(rank);
        const std::vector<Entry*> members =
            entry == nullptr ? std::vector<Entry*>() : together(*entry);
        std::set<int> path;
        if (entry != nullptr && circle(rank, &path))
          failure_ =
              Status::Error(Code::kInternal, "ranks launch operations that wait for each other");
        if (members.empty()) continue;
        for (const Entry* member : members) {
          if (member->words != entry->words)
            failure_ = Status::Error(Code::kInternal,
                                     "ranks launch " + member->words + " and " + entry->words);
        }
        const int64_t now = whale::now_ns();
        if (entry->due_ns == 0)
          entry->due_ns = now + std::uniform_int_distribution<int64_t>(0, 60'000)(draw_);
        int64_t due_ns = 0;
        for (const Entry* member : members) due_ns = std::max(due_ns, member->due_ns);
        if (!failure_.ok() || due_ns > now) {
          next_ns = std::min(next_ns, due_ns);
          continue;
        }
        carry_out(members);
        for (const int member : std::vector<int>(entry->what.group)) {
          auto& queue = queues_[static_cast<size_t>(member)];
          if (queue.front().last != nullptr) queue.front().last->finished = true;
          queue.pop_front();
        }
        went_on = true;
      }
      if (went_on) continue;
      if (next_ns == INT64_MAX) {
        changed_.wait(lock);
      } else {
        changed_.wait_for(
            lock, std::chrono::nanoseconds(std::max<int64_t>(next_ns - whale::now_ns(), 1)));
      }
    }
  }

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::vector<std::deque<Entry>> queues_;                      // by rank
  std::vector<std::map<std::vector<int>, int64_t>> launched_;  // by rank and group
  std::mt19937 draw_;
  Status failure_;
  bool stopping_ = false;
  std::thread thread_;
};

// Those that exist, by number: ranks tell each other one.
class Fabrics {
 public:
  int64_t add(const std::shared_ptr<Fabric>& fabric) {
    const std::lock_guard<std::mutex> lock(mutex_);
    fabrics_[++last_] = fabric;
    return last_;
  }
  std::shared_ptr<Fabric> find(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return fabrics_[number].lock();
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, std::weak_ptr<Fabric>> fabrics_;
  int64_t last_ = 0;
};

Fabrics& fabrics() {
  static Fabrics all;
  return all;
}

class HostDevice final : public whale::Device {
 public:
  // `fabric`: null between processes.
  HostDevice(int rank, size_t buffer_bytes, std::shared_ptr<Fabric> fabric,
             whale::DeviceGather gather, std::string fault)
      : rank_(rank),
        buffer_bytes_(buffer_bytes),
        fabric_(std::move(fabric)),
        gather_(std::move(gather)),
        fault_(std::move(fault)) {}
  ~HostDevice() override {
    abandon();
    if (!marks_.empty()) std::terminate();  // a mark was not given back
  }

  const char* kind() const override { return fault_ == "elsewhere" ? "GPU" : "CPU"; }

  Status mark(void*, void** mark) override {
    if (fault_ == "mark" && rank_ == 1)
      return Status::Error(Code::kUnavailable, "no mark can be made");
    const std::lock_guard<std::mutex> lock(mutex_);
    auto* made = new Mark();
    marks_.insert(made);
    *mark = made;
    return Status::Ok();
  }
  void release(void* mark) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    marks_.erase(static_cast<Mark*>(mark));
    delete static_cast<Mark*>(mark);
  }
  Status launch(const DeviceOperation& what, void* mark) override {
    if (fault_ == "launch" && rank_ == 1)
      return Status::Error(Code::kUnavailable, "nothing can be launched");
    if (what.scale != 1.0f) return Status::Error(Code::kInternal, "results cannot be scaled here");
    if (what.group.at(static_cast<size_t>(what.index)) != rank_)
      return Status::Error(Code::kInternal, "this rank is not where the group has it");
    auto* last = static_cast<Mark*>(mark);
    std::vector<DeviceOperation> parts;
    if (what.kind == OpKind::kAllReduce) {
      const auto most = static_cast<int64_t>(buffer_bytes_ / bytes_of(what.wire));
      for (std::vector<whale::DeviceTensor>& chunk : whale::in_chunks(what, most)) {
        parts.push_back(what);
        parts.back().tensors = std::move(chunk);
      }
    } else {
      parts.push_back(what);
    }
    if (fabric_ == nullptr) {
      Status status;
      for (const DeviceOperation& part : parts) {
        if (status.ok()) status = meet(part, gather_);
      }
      last->finished = true;
      return status;
    }
    for (size_t i = 0; i < parts.size(); ++i)
      fabric_->queue(rank_, std::move(parts[i]), i + 1 == parts.size() ? last : nullptr,
                     fault_ == "hang");
    if (parts.empty()) fabric_->finish(last);
    return Status::Ok();
  }
  Status finished(void* mark, bool* yes) override {
    Status status;
    if (fabric_ == nullptr) {
      *yes = static_cast<Mark*>(mark)->finished;
    } else {
      status = fabric_->finished(*static_cast<Mark*>(mark), yes);
    }
    return fault_ == "finish" && rank_ == 1
               ? Status::Error(Code::kUnavailable, "the device has fallen off the bus")
               : status;
  }
  void abandon() override {
    if (fabric_ != nullptr) fabric_->clear(rank_);
  }

 private:
  const int rank_;
  const size_t buffer_bytes_;
  const std::shared_ptr<Fabric> fabric_;
  const whale::DeviceGather gather_;
  const std::string fault_;
  std::mutex mutex_;
  std::set<Mark*> marks_;
};

Status count(int* devices) {
  *devices = 1;
  return Status::Ok();
}

// `transport`: which fault the device shall have, on the second rank where it is one rank's.
Status open(const char* transport, int rank, int size, int, size_t buffer_bytes,
            whale::DeviceGather gather, const whale::DeviceFailure&,
            std::unique_ptr<whale::Device>* device) {
  if (std::strcmp(transport, "open") == 0 && rank == 1)
    return Status::Error(Code::kUnavailable, "no such device");
  struct Card {
    int64_t process, fabric;
  };
  std::shared_ptr<Fabric> fabric;
  const Card own = {getpid(),
                    rank == 0 ? fabrics().add(fabric = std::make_shared<Fabric>(size)) : 0};
  std::vector<Card> cards(static_cast<size_t>(size));
  // As handles and identifiers are exchanged.
  Status status = gather({}, &own, sizeof(own), cards.data());
  const bool together = std::all_of(cards.begin(), cards.end(),
                                    [&](const Card& card) { return card.process == own.process; });
  if (status.ok() && together && rank != 0) fabric = fabrics().find(cards[0].fabric);
  if (status.ok() && together && fabric == nullptr)
    status = Status::Error(Code::kUnavailable, "the first rank is gone");
  char here = 0;
  std::string all(static_cast<size_t>(size), '\0');
  const Status taken = gather({}, &here, 1, all.data());
  if (!status.ok() || !taken.ok()) return status.ok() ? taken : status;
  *device = std::make_unique<HostDevice>(rank, buffer_bytes, together ? std::move(fabric) : nullptr,
                                         std::move(gather), transport);
  return Status::Ok();
}

Status copies(int ordinal, std::unique_ptr<whale::DeviceCopies>* opened) {
  *opened = std::make_unique<LateCopies>(static_cast<CopyFault>(ordinal));
  return Status::Ok();
}

}  // namespace

extern "C" {

WHALE_EXPORT extern const whale::DevicePlugin whale_device_plugin;
const whale::DevicePlugin whale_device_plugin = {WHALE_CORE_DIGEST, count, open, copies};

}  // extern "C"
