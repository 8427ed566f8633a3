// All-reduces of tensors that all ranks have mapped (arena.h): every rank tells where its own lie,
// adds up its share of them where they lie, writes the sums to all ranks' outputs, and says when it
// is through. Nothing is copied on the way.
#include <algorithm>
#include <cstring>

#include "whale_ops/core/collective/reduce.h"
#include "whale_ops/core/operation/operation.h"
#include "whale_ops/core/transport/arena.h"

namespace whale {
namespace {

// What is smaller lies in no arena (tf_kernels/memory/arena_allocator.cc).
constexpr int64_t kLargeBytes = 256 << 10;
constexpr size_t kMaxPlaces = 200;  // that travel with a message's head
// Of one rank's sums, then other operations have their turn: half a millisecond.
constexpr int64_t kTurnBytes = 4 << 20;
// Shares are multiples of it, so that no two ranks write one line of the cache.
constexpr int64_t kShareElements = 64;
constexpr char kSharedName[] = "shared";

}  // namespace

// What all ranks answer alike, before they have spoken.
bool Operation::lends() {
  if (!request.tensors_shared || problem_.algorithm != Algorithm::kAuto || problem_.size < 2)
    return false;
  whole_ = request.pieces.empty();
  if (whole_) request.pieces.push_back({request.input, request.output, request.counts[0]});
  int64_t large = 0;
  for (size_t i = 0; i < request.pieces.size() && lent_.size() < kMaxPlaces; ++i) {
    const int64_t count = request.pieces[i].count;
    if (count * problem_.element_bytes < kLargeBytes) continue;
    lent_.push_back(i);
    large += count;
  }
  // Small tensors take their own way afterwards, which is one more wait.
  if (2 * large < request.counts[0]) lent_.clear();
  if (lent_.empty() && whole_) request.pieces.clear();
  return !lent_.empty();
}

void Operation::lend(MessageLink* link) {
  const Arena* arena = Arena::instance();
  for (const size_t index : lent_) {
    const Piece& piece = request.pieces[index];
    Place place;
    if (request.lends && arena->holds(piece.input) && arena->holds(piece.output)) {
      place = {arena->offset_of(piece.input), arena->offset_of(piece.output)};
    }
    places_.push_back(place);
  }
  MessageHeader header;
  header.tag = tag_;
  header.descriptor = descriptor_hash_;
  header.bytes = places_.size() * sizeof(Place);
  header.id = kLendId;
  header.kind = MessageKind::kLend;
  borrowed_.resize(static_cast<size_t>(problem_.size));
  away_ = missing_ = problem_.size - 1;
  ++busy_;
  for (int index = 0; index < problem_.size && failure_.ok(); ++index) {
    if (index == problem_.rank) continue;
    const int peer = to_rank(index);
    const auto it = std::find_if(early_.begin(), early_.end(), [&](const Arrival& arrival) {
      return arrival.source == peer && arrival.header.id == kLendId;
    });
    if (it != early_.end()) {
      const Arrival arrival = std::move(*it);
      early_.erase(it);
      borrow(link, arrival);
    } else if (link->has_left(peer)) {
      failure_ = Status::Error(Code::kUnavailable, left_message(peer));
      break;
    } else {
      expected_.push_back({kLendLane, peer, kLendId, {}});
    }
    greeted_[peer] = true;
    link->post_send(this, kLendLane, peer, header, note_, places_.data());
  }
  --busy_;
}

void Operation::borrow(MessageLink* link, const Arrival& arrival) {
  if (first_ns_ == 0) first_ns_ = now_ns();
  int source = 0;
  while (to_rank(source) != arrival.source) ++source;
  borrowed_[source] = arrival;
  if (--missing_ > 0) return;
  through_.assign(request.pieces.size(), false);
  for (size_t i = 0; i < lent_.size(); ++i) {
    const Piece& mine = request.pieces[lent_[i]];
    const auto bytes = static_cast<uint64_t>(mine.count * problem_.element_bytes);
    Shared piece;
    piece.count = mine.count;
    for (int rank = 0; rank < problem_.size; ++rank) {
      Place place = places_[i];
      const bool own = rank == problem_.rank;
      if (!own)
        std::memcpy(&place, borrowed_[rank].payload.data() + i * sizeof(Place), sizeof(Place));
      if (place.input == Place::kNowhere) break;
      piece.inputs.push_back(own ? static_cast<const char*>(mine.input)
                                 : link->at(to_rank(rank), place.input, bytes));
      piece.outputs.push_back(own ? static_cast<char*>(mine.output)
                                  : link->at(to_rank(rank), place.output, bytes));
      if (piece.inputs.back() == nullptr || piece.outputs.back() == nullptr) {
        failure_ = Status::Error(Code::kInternal,
                                 title() + ": rank " + std::to_string(to_rank(rank)) +
                                     " tells of memory outside what it shares; report this");
        return;
      }
    }
    if (piece.inputs.size() < static_cast<size_t>(problem_.size)) continue;
    through_[lent_[i]] = true;
    shared_.push_back(std::move(piece));
  }
  shares_ = !shared_.empty();
  link->work_on(this);
}

// One turn of this rank's sums.
void Operation::work(MessageLink* link) {
  const int64_t bytes = problem_.element_bytes;
  std::vector<Term> terms;
  for (int64_t left = kTurnBytes / bytes; left > 0 && !shared_.empty();) {
    Shared& piece = shared_.back();
    const int64_t share = piece.count / problem_.size / kShareElements * kShareElements;
    const int64_t begin = share * problem_.rank,
                  end = problem_.rank + 1 == problem_.size ? piece.count : begin + share;
    for (int64_t i = begin + piece.done; i < end && left > 0; i = begin + piece.done) {
      const int64_t n = std::min(kPieceElements, end - i);
      terms.clear();
      for (const char* input : piece.inputs) terms.push_back({input + i * bytes, false});
      char* sum = piece.outputs[problem_.rank] + i * bytes;
      reduce(request.dtype, request.reduction, sum, false, terms, static_cast<size_t>(n));
      for (int rank = 0; rank < problem_.size; ++rank) {
        if (rank != problem_.rank)
          std::memcpy(piece.outputs[rank] + i * bytes, sum, static_cast<size_t>(n * bytes));
      }
      piece.done += n;
      left -= n;
      wire_bytes_ += 2 * (problem_.size - 1) * n * bytes;
    }
    if (piece.done >= end - begin) shared_.pop_back();
  }
  if (!shared_.empty()) return link->work_on(this);
  ++busy_;
  for (int rank = 0; rank < problem_.size; ++rank) {
    if (rank != problem_.rank) link->give_back(borrowed_[rank]);
  }
  borrowed_.clear();
  run_rest(link);
  worked_ = true;
  if (away_ == 0) --open_lanes_;
  --busy_;
}

// Small tensors, and those that lie in no arena on some rank.
void Operation::run_rest(MessageLink* link) {
  std::vector<Piece> rest;
  problem_.counts = {0};
  for (size_t i = 0; i < request.pieces.size(); ++i) {
    if (through_[i]) continue;
    rest.push_back(request.pieces[i]);
    problem_.counts[0] += rest.back().count;
  }
  if (rest.empty()) {
    schedule_.algorithm = kSharedName;
    return;
  }
  request.pieces = std::move(rest);
  if (whole_) request.pieces.clear();  // it lies at request.input
  prepare();
  if (shares_) schedule_.algorithm = kSharedName;
  start_lanes(link);
}

}  // namespace whale
