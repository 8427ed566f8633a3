// One invocation of an operation on one rank: what was asked, its description, and the two machines
// that run it.
// Decision: 0143 (docs/decisions).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "whale_ops/core/operation/messages.h"
#include "whale_ops/core/operation/recorder.h"
#include "whale_ops/core/operation/request.h"
#include "whale_ops/core/operation/schedule_run.h"
#include "whale_ops/core/operation/scratch_pool.h"
#include "whale_ops/core/operation/zero_copy_reduce.h"

namespace whale {

// Used by the engine's thread only. Messages go to a ZeroCopyReduce, if the request suits it, or to
// a ScheduleRun, which also handles what the former leaves over.
class Operation : public std::enable_shared_from_this<Operation> {
 public:
  // `call`: number of operations that this rank has started under the key before.
  Operation(uint64_t op_id, Request asked, int rank, int size, uint64_t call, ScratchPool* pool);

  void start(MessageLink* link, std::vector<Arrival> early);
  void arrived(MessageLink* link, Arrival&& arrival);
  void transferred(MessageLink* link, int lane);
  void work(MessageLink* link);
  bool waits_for(int peer) const { return messages_.waits_for(peer); }
  std::vector<int> awaited_peers() const { return messages_.awaited_peers(); }
  // Returns announced messages whose payload was not received, because they came too early or were
  // read in place; the endpoint discards them.
  std::vector<Arrival> take_unreceived();

  bool finished() const {
    return schedule_run_.finished() && (zero_copy_ == nullptr || zero_copy_->finished());
  }
  bool busy() const { return messages_.busy(); }
  const Status& failure() const { return messages_.failure(); }
  // Such as "AllReduce 'key'".
  std::string title() const { return title_of(request); }
  std::string purpose() const { return purpose_of(request); }
  // Whether it moves a tensor, rather than data that ranks tell each other beside tensors. Error
  // messages prefer to name tensors.
  bool moves_tensor() const { return request.dtype_name != kBytes; }
  // Whether a first message belongs to an operation that cannot be under way at the same time as
  // this one, which means that the two ranks are at different places of the program. `other`:
  // description of that operation. `tensor`: whether one of the two moves a tensor.
  bool crosses(const Arrival& first, std::string* other, bool* tensor) const;
  // A text of everything that all ranks must agree on.
  const std::string& descriptor() const { return messages_.descriptor(); }
  uint64_t tag() const { return messages_.tag(); }
  Record record(int64_t end_ns) const;
  std::string left_message(int peer) const { return messages_.left_message(peer); }
  Status mismatch(const Arrival& arrival) const;
  bool agrees(const Arrival& arrival) const { return messages_.agrees(arrival); }
  void return_scratch() { schedule_run_.return_scratch(); }

  const uint64_t id;
  Request request;
  bool settled = false;  // `done` has been called
  int64_t ready_ns = 0;

 private:
  void run_rest(MessageLink* link);

  const uint64_t call_;
  Messages messages_;
  ScheduleRun schedule_run_;
  std::unique_ptr<ZeroCopyReduce> zero_copy_;  // null: the schedule handles everything
  int64_t logical_bytes_ = 0;
  const char* algorithm_ = "";
};

}  // namespace whale
