#include "whale_ops/core/operation/messages.h"

#include <algorithm>
#include <utility>

#include "whale_ops/core/operation/note.h"

namespace whale {

Messages::Messages(Operation* operation, const Request* request, int rank, int size, uint64_t call)
    : operation_(operation),
      request_(request),
      rank_(rank),
      tag_(operation_tag(*request, rank, call)),
      descriptor_(describe(*request)),
      descriptor_hash_(hash64(descriptor_, hash64(request->key))),
      note_(make_note(*request, descriptor_)),
      greeted_(size, false) {}

std::optional<Arrival> Messages::await(MessageLink* link, const ExpectedMessage& expected) {
  const auto it = std::find_if(early_.begin(), early_.end(), [&](const Arrival& arrival) {
    return arrival.source == expected.peer && arrival.header.id == expected.id;
  });
  if (it != early_.end()) {
    std::optional<Arrival> arrival = std::move(*it);
    early_.erase(it);
    return arrival;
  }
  if (link->has_left(expected.peer)) {
    fail(Status::Error(Code::kUnavailable, left_message(expected.peer)));
  } else {
    expected_.push_back(expected);
  }
  return std::nullopt;
}

std::optional<ExpectedMessage> Messages::match(Arrival* arrival) {
  const auto it =
      std::find_if(expected_.begin(), expected_.end(), [&](const ExpectedMessage& expected) {
        return arrival->source == expected.peer && arrival->header.id == expected.id;
      });
  if (it == expected_.end()) {
    early_.push_back(std::move(*arrival));
    return std::nullopt;
  }
  const ExpectedMessage expected = *it;
  expected_.erase(it);
  return expected;
}

bool Messages::can_send(const MessageLink& link, int peer) {
  if (!link.has_left(peer)) return true;
  fail(Status::Error(Code::kUnavailable, left_message(peer)));
  return false;
}

void Messages::send(MessageLink* link, int lane, int peer, MessageKind kind, uint32_t id,
                    uint64_t bytes, const void* payload) {
  MessageHeader header;
  header.tag = tag_;
  header.descriptor = descriptor_hash_;
  header.bytes = bytes;
  header.id = id;
  header.kind = kind;
  const bool first = !greeted_[peer];
  greeted_[peer] = true;
  link->post_send(operation_, lane, peer, header, first ? note_ : std::string(), payload);
}

bool Messages::waits_for(int peer) const {
  return std::any_of(expected_.begin(), expected_.end(),
                     [&](const ExpectedMessage& e) { return e.peer == peer; });
}

std::vector<int> Messages::awaited_peers() const {
  std::vector<int> peers;
  for (const ExpectedMessage& expected : expected_) peers.push_back(expected.peer);
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return peers;
}

std::string Messages::left_message(int peer) const {
  return "rank " + std::to_string(peer) + " has left the run (its script ended) while rank " +
         std::to_string(rank_) + " waits for it in " + purpose_of(*request_) +
         "; every rank must run the same steps";
}

void Messages::note_first() {
  if (first_ns_ == 0) first_ns_ = now_ns();
}

void Messages::note_transfer() {
  if (transferred_ns_ == 0) transferred_ns_ = now_ns();
}

}  // namespace whale
