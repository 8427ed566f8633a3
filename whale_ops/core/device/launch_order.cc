#include "whale_ops/core/device/launch_order.h"

#include <algorithm>
#include <utility>

namespace whale {

LaunchOrder::LaunchOrder(std::shared_ptr<Endpoint> endpoint, std::string name)
    : endpoint_(std::move(endpoint)), name_(std::move(name)) {}

void LaunchOrder::ready(Call call) {
  auto turn = std::make_shared<Turn>();
  turn->call = std::move(call);
  // A gather of no bytes would exchange no message, and not wait for the other ranks.
  if (turn->call.tells.empty()) turn->call.tells = {0};
  Request meeting = request("/ready", turn, turn->call.tells, &turn->told);
  meeting.done = [self = shared_from_this(), turn](const Status& status) {
    self->meeting_ended(turn, status);
  };
  // Queued under the same lock as submitted, so that calls under a key have the order in which they
  // are counted.
  const std::lock_guard<std::mutex> lock(mutex_);
  meeting_[turn->call.key].push_back(std::move(turn));
  endpoint_->submit(std::move(meeting));
}

// Of two calls under one key the second may have gathered first, on some ranks: they proceed in
// order, so that all ranks do the same.
void LaunchOrder::meeting_ended(const TurnPtr& turn, const Status& status) {
  // Drops this rank's own numbers, which are stored at the end.
  turn->told.resize(turn->call.tells.size() * turn->call.group.size());
  turn->status = status;
  turn->met = true;
  std::vector<TurnPtr> next;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto calls = meeting_.find(turn->call.key);
    while (!calls->second.empty() && calls->second.front()->met) {
      next.push_back(std::move(calls->second.front()));
      calls->second.pop_front();
    }
    if (calls->second.empty()) meeting_.erase(calls);
  }
  for (const TurnPtr& met : next) propose(met);
}

void LaunchOrder::propose(const TurnPtr& turn) {
  if (!turn->status.ok() || !failure_.ok())
    return fail(turn, turn->status.ok() ? failure_ : turn->status);
  if (turn->call.met != nullptr) {
    const Status status = turn->call.met(turn->told);
    if (!status.ok()) {
      endpoint_->abort(status);  // the others wait for this rank's number
      return fail(turn, status);
    }
  }
  // A number that is larger than all numbers seen, and that no other rank can propose.
  turn->proposal = ++clock_ * endpoint_->size() + endpoint_->rank();
  queue_[turn->proposal] = turn;
  Request numbers = request("/turn", turn, {turn->proposal}, &turn->proposals);
  numbers.done = [self = shared_from_this(), turn](const Status& status) {
    self->settle(turn, status);
  };
  endpoint_->submit(std::move(numbers));
}

void LaunchOrder::settle(const TurnPtr& turn, const Status& status) {
  if (queue_.erase(turn->proposal) == 0) return;  // it has failed together with another one
  if (!status.ok()) return fail(turn, status);
  turn->settled = true;
  const int64_t number = *std::max_element(turn->proposals.begin(), turn->proposals.end());
  clock_ = std::max(clock_, number / endpoint_->size());
  queue_[number] = turn;
  start();
}

void LaunchOrder::start() {
  while (!queue_.empty() && queue_.begin()->second->settled) {
    const TurnPtr turn = std::move(queue_.begin()->second);
    queue_.erase(queue_.begin());
    turn->call.launch(Status::Ok());
  }
}

void LaunchOrder::fail(const TurnPtr& turn, const Status& status) {
  if (failure_.ok()) failure_ = status;
  turn->call.launch(status);
  // Not all ranks will start the operations that are still queued.
  for (const auto& [number, other] : std::exchange(queue_, {})) other->call.launch(failure_);
}

Request LaunchOrder::request(const std::string& key, const TurnPtr& turn,
                             const std::vector<int64_t>& own, std::vector<int64_t>* all) const {
  const size_t size = turn->call.group.size();
  Request made;
  made.kind = OpKind::kAllGather;
  made.key = name_ + "/" + turn->call.key + key;
  made.text = turn->call.text;
  made.dtype_name = kBytes;
  made.element_bytes = sizeof(int64_t);
  made.group = turn->call.group;
  made.counts.assign(size, static_cast<int64_t>(own.size()));
  // This rank's own numbers are stored behind those of all ranks, so that their memory lives as
  // long as the turn.
  all->resize(own.size() * size);
  all->insert(all->end(), own.begin(), own.end());
  made.input = all->data() + own.size() * size;
  made.output = all->data();
  made.owner = turn;
  return made;
}

}  // namespace whale
