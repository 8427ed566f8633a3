// What happens to an endpoint's operations when ranks abort, leave, are lost or run different
// programs; and who waits for whom.
#include <algorithm>

#include "whale_ops/core/progress/endpoint.h"

namespace whale {
namespace {

constexpr int64_t kCheckEveryNs = 100'000'000;  // how often waits are checked
// The last receives of a rank that has left may still be completing.
constexpr int64_t kSendGraceNs = 500'000'000;

}  // namespace

void Endpoint::fail_everything(const Status& status, bool tell_others) {
  if (!aborted_.ok()) return;
  aborted_ = status;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    failure_ = status;
  }
  // Data that waits for the emulated link belongs to operations that fail now, but a good-bye must
  // still be sent.
  delayed_.erase(std::remove_if(delayed_.begin(), delayed_.end(),
                                [](const Delayed& d) {
                                  return d.header.kind == MessageKind::kData ||
                                         d.header.kind == MessageKind::kLend;
                                }),
                 delayed_.end());
  if (tell_others) {
    MessageHeader header;
    header.kind = MessageKind::kAbort;
    header.id = static_cast<uint32_t>(status.code);
    const std::string note = status.message.substr(0, Transport::kMaxNoteBytes);
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_ && !left_[peer]) transport_->send(peer, header, note, nullptr, 0, this);
    }
  }
  std::vector<std::shared_ptr<Operation>> operations;
  for (const auto& [tag, operation] : active_) operations.push_back(operation);
  for (const auto& operation : operations) finish(operation, status);
  discard_unexpected();
}

// Senders of unexpected messages wait until these are received or discarded.
void Endpoint::discard_unexpected() {
  for (const auto& [tag, arrivals] : unexpected_) {
    for (const Arrival& arrival : arrivals) discard(arrival);
  }
  unexpected_.clear();
}

void Endpoint::depart() {
  if (self_left_) return;
  self_left_ = true;
  left_[rank_] = true;
  const Status status = Status::Error(
      Code::kUnavailable, "rank " + std::to_string(rank_) + " has left communicator '" + name_ +
                              "' while this operation was under way");
  std::vector<std::shared_ptr<Operation>> operations;
  for (const auto& [tag, operation] : active_) operations.push_back(operation);
  for (const auto& operation : operations) finish(operation, status);
  discard_unexpected();
  MessageHeader header;
  header.kind = MessageKind::kLeave;
  for (int peer = 0; peer < size_; ++peer) {
    // Also sent to ranks that have left, since these wait for the good-byes of all others.
    if (peer != rank_) emit(peer, header, "", nullptr, 0);
  }
}

void Endpoint::peer_left(int peer) {
  left_[peer] = true;
  send_grace_ns_[peer] = now_ns() + kSendGraceNs;
  if (!aborted_.ok()) return;
  for (const auto& [tag, operation] : active_) {
    if (!operation->waits_for(peer)) continue;
    fail_everything(Status::Error(Code::kUnavailable, operation->left_message(peer)), true);
    return;
  }
}

void Endpoint::peer_lost(int peer, const std::string& what) {
  if (peer < 0 || peer >= size_ || peer == rank_ || left_[peer]) return;
  gone_[peer] = true;
  misses_ = true;
  if (!aborted_.ok()) return;
  lost_ = true;
  const std::string sentence = "rank " + std::to_string(peer) + " " + what;
  std::vector<std::shared_ptr<Operation>> operations;
  for (const auto& [tag, operation] : active_) operations.push_back(operation);
  // TensorFlow reports the first error of a step, so that of a tensor which waits for the peer
  // comes first, if there is one.
  const auto order_of = [&](const auto& operation) {
    return (operation->waits_for(peer) ? 0 : 2) + (operation->moves_tensor() ? 0 : 1);
  };
  std::stable_sort(operations.begin(), operations.end(),
                   [&](const auto& a, const auto& b) { return order_of(a) < order_of(b); });
  for (const auto& operation : operations) {
    const std::string where = operation->waits_for(peer) ? " waited for it in " : " was in ";
    finish(operation,
           Status::Error(Code::kUnavailable, sentence + " while rank " + std::to_string(rank_) +
                                                 where + operation->purpose()));
  }
  // Only this rank's operations fail: whoever reports the lost rank tells the other ranks as well.
  fail_everything(Status::Error(Code::kUnavailable, sentence), false);
}

std::vector<int> Endpoint::pending_send_peers(const Operation* operation) const {
  std::vector<int> peers;
  for (const auto& [cookie, transit] : in_transit_) {
    if (transit.is_send && transit.operation.get() == operation) peers.push_back(transit.peer);
  }
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return peers;
}

void Endpoint::check_waits(int64_t now) {
  next_check_ns_ = now + kCheckEveryNs;
  std::vector<Wait> waits;
  for (const auto& [tag, operation] : active_) {
    if (now - operation->ready_ns < kCheckEveryNs) continue;
    waits.push_back({operation->purpose(), operation->moves_tensor(), operation->ready_ns,
                     missing_peers(*operation)});
  }
  std::sort(waits.begin(), waits.end(), [](const Wait& a, const Wait& b) {
    return a.moves_tensor != b.moves_tensor ? a.moves_tensor : a.ready_ns < b.ready_ns;
  });
  const bool any = !waits.empty();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    waits_ = std::move(waits);
  }
  if (any && aborted_.ok()) {
    const Status status = crossed();
    if (!status.ok()) fail_everything(status, true);
  }
  if (send_grace_ns_.empty() || !aborted_.ok()) return;
  for (const auto& [cookie, transit] : in_transit_) {
    const auto grace = send_grace_ns_.find(transit.peer);
    if (!transit.is_send || transit.operation->settled || grace == send_grace_ns_.end() ||
        now < grace->second)
      continue;
    fail_everything(
        Status::Error(Code::kUnavailable, transit.operation->left_message(transit.peer)), true);
    return;
  }
}

std::vector<int> Endpoint::missing_peers(const Operation& operation) const {
  std::vector<int> missing = operation.awaited_peers();
  return missing.empty() ? pending_send_peers(&operation) : missing;
}

// Before a rank runs an operation alone, it has sent everything that earlier operations need. So if
// a peer has begun another operation than the one in which it is waited for, and either of the two
// is run alone, neither can ever end.
Status Endpoint::crossed() const {
  Status found;
  bool found_tensor = false;
  for (const auto& [tag, operation] : active_) {
    for (const auto& [other_tag, arrivals] : unexpected_) {
      for (const Arrival& arrival : arrivals) {
        std::string other;
        bool tensor = false;
        if (arrival.note.empty() || !operation->waits_for(arrival.source) ||
            !operation->crosses(arrival, &other, &tensor))
          continue;
        if (!found.ok() && (found_tensor || !tensor)) continue;
        found_tensor = tensor;
        const std::string peer = "rank " + std::to_string(arrival.source);
        found = Status::Error(
            Code::kInvalidArgument,
            "the ranks are at different places of the program: rank " + std::to_string(rank_) +
                " waits for " + peer + " in " + operation->purpose() + ", " + peer + " has begun " +
                other + "; run the same steps with the same shapes and dtypes on every rank");
      }
    }
  }
  return found;
}

}  // namespace whale
