#include "whale_ops/core/operation/schedule_run.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "whale_ops/core/collective/reduce.h"
#include "whale_ops/core/operation/note.h"

namespace whale {

ScheduleRun::ScheduleRun(const Request* request, Problem problem, Messages* messages,
                         ScratchPool* pool)
    : request_(request),
      problem_(std::move(problem)),
      messages_(messages),
      buffers_(request, &problem_, pool) {}

void ScheduleRun::prepare() {
  schedule_ = make_schedule(problem_);
  buffers_.prepare(schedule_);
}

void ScheduleRun::prepare(int64_t count) {
  problem_.counts = {count};
  prepare();
}

void ScheduleRun::start(MessageLink* link) {
  lanes_.resize(schedule_.lanes.size());
  open_lanes_ = lanes_.size();
  const Messages::Busy busy(messages_);
  for (size_t lane = 0; lane < lanes_.size() && messages_->ok(); ++lane) {
    if (schedule_.lanes[lane].empty()) {
      --open_lanes_;
      continue;
    }
    post(link, static_cast<int>(lane));
    if (lanes_[lane].pending == 0) run_lane(link, static_cast<int>(lane));
  }
}

// Posts the messages of the lane's current step. `pending` starts at one more than their number, so
// that completions which are reported meanwhile cannot finish the step before all messages are
// posted.
void ScheduleRun::post(MessageLink* link, int lane) {
  const Step& step = schedule_.lanes[lane][lanes_[lane].step];
  lanes_[lane].pending = 1 + static_cast<int>(step.sends.size() + step.recvs.size());
  const Messages::Busy busy(messages_);
  for (const Transfer& recv : step.recvs) {
    if (!messages_->ok()) break;
    const ExpectedMessage expected{lane, messages_->rank_of(recv.peer), recv.id, recv.slice};
    const std::optional<Arrival> arrival = messages_->await(link, expected);
    if (arrival.has_value()) receive(link, expected, *arrival);
  }
  // A payload for several peers is copied once.
  void* staged = std::exchange(lanes_[lane].staged, nullptr);
  if (staged == nullptr && step.sends.size() > 1 && messages_->ok()) {
    staged = stage(link, step);
    if (staged != nullptr) buffers_.gather(step.sends[0].slice, staged);
  }
  for (const Transfer& send : step.sends) {
    if (!messages_->ok()) break;
    const int peer = messages_->rank_of(send.peer);
    if (!messages_->can_send(*link, peer)) break;
    const size_t bytes = buffers_.bytes_of(send.slice);
    messages_->count_wire_bytes(static_cast<int64_t>(bytes));
    messages_->send(link, lane, peer, MessageKind::kData, send.id, bytes,
                    staged != nullptr ? staged : payload_of(link, send));
  }
  --lanes_[lane].pending;
}

void ScheduleRun::run_lane(MessageLink* link, int lane) {
  LaneState& state = lanes_[lane];
  const Lane& steps = schedule_.lanes[lane];
  const Messages::Busy busy(messages_);
  while (messages_->ok() && state.pending == 0) {
    for (const Slice& slice : state.landed) buffers_.scatter(buffers_.mirror(slice), slice);
    state.landed.clear();
    const bool last = state.step + 1 == steps.size();
    run_locals(link, steps[state.step], last ? nullptr : &steps[state.step + 1], &state);
    ++state.step;
    if (last) {
      state.pending = -1;
      --open_lanes_;
      break;
    }
    post(link, lane);
  }
}

// Returns where the payload of a message lies contiguously: in place, in memory of the transport,
// or in the mirror.
const void* ScheduleRun::payload_of(MessageLink* link, const Transfer& send) {
  if (const char* there = buffers_.address(send.slice); there != nullptr || send.slice.count == 0)
    return there;
  void* gathered = link->stage(buffers_.bytes_of(send.slice), {messages_->rank_of(send.peer)});
  if (gathered == nullptr) gathered = buffers_.mirror(send.slice);
  buffers_.gather(send.slice, gathered);
  return gathered;
}

// Returns memory of the transport for the payload of the step's messages, if all of them have the
// same payload.
void* ScheduleRun::stage(MessageLink* link, const Step& step) const {
  std::vector<int> peers;
  for (const Transfer& send : step.sends) {
    if (!(send.slice == step.sends[0].slice)) return nullptr;
    peers.push_back(messages_->rank_of(send.peer));
  }
  return peers.empty() ? nullptr : link->stage(buffers_.bytes_of(step.sends[0].slice), peers);
}

void ScheduleRun::run_locals(MessageLink* link, const Step& step, const Step* next,
                             LaneState* lane) {
  const auto readable = [&](const Slice& source, int64_t begin) -> Buffers::Run {
    for (const PayloadView& view : lane->views) {
      if (view.buffer != source.buffer || view.offset != source.offset) continue;
      auto* data = static_cast<char*>(const_cast<void*>(view.data));
      return {data + begin * static_cast<int64_t>(buffers_.element_of(source.buffer)),
              source.count - begin};
    }
    return buffers_.run_at(source, begin);
  };
  const bool no_output = request_->output == nullptr && request_->pieces.empty();
  std::vector<Term> terms;
  for (const Local& local : step.locals) {
    const Slice& dst = local.dst;
    if (dst.count == 0 || (dst.buffer == Buffer::kOutput && no_output)) continue;
    const auto is_wide = [](const Slice& slice) { return slice.buffer == Buffer::kWide; };
    const bool copies = local.sources.size() == 1 && is_wide(local.sources[0]) == is_wide(dst);
    // What is sent next is copied to the transport's memory while it is in the first-level cache.
    const bool leaves =
        !copies && next != nullptr && !next->sends.empty() && next->sends[0].slice == dst;
    auto* staged = static_cast<char*>(leaves ? stage(link, *next) : nullptr);
    if (staged != nullptr) lane->staged = staged;
    for (int64_t begin = 0; begin < dst.count;) {
      const Buffers::Run to = buffers_.run_at(dst, begin);
      int64_t n = staged != nullptr ? std::min(kPieceElements, to.count) : to.count;
      terms.clear();
      for (const Slice& source : local.sources) {
        const Buffers::Run from = readable(source, begin);
        n = std::min(n, from.count);
        terms.push_back({from.data, is_wide(source)});
      }
      const size_t bytes = static_cast<size_t>(n) * buffers_.element_of(dst.buffer);
      if (!copies) {
        reduce(request_->dtype, request_->reduction, to.data, is_wide(dst), terms,
               static_cast<size_t>(n));
      } else if (terms[0].data != to.data) {
        std::memmove(to.data, terms[0].data, bytes);
      }
      if (staged != nullptr) {
        std::memcpy(staged, to.data, bytes);
        staged += bytes;
      }
      begin += n;
    }
  }
  for (const PayloadView& view : lane->views) link->discard(view.arrival);
  lane->views.clear();
}

void ScheduleRun::receive(MessageLink* link, const ExpectedMessage& expected,
                          const Arrival& arrival) {
  void* dst = nullptr;
  if (request_->place) {
    const Status placed =
        request_->place(parse_note(arrival.note).dims, arrival.header.bytes, &dst);
    if (!placed.ok()) return messages_->fail(placed);
    problem_.counts = {static_cast<int64_t>(arrival.header.bytes / request_->element_bytes)};
  } else {
    const uint64_t bytes = buffers_.bytes_of(expected.slice);
    if (arrival.header.bytes != bytes) {
      messages_->fail(Status::Error(
          Code::kInvalidArgument,
          title_of(*request_) + ": rank " + std::to_string(arrival.source) + " sends " +
              std::to_string(arrival.header.bytes) + " bytes, rank " +
              std::to_string(messages_->rank()) + " expects " + std::to_string(bytes) + " bytes (" +
              messages_->descriptor() + "); give both ranks the same sizes"));
      return;
    }
    dst = buffers_.address(expected.slice);
  }
  messages_->note_first();
  LaneState& lane = lanes_[expected.lane];
  const bool apart =
      dst == nullptr && arrival.header.bytes > 0;  // the elements belong to several places
  if (arrival.inlined) {
    if (apart) {
      buffers_.scatter(arrival.payload.data(), expected.slice);
    } else if (arrival.header.bytes > 0) {
      std::memcpy(dst, arrival.payload.data(), arrival.payload.size());
    }
    --lane.pending;
    return;
  }
  const bool scratch =
      expected.slice.buffer == Buffer::kScratch || expected.slice.buffer == Buffer::kWide;
  const void* data = scratch || apart ? link->view(arrival) : nullptr;
  if (data != nullptr) {
    if (scratch) {
      lane.views.push_back({expected.slice.buffer, expected.slice.offset, data, arrival});
    } else {
      buffers_.scatter(data, expected.slice);
      link->discard(arrival);
    }
    --lane.pending;
    return;
  }
  if (apart) {
    dst = buffers_.mirror(expected.slice);
    lane.landed.push_back(expected.slice);
  }
  messages_->receive(link, expected.lane, arrival, dst);
}

void ScheduleRun::arrived(MessageLink* link, const ExpectedMessage& expected,
                          const Arrival& arrival) {
  {
    const Messages::Busy busy(messages_);
    receive(link, expected, arrival);
  }
  resume(link, expected.lane);
}

void ScheduleRun::transferred(MessageLink* link, int lane) {
  --lanes_[lane].pending;
  resume(link, lane);
}

void ScheduleRun::resume(MessageLink* link, int lane) {
  if (messages_->ok() && !messages_->busy() && lanes_[lane].pending == 0) run_lane(link, lane);
}

std::vector<Arrival> ScheduleRun::take_viewed() {
  std::vector<Arrival> arrivals;
  for (LaneState& lane : lanes_) {
    for (PayloadView& view : lane.views) arrivals.push_back(std::move(view.arrival));
    lane.views.clear();
  }
  return arrivals;
}

}  // namespace whale
