// One order of starts on all ranks, for libraries that do not match operations by key (NCCL).
// Decision: 0098 (docs/decisions).
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "whale_ops/core/progress/endpoint.h"

namespace whale {

// Operations of any groups of ranks become ready in an order of their own on every rank. When all
// ranks of a group are ready for one, each proposes a number, larger than all that it has seen, and
// the largest is the operation's: no two operations have the same. A rank starts its operations by
// their numbers, each when none that may still get a smaller one is left. So all ranks follow one
// order of all operations, and those that wait for each other on the devices form no circle: of the
// operations that have begun the one with the smallest number has been started, or will be, by its
// whole group. And as only those for which all are ready have numbers, what is started never waits
// for something that another rank has yet to compute, whatever depends on what there. (Skeen's
// total order of messages to groups that overlap, with a meeting before it.)
class WHALE_EXPORT LaunchOrder : public std::enable_shared_from_this<LaunchOrder> {
 public:
  // What all ranks of the group tell when they are ready, in group order, one behind the other.
  using Told = std::vector<int64_t>;
  struct Call {
    std::string key;
    std::string text;            // what else must be equal on all ranks (shapes, dtype)
    std::vector<int> group;      // ranks of the communicator; this one is among them
    std::vector<int64_t> tells;  // so many numbers on all ranks
    // Called once, when all ranks are ready, unless they disagree; an error ends the communicator.
    // Null: nothing is to be done.
    std::function<Status(const Told&)> met;
    // Called once: to start the operation, or with the error because of which it cannot start.
    std::function<void(const Status&)> launch;
    // Both are called on the engine's thread, and must not block.
  };

  // `name`: of the order; equal on all ranks, and another one for every order of the communicator.
  LaunchOrder(std::shared_ptr<Endpoint> endpoint, std::string name);

  // This rank may start the operation from now on; the n-th call under a key is that of the other
  // ranks. Any thread.
  void ready(Call call);

 private:
  struct Turn {
    Call call;
    Told told;
    Status status;     // of the meeting
    bool met = false;  // whether it has ended
    int64_t proposal = 0;
    std::vector<int64_t> proposals;  // of all ranks of the group
    bool settled = false;
  };
  using TurnPtr = std::shared_ptr<Turn>;

  void meeting_ended(const TurnPtr& turn, const Status& status);
  void propose(const TurnPtr& turn);
  void settle(const TurnPtr& turn, const Status& status);
  void fail(const TurnPtr& turn, const Status& status);
  void start();
  Request request(const std::string& key, const TurnPtr& turn, const std::vector<int64_t>& own,
                  std::vector<int64_t>* all) const;

  const std::shared_ptr<Endpoint> endpoint_;
  const std::string name_;
  std::mutex mutex_;  // guards what follows
  // By key: they take numbers in the order in which they are counted.
  std::map<std::string, std::deque<TurnPtr>> meeting_;
  // Engine thread.
  int64_t clock_ = 0;  // the largest number seen, divided by the number of ranks
  // By number; by the own proposal, which is no larger, until that is known.
  std::map<int64_t, TurnPtr> queue_;
  Status failure_;
};

}  // namespace whale
