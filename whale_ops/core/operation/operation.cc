#include "whale_ops/core/operation/operation.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "whale_ops/core/collective/reduce.h"
#include "whale_ops/core/operation/note.h"

namespace whale {
Operation::Operation(uint64_t op_id, Request asked, int rank, int size, uint64_t call,
                     ScratchPool* pool)
    : id(op_id),
      request(std::move(asked)),
      rank_(rank),
      call_(call),
      buffers_(&request, &problem_, pool) {
  tag_ = operation_tag(request, rank, call);
  descriptor_ = describe(request);
  descriptor_hash_ = hash64(descriptor_, hash64(request.key));
  note_ = make_note(request, descriptor_);
  greeted_.assign(size, false);

  problem_.kind = request.kind;
  problem_.element_bytes = static_cast<int64_t>(request.element_bytes);
  problem_.narrow_float = request.dtype == DType::kFloat16 || request.dtype == DType::kBFloat16;
  problem_.algorithm = request.algorithm;
  problem_.hosts = request.hosts;
  problem_.counts = request.counts;
  problem_.recv_counts = request.recv_counts;
  problem_.root = request.root;
  problem_.rank = rank;
  problem_.size = size;
  if (!request.group.empty() && !is_point_to_point(request.kind)) {
    problem_.size = static_cast<int>(request.group.size());
    problem_.rank = static_cast<int>(std::find(request.group.begin(), request.group.end(), rank) -
                                     request.group.begin());
  }
  if (is_point_to_point(request.kind)) request.group.clear();
  logical_bytes_ = logical_bytes(problem_);
  if (!lends()) prepare();
}

void Operation::prepare() {
  schedule_ = make_schedule(problem_);
  buffers_.prepare(schedule_);
}

std::string Operation::title() const {
  return std::string(name_of(request.kind)) + " '" + request.key + "'";
}

void Operation::start(MessageLink* link, std::vector<Arrival> early) {
  early_ = std::move(early);
  for (const Arrival& arrival : early_) {
    if (!agrees(arrival)) {
      failure_ = mismatch(arrival);
      return;
    }
  }
  if (!lent_.empty()) return lend(link);
  open_lanes_ = 0;
  start_lanes(link);
}

void Operation::start_lanes(MessageLink* link) {
  lanes_.resize(schedule_.lanes.size());
  open_lanes_ += lanes_.size();
  ++busy_;
  for (size_t lane = 0; lane < lanes_.size() && failure_.ok(); ++lane) {
    if (schedule_.lanes[lane].empty()) {
      --open_lanes_;
      continue;
    }
    post(link, static_cast<int>(lane));
    if (lanes_[lane].pending == 0) run_lane(link, static_cast<int>(lane));
  }
  --busy_;
}

// Posts the messages of the lane's current step. The extra `pending` keeps completions that are
// reported from within from finishing the step before all its messages are posted.
void Operation::post(MessageLink* link, int lane) {
  const Step& step = schedule_.lanes[lane][lanes_[lane].step];
  lanes_[lane].pending = 1 + static_cast<int>(step.sends.size() + step.recvs.size());
  ++busy_;
  for (const Transfer& recv : step.recvs) {
    if (!failure_.ok()) break;
    const Expected expected{lane, to_rank(recv.peer), recv.id, recv.slice};
    const auto it = std::find_if(early_.begin(), early_.end(), [&](const Arrival& arrival) {
      return arrival.source == expected.peer && arrival.header.id == expected.id;
    });
    if (it != early_.end()) {
      const Arrival arrival = std::move(*it);
      early_.erase(it);
      match(link, expected, arrival);
    } else if (link->has_left(expected.peer)) {
      failure_ = Status::Error(Code::kUnavailable, left_message(expected.peer));
    } else {
      expected_.push_back(expected);
    }
  }
  // What several peers get is copied once.
  void* staged = std::exchange(lanes_[lane].staged, nullptr);
  if (staged == nullptr && step.sends.size() > 1 && failure_.ok()) {
    staged = stage(link, step);
    if (staged != nullptr) buffers_.gather(step.sends[0].slice, staged);
  }
  for (const Transfer& send : step.sends) {
    if (!failure_.ok()) break;
    const int peer = to_rank(send.peer);
    if (link->has_left(peer)) {
      failure_ = Status::Error(Code::kUnavailable, left_message(peer));
      break;
    }
    MessageHeader header;
    header.tag = tag_;
    header.descriptor = descriptor_hash_;
    header.bytes = buffers_.bytes_of(send.slice);
    header.id = send.id;
    const bool first = !greeted_[peer];
    greeted_[peer] = true;
    wire_bytes_ += static_cast<int64_t>(header.bytes);
    link->post_send(this, lane, peer, header, first ? note_ : std::string(),
                    staged != nullptr ? staged : payload_of(link, send));
  }
  --busy_;
  --lanes_[lane].pending;
}

void Operation::run_lane(MessageLink* link, int lane) {
  LaneState& state = lanes_[lane];
  const Lane& steps = schedule_.lanes[lane];
  ++busy_;
  while (failure_.ok() && state.pending == 0) {
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
  --busy_;
}

// What is sent as one message lies in one place: where it is, or in memory of the transport, or
// else in the mirror.
const void* Operation::payload_of(MessageLink* link, const Transfer& send) {
  if (const char* there = buffers_.address(send.slice); there != nullptr || send.slice.count == 0)
    return there;
  void* gathered = link->stage(buffers_.bytes_of(send.slice), {to_rank(send.peer)});
  if (gathered == nullptr) gathered = buffers_.mirror(send.slice);
  buffers_.gather(send.slice, gathered);
  return gathered;
}

// Memory of the transport for what the step sends, if that is one thing.
void* Operation::stage(MessageLink* link, const Step& step) const {
  std::vector<int> peers;
  for (const Transfer& send : step.sends) {
    if (!(send.slice == step.sends[0].slice)) return nullptr;
    peers.push_back(to_rank(send.peer));
  }
  return peers.empty() ? nullptr : link->stage(buffers_.bytes_of(step.sends[0].slice), peers);
}

void Operation::run_locals(MessageLink* link, const Step& step, const Step* next, LaneState* lane) {
  const auto readable = [&](const Slice& source, int64_t begin) -> Buffers::Run {
    for (const Seen& seen : lane->seen) {
      if (seen.buffer != source.buffer || seen.offset != source.offset) continue;
      auto* data = static_cast<char*>(const_cast<void*>(seen.data));
      return {data + begin * static_cast<int64_t>(buffers_.element_of(source.buffer)),
              source.count - begin};
    }
    return buffers_.run_at(source, begin);
  };
  const bool no_output = request.output == nullptr && request.pieces.empty();
  std::vector<Term> terms;
  for (const Local& local : step.locals) {
    const Slice& dst = local.dst;
    if (dst.count == 0 || (dst.buffer == Buffer::kOutput && no_output)) continue;
    const auto is_wide = [](const Slice& slice) { return slice.buffer == Buffer::kWide; };
    const bool copies = local.sources.size() == 1 && is_wide(local.sources[0]) == is_wide(dst);
    // What goes out next is copied to where it is sent from while it is in the first-level cache.
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
        reduce(request.dtype, request.reduction, to.data, is_wide(dst), terms,
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
  for (const Seen& seen : lane->seen) link->discard(seen.arrival);
  lane->seen.clear();
}

void Operation::match(MessageLink* link, const Expected& expected, const Arrival& arrival) {
  if (expected.lane == kLendLane) return borrow(link, arrival);
  void* dst = nullptr;
  if (request.place) {
    failure_ = request.place(parse_note(arrival.note).dims, arrival.header.bytes, &dst);
    if (!failure_.ok()) return;
    problem_.counts = {static_cast<int64_t>(arrival.header.bytes / request.element_bytes)};
  } else {
    const uint64_t bytes = buffers_.bytes_of(expected.slice);
    if (arrival.header.bytes != bytes) {
      failure_ = Status::Error(Code::kInvalidArgument,
                               title() + ": rank " + std::to_string(arrival.source) + " sends " +
                                   std::to_string(arrival.header.bytes) + " bytes, rank " +
                                   std::to_string(rank_) + " expects " + std::to_string(bytes) +
                                   " bytes (" + descriptor_ + "); give both ranks the same sizes");
      return;
    }
    dst = buffers_.address(expected.slice);
  }
  if (first_ns_ == 0) first_ns_ = now_ns();
  LaneState& lane = lanes_[expected.lane];
  // The elements belong in several places.
  const bool apart = dst == nullptr && arrival.header.bytes > 0;
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
      lane.seen.push_back({expected.slice.buffer, expected.slice.offset, data, arrival});
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
  link->post_receive(this, expected.lane, arrival, dst);
}

void Operation::arrived(MessageLink* link, Arrival&& arrival) {
  const auto it = std::find_if(expected_.begin(), expected_.end(), [&](const Expected& expected) {
    return arrival.source == expected.peer && arrival.header.id == expected.id;
  });
  if (it == expected_.end()) {
    early_.push_back(std::move(arrival));
    return;
  }
  const Expected expected = *it;
  expected_.erase(it);
  ++busy_;
  match(link, expected, arrival);
  --busy_;
  if (expected.lane == kLendLane) return;
  if (failure_.ok() && busy_ == 0 && lanes_[expected.lane].pending == 0)
    run_lane(link, expected.lane);
}

void Operation::transferred(MessageLink* link, int lane) {
  if (transferred_ns_ == 0) transferred_ns_ = now_ns();
  if (lane == kLendLane) {
    if (--away_ == 0 && worked_) --open_lanes_;
    return;
  }
  --lanes_[lane].pending;
  if (failure_.ok() && busy_ == 0 && lanes_[lane].pending == 0) run_lane(link, lane);
}

bool Operation::waits_for(int peer) const {
  return std::any_of(expected_.begin(), expected_.end(),
                     [&](const Expected& e) { return e.peer == peer; });
}

std::vector<Arrival> Operation::take_unreceived() {
  std::vector<Arrival> arrivals = std::move(early_);
  for (LaneState& lane : lanes_) {
    for (Seen& seen : lane.seen) arrivals.push_back(std::move(seen.arrival));
    lane.seen.clear();
  }
  for (Arrival& arrival : borrowed_) {
    if (arrival.header.kind == MessageKind::kLend) arrivals.push_back(std::move(arrival));
  }
  borrowed_.clear();
  return arrivals;
}

std::vector<int> Operation::awaited_peers() const {
  std::vector<int> peers;
  for (const Expected& expected : expected_) peers.push_back(expected.peer);
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return peers;
}

std::string Operation::left_message(int peer) const {
  return "rank " + std::to_string(peer) + " has left the run (its script ended) while rank " +
         std::to_string(rank_) + " waits for it in " + purpose() +
         "; every rank must run the same steps";
}

bool Operation::crosses(const Arrival& first, std::string* other, bool* tensor) const {
  const Note note = parse_note(first.note);
  if (note.alone.empty() && request.alone.empty()) return false;
  *other = note.alone.empty() ? note.descriptor + " '" + note.key + "'" : note.alone;
  *tensor =
      moves_tensor() || note.descriptor.find(std::string(" of ") + kBytes) == std::string::npos;
  return true;
}

Status Operation::mismatch(const Arrival& arrival) const {
  const Note note = parse_note(arrival.note);
  return Status::Error(Code::kInvalidArgument,
                       "ranks disagree about operation '" + request.key + "' (call " +
                           std::to_string(call_ + 1) + "): rank " + std::to_string(rank_) +
                           " runs " + descriptor_ + ", rank " + std::to_string(arrival.source) +
                           " runs " + note.descriptor +
                           (note.key == request.key ? "" : " under key '" + note.key + "'") +
                           "; run the same program with the same shapes on every rank");
}

Record Operation::record(int64_t end_ns) const {
  Record record;
  record.key = request.key;
  record.kind = request.kind;
  record.algorithm = schedule_.algorithm;
  record.call = call_;
  record.logical_bytes = logical_bytes_;
  record.wire_bytes = wire_bytes_;
  record.ready_ns = ready_ns;
  record.first_ns = first_ns_;
  if (first_ns_ == 0)
    record.first_ns = expected_.empty() && transferred_ns_ != 0 ? transferred_ns_ : end_ns;
  record.end_ns = end_ns;
  return record;
}

}  // namespace whale
