// Runs an operation's schedule (collective/algorithms.h): sends and expects the messages of a step,
// then does its sums and copies.
#pragma once

#include <vector>

#include "whale_ops/core/collective/algorithms.h"
#include "whale_ops/core/operation/buffers.h"
#include "whale_ops/core/operation/messages.h"
#include "whale_ops/core/operation/request.h"
#include "whale_ops/core/operation/scratch_pool.h"

namespace whale {

// Owned by its operation. Used by the engine's thread only.
class ScheduleRun {
 public:
  // The request may change until prepare().
  ScheduleRun(const Request* request, Problem problem, Messages* messages, ScratchPool* pool);

  const Problem& problem() const { return problem_; }
  const char* algorithm() const { return schedule_.algorithm; }
  // Makes the schedule for the request, and allocates its scratch memory.
  void prepare();
  // The same, for an all-reduce of `count` elements.
  void prepare(int64_t count);
  void start(MessageLink* link);
  // An expected message has come.
  void arrived(MessageLink* link, const ExpectedMessage& expected, const Arrival& arrival);
  // A message of the lane has been sent, or the elements of one have been received.
  void transferred(MessageLink* link, int lane);
  // Whether all lanes have been run to their ends; also true before start().
  bool finished() const { return open_lanes_ == 0; }
  // Returns announced messages that are read in place, to be discarded.
  std::vector<Arrival> take_viewed();
  void return_scratch() { buffers_.return_scratch(); }

 private:
  // A payload that the step's locals read in place, instead of in the scratch memory that it would
  // be received into.
  struct PayloadView {
    Buffer buffer;  // that scratch memory
    int64_t offset;
    const void* data;
    Arrival arrival;
  };
  struct LaneState {
    size_t step = 0;
    int pending = 0;
    std::vector<PayloadView> views;
    std::vector<Slice>
        landed;  // received into the mirror; scattered to the pieces when the step is complete
    void* staged = nullptr;  // payload of the current step, in memory of the transport
  };

  void post(MessageLink* link, int lane);
  void receive(MessageLink* link, const ExpectedMessage& expected, const Arrival& arrival);
  void run_lane(MessageLink* link, int lane);
  // Continues the lane, unless it waits for messages.
  void resume(MessageLink* link, int lane);
  void* stage(MessageLink* link, const Step& step) const;
  const void* payload_of(MessageLink* link, const Transfer& send);
  void run_locals(MessageLink* link, const Step& step, const Step* next, LaneState* lane);

  const Request* const request_;
  Problem problem_;
  Messages* const messages_;
  Schedule schedule_;
  Buffers buffers_;
  std::vector<LaneState> lanes_;
  size_t open_lanes_ = 0;
};

}  // namespace whale
