#include "whale_ops/core/device/launch_order.h"

#include <utility>

namespace whale {

LaunchOrder::LaunchOrder(std::shared_ptr<Endpoint> endpoint, std::string name) : endpoint_(std::move(endpoint)), name_(std::move(name)) {}

void LaunchOrder::ready(const std::string& key, const std::string& text, Launch launch) {
  auto turn = std::make_shared<Turn>();
  turn->text = text;
  turn->launch = std::move(launch);
  turn->ready.resize(static_cast<size_t>(endpoint_->size()) + 1);
  // All with all, so that the first rank gives no number to what ranks disagree about.
  Request meeting = request(OpKind::kAllGather, key + "/ready", turn);
  meeting.counts.assign(static_cast<size_t>(endpoint_->size()), 1);
  meeting.input = &turn->ready.back();
  meeting.output = turn->ready.data();
  if (endpoint_->rank() != 0) {
    meeting.done = [](const Status&) {};  // the announcement fails with it
    const std::lock_guard<std::mutex> lock(mutex_);
    endpoint_->submit(std::move(meeting));
    announce(key, std::move(turn));
    return;
  }
  meeting.done = [self = shared_from_this(), key](const Status& status) {
    std::shared_ptr<Turn> next;
    {
      // Of two calls under one key the first takes the first number, whichever meeting ends first: all are ready for both.
      const std::lock_guard<std::mutex> lock(self->mutex_);
      auto& calls = self->unnumbered_[key];
      next = std::move(calls.front());
      calls.pop_front();
      if (calls.empty()) self->unnumbered_.erase(key);
    }
    if (!status.ok()) return self->take(next, status);
    next->number = self->given_++;
    self->announce(key, std::move(next));
  };
  const std::lock_guard<std::mutex> lock(mutex_);  // so that calls under a key are queued in the order in which they are counted
  unnumbered_[key].push_back(std::move(turn));
  endpoint_->submit(std::move(meeting));
}

// The first rank tells the number, the others hear it.
void LaunchOrder::announce(const std::string& key, std::shared_ptr<Turn> turn) {
  Request number = request(OpKind::kBroadcast, key + "/turn", turn);
  number.element_bytes = sizeof(turn->number);
  number.counts = {1};
  number.input = number.output = &turn->number;
  number.done = [self = shared_from_this(), turn](const Status& status) { self->take(turn, status); };
  endpoint_->submit(std::move(number));
}

void LaunchOrder::take(const std::shared_ptr<Turn>& turn, const Status& status) {
  if (failure_.ok()) failure_ = status;
  if (!failure_.ok()) {
    turn->launch(status.ok() ? failure_ : status);
    // Those before them will never have their turn.
    for (auto& [number, launch] : std::exchange(numbered_, {})) launch(failure_);
    return;
  }
  numbered_[turn->number] = std::move(turn->launch);
  while (!numbered_.empty() && numbered_.begin()->first == started_) {
    const Launch launch = std::move(numbered_.begin()->second);
    numbered_.erase(numbered_.begin());
    ++started_;
    launch(Status::Ok());
  }
}

Request LaunchOrder::request(OpKind kind, const std::string& key, const std::shared_ptr<Turn>& turn) const {
  Request made;
  made.kind = kind;
  made.key = name_ + "/" + key;
  made.text = turn->text;
  made.dtype_name = kBytes;
  made.owner = turn;
  return made;
}

}  // namespace whale
