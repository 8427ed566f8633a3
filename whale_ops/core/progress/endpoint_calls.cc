// The part of an endpoint that other threads call: requests are checked and queued for the engine's
// thread.
#include <algorithm>
#include <set>

#include "whale_ops/core/collective/reduce.h"
#include "whale_ops/core/progress/endpoint.h"

namespace whale {

uint64_t Endpoint::reserve() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t id = next_id_++;
  reservations_[id] = Reservation::kFree;
  return id;
}

void Endpoint::release(uint64_t id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  reservations_.erase(id);
}

void Endpoint::push(Entry entry) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    inbox_.push_back(std::move(entry));
  }
  wake_();
}

void Endpoint::submit(uint64_t id, Request request) {
  Entry entry{Entry::What::kSubmit, id, 0, now_ns(), {}, check(request)};
  {
    // Counts and queues under one lock, so that the numbers of calls under a key have the order in
    // which they are queued.
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto reservation = reservations_.find(id);
    if (reservation != reservations_.end() && reservation->second == Reservation::kCancelled &&
        entry.status.ok()) {
      entry.status =
          Status::Error(Code::kCancelled, "the step was cancelled before the operation started");
    }
    if (reservation != reservations_.end()) reservation->second = Reservation::kSubmitted;
    if (entry.status.ok()) entry.call = calls_[counter_name(request)]++;
    request.algorithm = algorithm_;
    request.network = network_;
    entry.request = std::move(request);
    inbox_.push_back(std::move(entry));
  }
  wake_();
}

void Endpoint::cancel(uint64_t id, Status status) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto reservation = reservations_.find(id);
    if (reservation == reservations_.end()) return;
    if (reservation->second != Reservation::kSubmitted) {
      reservation->second = Reservation::kCancelled;
      return;
    }
    inbox_.push_back({Entry::What::kCancel, id, 0, 0, {}, std::move(status)});
  }
  wake_();
}

void Endpoint::abort(Status status) { push({Entry::What::kAbort, 0, 0, 0, {}, std::move(status)}); }

void Endpoint::lose(int peer, const std::string& what) {
  push({Entry::What::kLose,
        static_cast<uint64_t>(peer),
        0,
        0,
        {},
        Status::Error(Code::kUnavailable, what)});
}

void Endpoint::leave() { push({Entry::What::kLeave, 0, 0, 0, {}, {}}); }

void Endpoint::set_link(LinkModel link) {
  const std::lock_guard<std::mutex> lock(mutex_);
  link_ = link;
}

void Endpoint::set_algorithm(Algorithm algorithm) {
  const std::lock_guard<std::mutex> lock(mutex_);
  algorithm_ = algorithm;
}

void Endpoint::set_network(const Costs& network) {
  const std::lock_guard<std::mutex> lock(mutex_);
  network_ = network;
}

Status Endpoint::check(const Request& request) const {
  std::vector<bool> seen(size_, false);
  for (const int member : request.group) {
    if (member < 0 || member >= size_ || seen[member]) {
      return invalid(request, "ranks are " + join_ranks(request.group) +
                                  "; expected different ranks below " + std::to_string(size_) +
                                  " of communicator '" + name_ + "'");
    }
    seen[member] = true;
  }
  if (is_point_to_point(request.kind)) {
    if (request.root < 0 || request.root >= size_ || request.root == rank_) {
      return invalid(request, "peer is " + std::to_string(request.root) + " on rank " +
                                  std::to_string(rank_) +
                                  "; expected another rank of communicator '" + name_ + "' of " +
                                  std::to_string(size_) + " ranks");
    }
    return Status::Ok();
  }
  if (!request.group.empty() && !seen[rank_]) {
    return invalid(request, "rank " + std::to_string(rank_) + " is not one of the ranks " +
                                join_ranks(request.group) +
                                "; build this operation on those ranks only");
  }
  const size_t group_size =
      request.group.empty() ? static_cast<size_t>(size_) : request.group.size();
  const bool per_rank = request.kind == OpKind::kAllGather ||
                        request.kind == OpKind::kReduceScatter || request.kind == OpKind::kAllToAll;
  if ((per_rank && request.counts.size() != group_size) ||
      (request.kind == OpKind::kAllToAll && request.recv_counts.size() != group_size)) {
    return invalid(request, "got " + std::to_string(request.counts.size()) +
                                " sizes; expected one per rank of the group of " +
                                std::to_string(group_size));
  }
  for (const auto* counts : {&request.counts, &request.recv_counts}) {
    if (std::any_of(counts->begin(), counts->end(), [](int64_t n) { return n < 0; })) {
      return invalid(request, "a size is negative; sizes are numbers of elements, zero included");
    }
  }
  if (request.kind == OpKind::kBroadcast &&
      (request.root < 0 || static_cast<size_t>(request.root) >= group_size)) {
    return invalid(request, "root is " + std::to_string(request.root) +
                                "; expected an index into the group of " +
                                std::to_string(group_size) + " ranks");
  }
  if (request.kind == OpKind::kAllReduce || request.kind == OpKind::kReduceScatter) {
    const Status status = check_reduction(request.dtype, request.reduction);
    if (!status.ok()) return invalid(request, status.message);
  }
  return Status::Ok();
}

std::vector<int> Endpoint::awaited_ranks(const std::string& title) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::set<int> ranks;
  for (const Wait& wait : waits_) {
    if (wait.title.find(title) != std::string::npos)
      ranks.insert(wait.missing.begin(), wait.missing.end());
  }
  return {ranks.begin(), ranks.end()};
}

Status Endpoint::failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

std::vector<Wait> Endpoint::waits() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return waits_;
}

}  // namespace whale
