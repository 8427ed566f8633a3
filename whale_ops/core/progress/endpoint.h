// One rank's end of a communicator: matches messages to operations by key, and handles aborts,
// departures and lost ranks.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "whale_ops/core/operation/operation.h"
#include "whale_ops/core/operation/recorder.h"
#include "whale_ops/core/transport/doorbell.h"
#include "whale_ops/core/transport/transport.h"

namespace whale {

// Decides whether to wait actively for other ranks: the longer that has been in vain, the less
// often.
class Patience {
 public:
  bool waits() {
    if (left_ == 0) return true;
    --left_;
    return false;
  }
  void note(bool came) { left_ = vain_ = came ? 0 : std::min(2 * vain_ + 1, kMostInVain); }

 private:
  static constexpr int kMostInVain = 63;
  int vain_ = 0, left_ = 0;
};

// Emulates a network for this rank's outgoing messages (if there are several hosts: only for those
// to other hosts). Zero means "as fast as the transport".
struct LinkModel {
  double latency_s = 0;
  double bandwidth_bytes_per_s = 0;
  bool active() const { return latency_s > 0 || bandwidth_bytes_per_s > 0; }
};

// An operation that waits for other ranks.
struct Wait {
  std::string title;
  bool moves_tensor = false;
  int64_t ready_ns = 0;
  std::vector<int> missing;
};

class WHALE_EXPORT Endpoint final : private TransportSink, private MessageLink {
 public:
  // `wake`: called after something was submitted, to wake the engine.
  Endpoint(std::string name, std::unique_ptr<Transport> transport, std::function<void()> wake);
  ~Endpoint();

  // The following may be called from any thread.
  const std::string& name() const { return name_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  // Returns an identifier for submit() and cancel().
  uint64_t reserve();
  void release(uint64_t id);  // of a reservation that will not be used
  // Starts the operation; every outcome, including bad arguments, is reported through request.done.
  void submit(uint64_t id, Request request);
  void submit(Request request) { submit(reserve(), std::move(request)); }
  // Ends the operation with `status` and aborts the communicator; does nothing if the operation has
  // finished.
  void cancel(uint64_t id, Status status);
  // Fails all pending and future operations of all ranks with this message.
  void abort(Status status);
  // Returns the ranks that operations whose title contains the text wait for, as of the last check.
  std::vector<int> awaited_ranks(const std::string& title) const;
  // Tells that a peer's process is known to be gone: all operations of this rank fail from now on,
  // each with an error that names the operation. Does nothing if the peer has said good-bye.
  // `what`: what happened to it, as the end of a sentence that begins with "rank 1".
  void lose(int peer, const std::string& what);
  bool lost() const { return lost_.load(); }
  // Whether a peer is gone that has not said good-bye.
  bool misses() const { return misses_.load(); }
  // Returns the error with which all operations fail from now on, or OK.
  Status failure() const;
  // Returns the operations that have waited for some time, as of the last check: those that move
  // tensors first, oldest first.
  std::vector<Wait> waits() const;
  // Says good-bye to the other ranks; operations of this rank fail from now on.
  void leave();
  // Whether all ranks have left or are gone, and nothing of this rank is under way any more.
  bool closed() const { return closed_.load(); }
  void set_link(LinkModel link);
  // Sets the algorithm of all-reduces submitted from now on, where it can serve them. Has to be
  // equal on all ranks.
  void set_algorithm(Algorithm algorithm);
  // Sets the figures by which algorithms between hosts are chosen from now on. Has to be equal on
  // all ranks.
  void set_network(const Costs& network);
  Recorder& recorder() { return recorder_; }

  // Whether all ranks are reached through memory, so that any thread may look for their messages.
  bool by_memory() const { return by_memory_; }

  // Called by the engine's thread, or by one thread that stands in for it (engine.h). Progresses
  // all operations until the one submitted under `id` has ended, or nothing has happened for
  // `patience_ns`. Returns the number of rings of the bell before the last look.
  uint32_t carry_on(uint64_t id, int64_t patience_ns, const Doorbell& bell);
  // The following are called by the engine's thread.
  bool poll(int64_t now);
  int64_t next_deadline_ns() const;
  bool needs_polling() const { return transport_ && transport_->needs_polling(); }
  int descriptor() const { return transport_ ? transport_->descriptor() : -1; }
  bool between_processes() const { return transport_ && transport_->between_processes(); }
  bool has_active() const { return !active_.empty(); }
  // Copies out of the arena (arena.h) of a rank that shares its tensors with this one, whether or
  // not its process still exists.
  Status read_lent(int peer, uint64_t place, void* to, uint64_t bytes);

 private:
  // Handles what has come, and continues what can continue; returns whether there was anything to
  // do.
  bool progress(int64_t now);
  bool is_over() const;
  struct InTransit {
    std::shared_ptr<Operation> operation;
    int lane;
    int peer;
    bool is_send;
  };
  struct Delayed {
    int64_t deliver_ns;
    int peer;
    MessageHeader header;
    std::string note;
    const void* payload;
    uint64_t cookie;
  };
  struct Entry {  // work for the engine thread
    enum class What { kSubmit, kCancel, kAbort, kLeave, kLose } what;
    uint64_t id = 0;  // of kLose: the peer's rank
    uint64_t call = 0;
    int64_t ready_ns = 0;
    Request request;
    Status status;
  };
  enum class Reservation { kFree, kCancelled, kSubmitted };

  // Implements TransportSink.
  void arrived(Arrival&& arrival) override;
  void transferred(uint64_t cookie) override;
  // The receiver's operation fails, and reports it.
  void dropped(uint64_t cookie) override { in_transit_.erase(cookie); }
  void failed(const std::string& what) override;
  // Implements MessageLink.
  bool has_left(int peer) const override { return left_[peer]; }
  void post_send(Operation* operation, int lane, int peer, const MessageHeader& header,
                 const std::string& note, const void* payload) override;
  void post_receive(Operation* operation, int lane, const Arrival& arrival, void* dst) override;
  void* stage(size_t bytes, const std::vector<int>& peers) override {
    return transport_->stage(bytes, peers);
  }
  const void* view(const Arrival& arrival) override { return transport_->view(arrival); }
  void discard(const Arrival& arrival) override;
  char* at(int peer, uint64_t offset, uint64_t bytes) override {
    return transport_->at(peer, offset, bytes);
  }
  void give_back(const Arrival& arrival) override { transport_->give_back(arrival); }
  void work_on(Operation* operation) override { working_.push_back(operation->shared_from_this()); }

  Status check(const Request& request) const;
  std::vector<int> hosts_of(const std::vector<int>& group) const;
  bool shares_tensors(const std::vector<int>& group) const;
  bool work();
  void push(Entry entry);
  void handle(Entry entry);
  void begin(Entry entry);
  void emit(int peer, const MessageHeader& header, const std::string& note, const void* payload,
            uint64_t cookie);
  bool flush_delayed(int64_t now);
  void settle(const std::shared_ptr<Operation>& operation);
  void finish(const std::shared_ptr<Operation>& operation, const Status& status);
  void fail_everything(const Status& status, bool tell_others);
  void peer_lost(int peer, const std::string& what);
  Status crossed() const;
  void discard_unexpected();
  void depart();
  void peer_left(int peer);
  void check_waits(int64_t now);
  std::vector<int> missing_peers(const Operation& operation) const;
  std::vector<int> pending_send_peers(const Operation* operation) const;
  void remember_finished(const Operation& operation);

  const std::string name_;
  std::unique_ptr<Transport> transport_;
  const int rank_;
  const int size_;
  // The host of each rank, numbered from 0; ranks of one host all share memory.
  const std::vector<int> hosts_;
  const bool several_hosts_;
  const bool by_memory_;
  const std::function<void()> wake_;
  Recorder recorder_;

  mutable std::mutex mutex_;  // guards the members up to the next comment
  std::vector<Entry> inbox_;
  std::unordered_map<std::string, uint64_t> calls_;
  std::unordered_map<uint64_t, Reservation> reservations_;
  uint64_t next_id_ = 1;
  LinkModel link_;
  Algorithm algorithm_ = Algorithm::kAuto;
  Costs network_ = kNetwork;
  std::vector<Wait> waits_;  // as of the last check_waits
  Status failure_;           // copy of aborted_ for other threads
  std::atomic<bool> closed_{false};
  std::atomic<bool> misses_{false};
  std::atomic<bool> lost_{false};

  // Used by the engine's thread, or the thread that stands in for it.
  uint64_t followed_ = 0;  // the operation that ends carry_on(); 0: it has ended
  Patience patience_;
  std::unordered_map<uint64_t, std::shared_ptr<Operation>> active_;  // by tag
  std::unordered_map<uint64_t, std::vector<Arrival>> unexpected_;    // by tag
  // Descriptors of the latest finished operations, by tag.
  std::unordered_map<uint64_t, std::string> finished_;
  std::deque<uint64_t> finished_order_;
  std::unordered_map<uint64_t, InTransit> in_transit_;  // by cookie
  uint64_t next_cookie_ = 1;
  std::vector<std::shared_ptr<Operation>> working_;  // operations with work that needs no message
  std::deque<Delayed> delayed_;
  LinkModel engine_link_;
  int64_t link_free_ns_ = 0;
  std::vector<bool> left_;
  std::vector<bool> gone_;  // known to be dead, without having said good-bye
  // For peers that have left: when sends to them are given up.
  std::unordered_map<int, int64_t> send_grace_ns_;
  bool self_left_ = false;
  Status aborted_;
  int64_t next_check_ns_ = 0;
  ScratchPool scratch_;
};

}  // namespace whale
