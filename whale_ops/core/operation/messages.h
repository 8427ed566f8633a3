// The messages of one operation: which ones it expects, which ones came before they were expected,
// and which peers have been sent the operation's description.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "whale_ops/core/collective/algorithms.h"
#include "whale_ops/core/operation/request.h"
#include "whale_ops/core/transport/transport.h"

namespace whale {

class Operation;

// What an operation needs from its endpoint.
class MessageLink {
 public:
  virtual bool has_left(int peer) const = 0;
  virtual void post_send(Operation* operation, int lane, int peer, const MessageHeader& header,
                         const std::string& note, const void* payload) = 0;
  virtual void post_receive(Operation* operation, int lane, const Arrival& arrival, void* dst) = 0;
  // The same as in Transport.
  virtual void* stage(size_t bytes, const std::vector<int>& peers) = 0;
  virtual const void* view(const Arrival& arrival) = 0;
  virtual void discard(const Arrival& arrival) = 0;
  virtual char* at(int peer, uint64_t offset, uint64_t bytes) = 0;
  virtual void give_back(const Arrival& arrival) = 0;
  // Makes the engine call Operation::work() soon.
  virtual void work_on(Operation* operation) = 0;

 protected:
  ~MessageLink() = default;
};

// A message that a lane of the operation waits for.
struct ExpectedMessage {
  int lane;  // lane that waits for it
  int peer;
  uint32_t id;
  Slice slice;  // where its elements go
};

// Owned by the operation, whose machines (ScheduleRun, ZeroCopyReduce) exchange messages only
// through this object. They also record here what is common to the whole operation: its failure,
// and when the first message came. Used by the engine's thread only.
class Messages {
 public:
  // While one of these exists, nobody checks whether the operation has finished: completions that
  // are reported within a call must not finish a step before all its messages are posted.
  class Busy {
   public:
    explicit Busy(Messages* messages) : messages_(messages) { ++messages_->busy_; }
    ~Busy() { --messages_->busy_; }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

   private:
    Messages* const messages_;
  };

  // `call`: number of operations that this rank has started under the key before.
  Messages(Operation* operation, const Request* request, int rank, int size, uint64_t call);

  uint64_t tag() const { return tag_; }
  // A text of everything that all ranks must agree on.
  const std::string& descriptor() const { return descriptor_; }
  bool agrees(const Arrival& arrival) const {
    return arrival.header.descriptor == descriptor_hash_;
  }
  int rank() const { return rank_; }
  int rank_of(int group_index) const {
    return request_->group.empty() ? group_index : request_->group[group_index];
  }

  // Adds messages that came before the operation was started.
  void add_early(std::vector<Arrival> early) { early_ = std::move(early); }
  const std::vector<Arrival>& early() const { return early_; }
  // Returns the message if it has come. Else the message is expected from now on; or the operation
  // fails, if the peer has left.
  std::optional<Arrival> await(MessageLink* link, const ExpectedMessage& expected);
  // Returns what a message that has come was expected for. None: it was not expected, and is kept
  // until await() asks for it.
  std::optional<ExpectedMessage> match(Arrival* arrival);
  // Returns false, and fails the operation, if the peer has left.
  bool can_send(const MessageLink& link, int peer);
  // Sends a message. The first one to each peer carries the operation's description as text.
  void send(MessageLink* link, int lane, int peer, MessageKind kind, uint32_t id, uint64_t bytes,
            const void* payload);
  void receive(MessageLink* link, int lane, const Arrival& arrival, void* dst) {
    link->post_receive(operation_, lane, arrival, dst);
  }
  void request_work(MessageLink* link) { link->work_on(operation_); }
  // Whether a message from the peer is still expected.
  bool waits_for(int peer) const;
  bool waits() const { return !expected_.empty(); }
  std::vector<int> awaited_peers() const;
  std::vector<Arrival> take_early() { return std::move(early_); }
  std::string left_message(int peer) const;

  bool busy() const { return busy_ > 0; }
  bool ok() const { return failure_.ok(); }
  const Status& failure() const { return failure_; }
  void fail(Status status) { failure_ = std::move(status); }

  void note_first();     // a message of another rank has come
  void note_transfer();  // a transfer of any kind is complete
  int64_t first_ns() const { return first_ns_; }
  int64_t transferred_ns() const { return transferred_ns_; }
  void count_wire_bytes(int64_t bytes) { wire_bytes_ += bytes; }
  int64_t wire_bytes() const { return wire_bytes_; }

 private:
  Operation* const operation_;
  const Request* const request_;
  const int rank_;
  const uint64_t tag_;
  const std::string descriptor_;
  const uint64_t descriptor_hash_;
  const std::string note_;
  std::vector<ExpectedMessage> expected_;
  std::vector<Arrival> early_;
  std::vector<bool> greeted_;  // ranks that have been sent our description
  int busy_ = 0;
  Status failure_;
  int64_t first_ns_ = 0;
  int64_t transferred_ns_ = 0;
  int64_t wire_bytes_ = 0;
};

}  // namespace whale
