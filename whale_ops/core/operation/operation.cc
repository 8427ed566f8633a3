#include "whale_ops/core/operation/operation.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "whale_ops/core/operation/note.h"

namespace whale {
namespace {

constexpr char kSharedName[] = "shared";  // name of ZeroCopyReduce as an algorithm

Problem problem_of(const Request& request, int rank, int size) {
  Problem problem;
  problem.kind = request.kind;
  problem.element_bytes = static_cast<int64_t>(request.element_bytes);
  problem.narrow_float = request.dtype == DType::kFloat16 || request.dtype == DType::kBFloat16;
  problem.algorithm = request.algorithm;
  problem.network = request.network;
  problem.hosts = request.hosts;
  problem.counts = request.counts;
  problem.recv_counts = request.recv_counts;
  problem.even = request.even;
  problem.root = request.root;
  problem.rank = rank;
  problem.size = size;
  if (!request.group.empty() && !is_point_to_point(request.kind)) {
    problem.size = static_cast<int>(request.group.size());
    const auto own = std::find(request.group.begin(), request.group.end(), rank);
    problem.rank = static_cast<int>(own - request.group.begin());
  }
  return problem;
}

}  // namespace

Operation::Operation(uint64_t op_id, Request asked, int rank, int size, uint64_t call,
                     ScratchPool* pool)
    : id(op_id),
      request(std::move(asked)),
      call_(call),
      messages_(this, &request, rank, size, call),
      schedule_run_(&request, problem_of(request, rank, size), &messages_, pool),
      zero_copy_(ZeroCopyReduce::create(&request, schedule_run_.problem(), &messages_)),
      logical_bytes_(logical_bytes(schedule_run_.problem())) {
  if (is_point_to_point(request.kind)) request.group.clear();
  if (zero_copy_ != nullptr) return;
  schedule_run_.prepare();
  algorithm_ = schedule_run_.algorithm();
}

void Operation::start(MessageLink* link, std::vector<Arrival> early) {
  messages_.add_early(std::move(early));
  for (const Arrival& arrival : messages_.early()) {
    if (!agrees(arrival)) return messages_.fail(mismatch(arrival));
  }
  zero_copy_ != nullptr ? zero_copy_->start(link) : schedule_run_.start(link);
}

void Operation::arrived(MessageLink* link, Arrival&& arrival) {
  const std::optional<ExpectedMessage> expected = messages_.match(&arrival);
  if (!expected.has_value()) return;
  if (expected->lane != ZeroCopyReduce::kLane)
    return schedule_run_.arrived(link, *expected, arrival);
  const Messages::Busy busy(&messages_);
  zero_copy_->arrived(link, arrival);
}

void Operation::transferred(MessageLink* link, int lane) {
  messages_.note_transfer();
  lane == ZeroCopyReduce::kLane ? zero_copy_->returned() : schedule_run_.transferred(link, lane);
}

void Operation::work(MessageLink* link) {
  zero_copy_->work(link);
  if (!zero_copy_->summed()) return;
  const Messages::Busy busy(&messages_);
  zero_copy_->give_back(link);
  run_rest(link);
}

// Runs a schedule for the pieces that ZeroCopyReduce did not add up.
void Operation::run_rest(MessageLink* link) {
  algorithm_ = kSharedName;
  std::vector<Piece> rest = zero_copy_->rest();
  if (rest.empty()) return;
  int64_t count = 0;
  for (const Piece& piece : rest) count += piece.count;
  if (!request.pieces.empty()) request.pieces = std::move(rest);  // else it is at request.input
  schedule_run_.prepare(count);
  if (!zero_copy_->shares()) algorithm_ = schedule_run_.algorithm();
  schedule_run_.start(link);
}

std::vector<Arrival> Operation::take_unreceived() {
  std::vector<Arrival> arrivals = messages_.take_early();
  const auto add = [&arrivals](std::vector<Arrival> more) {
    std::move(more.begin(), more.end(), std::back_inserter(arrivals));
  };
  add(schedule_run_.take_viewed());
  if (zero_copy_ != nullptr) add(zero_copy_->take_borrowed());
  return arrivals;
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
                           std::to_string(call_ + 1) + "): rank " +
                           std::to_string(messages_.rank()) + " runs " + descriptor() + ", rank " +
                           std::to_string(arrival.source) + " runs " + note.descriptor +
                           (note.key == request.key ? "" : " under key '" + note.key + "'") +
                           "; run the same program with the same shapes on every rank");
}

Record Operation::record(int64_t end_ns) const {
  Record record;
  record.key = request.key;
  record.kind = request.kind;
  record.algorithm = algorithm_;
  record.call = call_;
  record.logical_bytes = logical_bytes_;
  record.wire_bytes = messages_.wire_bytes();
  record.ready_ns = ready_ns;
  record.first_ns = messages_.first_ns();
  if (record.first_ns == 0) {
    const bool only_sent = !messages_.waits() && messages_.transferred_ns() != 0;
    record.first_ns = only_sent ? messages_.transferred_ns() : end_ns;
  }
  record.end_ns = end_ns;
  return record;
}

}  // namespace whale
