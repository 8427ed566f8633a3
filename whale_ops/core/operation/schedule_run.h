// Walks an operation's schedule (collective/algorithms.h): sends and awaits a step's messages, then
// does its sums and copies.
#pragma once

#include <vector>

#include "whale_ops/core/collective/algorithms.h"
#include "whale_ops/core/operation/buffers.h"
#include "whale_ops/core/operation/messages.h"
#include "whale_ops/core/operation/request.h"
#include "whale_ops/core/operation/scratch_pool.h"

namespace whale {

// Owned by its operation. Engine thread only.
class ScheduleRun {
 public:
  // The request may change until prepare().
  ScheduleRun(const Request* request, Problem problem, Messages* messages, ScratchPool* pool);

  const Problem& problem() const { return problem_; }
  const char* algorithm() const { return schedule_.algorithm; }
  // Makes the schedule for what the request asks, and takes its scratch memory.
  void prepare();
  // The same, for an all-reduce of so many elements.
  void prepare(int64_t count);
  void start(MessageLink* link);
  // A message that was awaited is there.
  void arrived(MessageLink* link, const ExpectedMessage& expected, const Arrival& arrival);
  // A message of the lane has gone out, or the elements of one have come.
  void transferred(MessageLink* link, int lane);
  // Whether all lanes have been walked to their ends; so it is before start().
  bool finished() const { return open_lanes_ == 0; }
  // Announced messages that are read in place.
  std::vector<Arrival> take_viewed();
  void return_scratch() { buffers_.return_scratch(); }

 private:
  // A payload that the step's locals read where it lies, instead of the scratch memory that it
  // would be received into.
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
        landed;  // received into the mirror; they go to their pieces when the step is complete
    void* staged = nullptr;  // what the current step sends, in memory of the transport
  };

  void post(MessageLink* link, int lane);
  void receive(MessageLink* link, const ExpectedMessage& expected, const Arrival& arrival);
  void run_lane(MessageLink* link, int lane);
  // Runs the lane if nothing keeps it.
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
