#include "operation.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "note.h"
#include "reduce.h"

namespace whale {
namespace {

constexpr size_t kRetainedScratchBytes = 64 << 20;
constexpr int64_t kPieceElements = 2048;

bool is_point_to_point(OpKind kind) { return kind == OpKind::kSend || kind == OpKind::kRecv; }


}  // namespace

std::string counter_name(const Request& request) {
  switch (request.kind) {
    case OpKind::kSend: return "send " + std::to_string(request.root) + " " + request.key;
    case OpKind::kRecv: return "recv " + std::to_string(request.root) + " " + request.key;
    default: return "group " + request.key;
  }
}

uint64_t operation_tag(const Request& request, int rank, uint64_t call) {
  const bool p2p = is_point_to_point(request.kind);
  const int64_t source = !p2p ? -1 : request.kind == OpKind::kSend ? rank : request.root;
  const int64_t target = !p2p ? -1 : request.kind == OpKind::kSend ? request.root : rank;
  const int64_t parts[3] = {static_cast<int64_t>(call), source, target};
  return hash64(parts, sizeof(parts), hash64(request.key));
}

ScratchPool::Block ScratchPool::take(size_t bytes) {
  size_t best = free_.size();
  for (size_t i = 0; i < free_.size(); ++i) {
    if (free_[i].bytes >= bytes && (best == free_.size() || free_[i].bytes < free_[best].bytes)) best = i;
  }
  if (best == free_.size()) return {std::unique_ptr<char[]>(new char[bytes]), bytes};
  Block block = std::move(free_[best]);
  free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(best));
  retained_bytes_ -= block.bytes;
  return block;
}

void ScratchPool::give(Block block) {
  if (block.bytes == 0 || retained_bytes_ + block.bytes > kRetainedScratchBytes) return;
  retained_bytes_ += block.bytes;
  free_.push_back(std::move(block));
}

Operation::Operation(uint64_t op_id, Request asked, int rank, int size, uint64_t call, ScratchPool* pool)
    : id(op_id), request(std::move(asked)), rank_(rank), call_(call), pool_(pool) {
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
    problem_.rank =
        static_cast<int>(std::find(request.group.begin(), request.group.end(), rank) - request.group.begin());
  }
  if (is_point_to_point(request.kind)) request.group.clear();
  logical_bytes_ = logical_bytes(problem_);
  if (!lends()) prepare();
}

void Operation::prepare() {
  piece_begins_.clear();
  int64_t begin = 0;
  for (const Piece& piece : request.pieces) {
    piece_begins_.push_back(begin);
    begin += piece.count;
  }
  schedule_ = make_schedule(problem_);
  wide_offset_ = static_cast<size_t>(schedule_.scratch_count) * request.element_bytes;
  wide_offset_ += (alignof(std::max_align_t) - wide_offset_ % alignof(std::max_align_t)) % alignof(std::max_align_t);
  const size_t scratch_bytes = wide_offset_ + static_cast<size_t>(schedule_.wide_count) * sizeof(float);
  if (scratch_bytes > 0) scratch_ = pool_->take(scratch_bytes);
}

std::string Operation::title() const { return std::string(name_of(request.kind)) + " '" + request.key + "'"; }

size_t Operation::element_of(Buffer buffer) const {
  return buffer == Buffer::kWide ? sizeof(float) : request.element_bytes;
}

Operation::Run Operation::run_at(const Slice& slice, int64_t begin) const {
  const int64_t offset = slice.offset + begin, left = slice.count - begin;
  const auto in = [&](const void* base) { return static_cast<char*>(const_cast<void*>(base)) + offset * problem_.element_bytes; };
  switch (slice.buffer) {
    case Buffer::kScratch: return {in(scratch_.data.get()), left};
    case Buffer::kWide: return {scratch_.data.get() + wide_offset_ + static_cast<size_t>(offset) * sizeof(float), left};
    case Buffer::kInput:
    case Buffer::kOutput: break;
  }
  const bool input = slice.buffer == Buffer::kInput;
  if (request.pieces.empty()) return {in(input ? request.input : request.output), left};
  const auto after = std::upper_bound(piece_begins_.begin(), piece_begins_.end(), offset);
  const auto index = static_cast<size_t>(after - piece_begins_.begin()) - 1;
  const Piece& piece = request.pieces[index];
  const int64_t within = offset - piece_begins_[index];
  const void* base = input ? piece.input : piece.output;
  return {static_cast<char*>(const_cast<void*>(base)) + within * problem_.element_bytes, std::min(left, piece.count - within)};
}

char* Operation::address(const Slice& slice) const {
  const Run run = run_at(slice, 0);
  return run.count == slice.count ? run.data : nullptr;
}

void Operation::gather(const Slice& slice, void* to) const {
  auto* position = static_cast<char*>(to);
  for (int64_t begin = 0; begin < slice.count;) {
    const Run run = run_at(slice, begin);
    const size_t bytes = static_cast<size_t>(run.count) * element_of(slice.buffer);
    std::memcpy(position, run.data, bytes);
    position += bytes;
    begin += run.count;
  }
}

void Operation::scatter(const void* from, const Slice& slice) const {
  const auto* position = static_cast<const char*>(from);
  for (int64_t begin = 0; begin < slice.count;) {
    const Run run = run_at(slice, begin);
    const size_t bytes = static_cast<size_t>(run.count) * element_of(slice.buffer);
    std::memcpy(run.data, position, bytes);
    position += bytes;
    begin += run.count;
  }
}

// Input and output share it, as they may share their own memory.
char* Operation::mirror(const Slice& slice) {
  if (mirror_.bytes == 0) mirror_ = pool_->take(static_cast<size_t>(problem_.counts[0] * problem_.element_bytes));
  return mirror_.data.get() + slice.offset * problem_.element_bytes;
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

// Posts the messages of the lane's current step. The extra `pending` keeps completions that are reported from within
// from finishing the step before all its messages are posted.
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
    if (staged != nullptr) gather(step.sends[0].slice, staged);
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
    header.bytes = bytes_of(send.slice);
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
    for (const Slice& slice : state.landed) scatter(mirror(slice), slice);
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

// What is sent as one message lies in one place: where it is, or in memory of the transport, or else in the mirror.
const void* Operation::payload_of(MessageLink* link, const Transfer& send) {
  if (const char* there = address(send.slice); there != nullptr || send.slice.count == 0) return there;
  void* gathered = link->stage(bytes_of(send.slice), {to_rank(send.peer)});
  if (gathered == nullptr) gathered = mirror(send.slice);
  gather(send.slice, gathered);
  return gathered;
}

// Memory of the transport for what the step sends, if that is one thing.
void* Operation::stage(MessageLink* link, const Step& step) const {
  std::vector<int> peers;
  for (const Transfer& send : step.sends) {
    if (!(send.slice == step.sends[0].slice)) return nullptr;
    peers.push_back(to_rank(send.peer));
  }
  return peers.empty() ? nullptr : link->stage(bytes_of(step.sends[0].slice), peers);
}

void Operation::run_locals(MessageLink* link, const Step& step, const Step* next, LaneState* lane) {
  const auto readable = [&](const Slice& source, int64_t begin) -> Run {
    for (const Seen& seen : lane->seen) {
      if (seen.buffer != source.buffer || seen.offset != source.offset) continue;
      auto* data = static_cast<char*>(const_cast<void*>(seen.data));
      return {data + begin * static_cast<int64_t>(element_of(source.buffer)), source.count - begin};
    }
    return run_at(source, begin);
  };
  const bool no_output = request.output == nullptr && request.pieces.empty();
  std::vector<Term> terms;
  for (const Local& local : step.locals) {
    const Slice& dst = local.dst;
    if (dst.count == 0 || (dst.buffer == Buffer::kOutput && no_output)) continue;
    const auto is_wide = [](const Slice& slice) { return slice.buffer == Buffer::kWide; };
    const bool copies = local.sources.size() == 1 && is_wide(local.sources[0]) == is_wide(dst);
    // What goes out next is copied to where it is sent from while it is in the first-level cache.
    const bool leaves = !copies && next != nullptr && !next->sends.empty() && next->sends[0].slice == dst;
    auto* staged = static_cast<char*>(leaves ? stage(link, *next) : nullptr);
    if (staged != nullptr) lane->staged = staged;
    for (int64_t begin = 0; begin < dst.count;) {
      const Run to = run_at(dst, begin);
      int64_t n = staged != nullptr ? std::min(kPieceElements, to.count) : to.count;
      terms.clear();
      for (const Slice& source : local.sources) {
        const Run from = readable(source, begin);
        n = std::min(n, from.count);
        terms.push_back({from.data, is_wide(source)});
      }
      const size_t bytes = static_cast<size_t>(n) * element_of(dst.buffer);
      if (!copies) {
        reduce(request.dtype, request.reduction, to.data, is_wide(dst), terms, static_cast<size_t>(n));
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
    const uint64_t bytes = bytes_of(expected.slice);
    if (arrival.header.bytes != bytes) {
      failure_ = Status::Error(Code::kInvalidArgument,
                               title() + ": rank " + std::to_string(arrival.source) + " sends " +
                                   std::to_string(arrival.header.bytes) + " bytes, rank " + std::to_string(rank_) + " expects " +
                                   std::to_string(bytes) + " bytes (" + descriptor_ +
                                   "); give both ranks the same sizes");
      return;
    }
    dst = address(expected.slice);
  }
  if (first_ns_ == 0) first_ns_ = now_ns();
  LaneState& lane = lanes_[expected.lane];
  const bool apart = dst == nullptr && arrival.header.bytes > 0;  // the elements belong in several places
  if (arrival.inlined) {
    if (apart) {
      scatter(arrival.payload.data(), expected.slice);
    } else if (arrival.header.bytes > 0) {
      std::memcpy(dst, arrival.payload.data(), arrival.payload.size());
    }
    --lane.pending;
    return;
  }
  const bool scratch = expected.slice.buffer == Buffer::kScratch || expected.slice.buffer == Buffer::kWide;
  const void* data = scratch || apart ? link->view(arrival) : nullptr;
  if (data != nullptr) {
    if (scratch) {
      lane.seen.push_back({expected.slice.buffer, expected.slice.offset, data, arrival});
    } else {
      scatter(data, expected.slice);
      link->discard(arrival);
    }
    --lane.pending;
    return;
  }
  if (apart) {
    dst = mirror(expected.slice);
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
  if (failure_.ok() && busy_ == 0 && lanes_[expected.lane].pending == 0) run_lane(link, expected.lane);
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
  return std::any_of(expected_.begin(), expected_.end(), [&](const Expected& e) { return e.peer == peer; });
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
  return "rank " + std::to_string(peer) + " has left the run (its script ended) while rank " + std::to_string(rank_) +
         " waits for it in " + title() + "; every rank must run the same steps";
}

bool Operation::crosses(const Arrival& first, std::string* other, bool* tensor) const {
  const Note note = parse_note(first.note);
  if (note.alone.empty() && request.alone.empty()) return false;
  *other = note.alone.empty() ? note.descriptor + " '" + note.key + "'" : note.alone;
  *tensor = moves_tensor() || note.descriptor.find(std::string(" of ") + kBytes) == std::string::npos;
  return true;
}

Status Operation::mismatch(const Arrival& arrival) const {
  const Note note = parse_note(arrival.note);
  return Status::Error(Code::kInvalidArgument,
                       "ranks disagree about operation '" + request.key + "' (call " + std::to_string(call_ + 1) + "): rank " +
                           std::to_string(rank_) + " runs " + descriptor_ + ", rank " + std::to_string(arrival.source) + " runs " +
                           note.descriptor + (note.key == request.key ? "" : " under key '" + note.key + "'") +
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
  if (first_ns_ == 0) record.first_ns = expected_.empty() && transferred_ns_ != 0 ? transferred_ns_ : end_ns;
  record.end_ns = end_ns;
  return record;
}

}  // namespace whale
