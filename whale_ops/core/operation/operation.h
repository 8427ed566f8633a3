// One invocation of an operation on one rank: walks its schedule as messages complete.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "whale_ops/core/collective/algorithms.h"
#include "whale_ops/core/operation/buffers.h"
#include "whale_ops/core/operation/recorder.h"
#include "whale_ops/core/operation/request.h"
#include "whale_ops/core/operation/scratch_pool.h"
#include "whale_ops/core/transport/transport.h"

namespace whale {

// What an operation asks of its endpoint.
class MessageLink {
 public:
  virtual bool has_left(int peer) const = 0;
  virtual void post_send(class Operation* operation, int lane, int peer,
                         const MessageHeader& header, const std::string& note,
                         const void* payload) = 0;
  virtual void post_receive(class Operation* operation, int lane, const Arrival& arrival,
                            void* dst) = 0;
  // As in Transport.
  virtual void* stage(size_t bytes, const std::vector<int>& peers) = 0;
  virtual const void* view(const Arrival& arrival) = 0;
  virtual void discard(const Arrival& arrival) = 0;
  virtual char* at(int peer, uint64_t offset, uint64_t bytes) = 0;
  virtual void give_back(const Arrival& arrival) = 0;
  // work() is called soon.
  virtual void work_on(class Operation* operation) = 0;

 protected:
  ~MessageLink() = default;
};

class Operation : public std::enable_shared_from_this<Operation> {
 public:
  // `call`: how many operations this rank has started under the key before.
  Operation(uint64_t op_id, Request asked, int rank, int size, uint64_t call, ScratchPool* pool);

  void start(MessageLink* link, std::vector<Arrival> early);
  void arrived(MessageLink* link, Arrival&& arrival);
  void transferred(MessageLink* link, int lane);
  void work(MessageLink* link);
  // Whether a message from the peer is still to come.
  bool waits_for(int peer) const;
  std::vector<int> awaited_peers() const;
  // Announced messages that have not been received: they came before they were waited for, or are
  // read in place.
  std::vector<Arrival> take_unreceived();

  bool finished() const { return open_lanes_ == 0; }
  bool busy() const { return busy_ > 0; }
  const Status& failure() const { return failure_; }
  // "AllReduce 'key'"
  std::string title() const;
  // What it is for, where that was told, else the title.
  std::string purpose() const { return request.alone.empty() ? title() : request.alone; }
  // Whether it moves a tensor, and not what ranks tell each other beside them: errors name tensors
  // where they can.
  bool moves_tensor() const { return request.dtype_name != kBytes; }
  // Whether a first message tells of an operation that cannot be under way beside this one: the two
  // ranks have come to different places in the program. `other`: that operation in words. `tensor`:
  // whether one of the two moves a tensor.
  bool crosses(const Arrival& first, std::string* other, bool* tensor) const;
  // Everything that all ranks must agree on, in words.
  const std::string& descriptor() const { return descriptor_; }
  uint64_t tag() const { return tag_; }
  Record record(int64_t end_ns) const;
  std::string left_message(int peer) const;
  Status mismatch(const Arrival& arrival) const;
  bool agrees(const Arrival& arrival) const {
    return arrival.header.descriptor == descriptor_hash_;
  }
  void return_scratch() { buffers_.return_scratch(); }

  const uint64_t id;
  Request request;
  bool settled = false;  // `done` has been called
  int64_t ready_ns = 0;

 private:
  // A payload that the step's locals read where it lies, instead of the scratch memory that it
  // would be received into.
  struct Seen {
    Buffer buffer;  // that scratch memory
    int64_t offset;
    const void* data;
    Arrival arrival;
  };
  struct LaneState {
    size_t step = 0;
    int pending = 0;
    std::vector<Seen> seen;
    // Received into the mirror; they go to their pieces when the step is complete.
    std::vector<Slice> landed;
    void* staged = nullptr;  // what the current step sends, in memory of the transport
  };
  struct Expected {
    int lane;
    int peer;
    uint32_t id;
    Slice slice;
  };

  // Where a rank's part of a piece lies in its arena.
  struct Place {
    static constexpr uint64_t kNowhere = ~uint64_t{0};
    uint64_t input = kNowhere;
    uint64_t output = kNowhere;
  };
  // A piece that lies in the arenas of all ranks: where, by rank of the group.
  struct Shared {
    std::vector<const char*> inputs;
    std::vector<char*> outputs;
    int64_t count = 0;
    int64_t done = 0;  // elements of this rank's share
  };
  static constexpr int kLendLane = -1;
  static constexpr uint32_t kLendId = 0xffffffff;

  int to_rank(int group_index) const {
    return request.group.empty() ? group_index : request.group[group_index];
  }
  void post(MessageLink* link, int lane);
  void run_lane(MessageLink* link, int lane);
  void* stage(MessageLink* link, const Step& step) const;
  const void* payload_of(MessageLink* link, const Transfer& send);
  void run_locals(MessageLink* link, const Step& step, const Step* next, LaneState* lane);
  void match(MessageLink* link, const Expected& expected, const Arrival& arrival);
  void prepare();
  void start_lanes(MessageLink* link);
  bool lends();
  void lend(MessageLink* link);
  void borrow(MessageLink* link, const Arrival& arrival);
  void run_rest(MessageLink* link);

  const int rank_;
  const uint64_t call_;
  uint64_t tag_ = 0;
  uint64_t descriptor_hash_ = 0;
  std::string descriptor_;
  std::string note_;
  Problem problem_;
  Schedule schedule_;
  Buffers buffers_;
  std::vector<LaneState> lanes_;
  std::vector<Expected> expected_;
  std::vector<Arrival> early_;
  std::vector<bool> greeted_;  // ranks that have our note
  size_t open_lanes_ = 1;
  int busy_ = 0;
  Status failure_;
  int64_t first_ns_ = 0;        // when the first message of another rank was there
  int64_t transferred_ns_ = 0;  // when the first transfer of any kind was complete
  int64_t wire_bytes_ = 0;
  int64_t logical_bytes_ = 0;

  // Of tensors that all ranks have mapped; see zero_copy_reduce.cc.
  bool whole_ = false;  // there were no pieces
  // Pieces that are large enough to lie in arenas; none: this is no such operation.
  std::vector<size_t> lent_;
  std::vector<Place> places_;  // of these; what is sent
  // What the others have sent, by rank of the group, until it is given back.
  std::vector<Arrival> borrowed_;
  std::vector<bool> through_;   // pieces that are added up where they lie
  std::vector<Shared> shared_;  // of these, those to which this rank has not added its share
  int missing_ = 0;             // ranks whose places are not known
  int away_ = 0;                // ranks that have yet to give back this rank's memory
  bool worked_ = false;         // all sums of this rank are made
  bool shares_ = false;
};

}  // namespace whale
