#include "whale_ops/core/operation/zero_copy_reduce.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "whale_ops/core/collective/reduce.h"
#include "whale_ops/core/operation/buffers.h"
#include "whale_ops/core/transport/arena.h"

namespace whale {
namespace {

constexpr int64_t kLargeBytes =
    256 << 10;  // smaller tensors are in no arena (tf_kernels/memory/arena_allocator.cc)
constexpr size_t kMaxPlaces = 200;  // places that fit into a message's head
constexpr int64_t kTurnBytes =
    4 << 20;  // bytes of sums per turn, half a millisecond; then others have their turn
constexpr int64_t kShareElements =
    64;  // shares are multiples of it, so that no two ranks write the same cache line
constexpr uint32_t kMessageId = 0xffffffff;  // used by no message of a schedule

}  // namespace

std::unique_ptr<ZeroCopyReduce> ZeroCopyReduce::create(const Request* request,
                                                       const Problem& problem, Messages* messages) {
  if (!request->tensors_shared || problem.algorithm != Algorithm::kAuto || problem.size < 2)
    return nullptr;
  std::vector<Piece> pieces = request->pieces;
  if (pieces.empty()) pieces.push_back({request->input, request->output, request->counts[0]});
  std::vector<size_t> lent;
  int64_t large = 0;
  for (size_t i = 0; i < pieces.size() && lent.size() < kMaxPlaces; ++i) {
    const int64_t count = pieces[i].count;
    if (count * problem.element_bytes < kLargeBytes) continue;
    lent.push_back(i);
    large += count;
  }
  // Small tensors are reduced by a schedule afterwards, which means one more wait, so large ones
  // have to prevail.
  if (lent.empty() || 2 * large < request->counts[0]) return nullptr;
  return std::unique_ptr<ZeroCopyReduce>(
      new ZeroCopyReduce(request, problem, messages, std::move(pieces), std::move(lent)));
}

ZeroCopyReduce::ZeroCopyReduce(const Request* request, const Problem& problem, Messages* messages,
                               std::vector<Piece> pieces, std::vector<size_t> lent)
    : request_(request),
      messages_(messages),
      rank_(problem.rank),
      size_(problem.size),
      element_bytes_(problem.element_bytes),
      pieces_(std::move(pieces)),
      lent_(std::move(lent)),
      borrowed_(static_cast<size_t>(problem.size)),
      missing_(problem.size - 1),
      away_(problem.size - 1) {}

void ZeroCopyReduce::start(MessageLink* link) {
  const Arena* arena = Arena::instance();
  for (const size_t index : lent_) {
    const Piece& piece = pieces_[index];
    Place place;
    if (request_->lends && arena->holds(piece.input) && arena->holds(piece.output)) {
      place = {arena->offset_of(piece.input), arena->offset_of(piece.output)};
    }
    places_.push_back(place);
  }
  const Messages::Busy busy(messages_);
  for (int index = 0; index < size_ && messages_->ok(); ++index) {
    if (index == rank_) continue;
    const int peer = messages_->rank_of(index);
    const std::optional<Arrival> arrival = messages_->await(link, {kLane, peer, kMessageId, {}});
    if (arrival.has_value()) {
      arrived(link, *arrival);
    } else if (!messages_->ok()) {
      break;
    }
    messages_->send(link, kLane, peer, MessageKind::kLend, kMessageId,
                    places_.size() * sizeof(Place), places_.data());
  }
}

void ZeroCopyReduce::arrived(MessageLink* link, const Arrival& arrival) {
  messages_->note_first();
  int source = 0;
  while (messages_->rank_of(source) != arrival.source) ++source;
  borrowed_[source] = arrival;
  if (--missing_ > 0) return;
  find_shared(link);
  if (messages_->ok()) messages_->request_work(link);
}

void ZeroCopyReduce::find_shared(MessageLink* link) {
  through_.assign(pieces_.size(), false);
  for (size_t i = 0; i < lent_.size(); ++i) {
    const Piece& mine = pieces_[lent_[i]];
    const auto bytes = static_cast<uint64_t>(mine.count * element_bytes_);
    Shared piece;
    piece.count = mine.count;
    for (int index = 0; index < size_; ++index) {
      Place place = places_[i];
      const bool own = index == rank_;
      const int rank = messages_->rank_of(index);
      if (!own)
        std::memcpy(&place, borrowed_[index].payload.data() + i * sizeof(Place), sizeof(Place));
      if (place.input == Place::kNowhere) break;
      piece.inputs.push_back(own ? static_cast<const char*>(mine.input)
                                 : link->at(rank, place.input, bytes));
      piece.outputs.push_back(own ? static_cast<char*>(mine.output)
                                  : link->at(rank, place.output, bytes));
      if (piece.inputs.back() == nullptr || piece.outputs.back() == nullptr) {
        messages_->fail(Status::Error(
            Code::kInternal,
            title_of(*request_) + ": rank " + std::to_string(rank) +
                " names an address outside of the memory that it shares; report this"));
        return;
      }
    }
    if (piece.inputs.size() < static_cast<size_t>(size_)) continue;
    through_[lent_[i]] = true;
    shared_.push_back(std::move(piece));
  }
  shares_ = !shared_.empty();
}

void ZeroCopyReduce::work(MessageLink* link) {
  const int64_t bytes = element_bytes_;
  std::vector<Term> terms;
  for (int64_t left = kTurnBytes / bytes; left > 0 && !shared_.empty();) {
    Shared& piece = shared_.back();
    const int64_t share = piece.count / size_ / kShareElements * kShareElements;
    const int64_t begin = share * rank_, end = rank_ + 1 == size_ ? piece.count : begin + share;
    for (int64_t i = begin + piece.done; i < end && left > 0; i = begin + piece.done) {
      const int64_t n = std::min(kPieceElements, end - i);
      terms.clear();
      for (const char* input : piece.inputs) terms.push_back({input + i * bytes, false});
      char* sum = piece.outputs[rank_] + i * bytes;
      reduce(request_->dtype, request_->reduction, sum, false, terms, static_cast<size_t>(n));
      for (int rank = 0; rank < size_; ++rank) {
        if (rank != rank_)
          std::memcpy(piece.outputs[rank] + i * bytes, sum, static_cast<size_t>(n * bytes));
      }
      piece.done += n;
      left -= n;
      messages_->count_wire_bytes(2 * (size_ - 1) * n * bytes);
    }
    if (piece.done >= end - begin) shared_.pop_back();
  }
  if (!shared_.empty()) messages_->request_work(link);
}

void ZeroCopyReduce::give_back(MessageLink* link) {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_) link->give_back(borrowed_[rank]);
  }
  borrowed_.clear();
  given_back_ = true;
}

std::vector<Piece> ZeroCopyReduce::rest() const {
  std::vector<Piece> rest;
  for (size_t i = 0; i < pieces_.size(); ++i) {
    if (!through_[i]) rest.push_back(pieces_[i]);
  }
  return rest;
}

std::vector<Arrival> ZeroCopyReduce::take_borrowed() {
  std::vector<Arrival> arrivals;
  for (Arrival& arrival : borrowed_) {
    if (arrival.header.kind == MessageKind::kLend) arrivals.push_back(std::move(arrival));
  }
  borrowed_.clear();
  return arrivals;
}

}  // namespace whale
