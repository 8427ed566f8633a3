// Makes all ranks start operations in one order, for libraries that do not match operations by key
// (NCCL).
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

// Agrees on one order of operations over any groups of ranks, although these become ready in
// different orders on different ranks.
//
// When all ranks of a group are ready for an operation, each proposes a number, larger than all
// numbers that it has seen, and the largest proposal becomes the operation's number; no two
// operations have the same. A rank starts its operations in the order of their numbers, each one
// when no other operation can still get a smaller number.
//
// This excludes deadlocks on the devices: all ranks follow one order of all operations, so among
// the operations that have begun, the one with the smallest number has been started, or will be, by
// its whole group. Only operations for which all ranks are ready have numbers, so what is started
// never waits for something that another rank has yet to compute. (This is Skeen's total order
// multicast to overlapping groups, preceded by a gather.)
class WHALE_EXPORT LaunchOrder : public std::enable_shared_from_this<LaunchOrder> {
 public:
  // What all ranks of the group tell when they are ready, concatenated in group order.
  using Told = std::vector<int64_t>;
  struct Call {
    std::string key;
    std::string text;            // what else must be equal on all ranks (shapes, dtype)
    std::vector<int> group;      // ranks of the communicator; this one is among them
    std::vector<int64_t> tells;  // equally many numbers on all ranks
    // Called once, when all ranks are ready, unless they disagree; an error aborts the
    // communicator. Null: nothing to do.
    std::function<Status(const Told&)> met;
    // Called once, to start the operation, or with the error that keeps it from starting.
    //
    // `met` and `launch` are called on the engine's thread, and must not block.
    std::function<void(const Status&)> launch;
    // Both are called on the engine's thread, and must not block.
  };

  // `name`: name of the order, equal on all ranks, and different for every order of the
  // communicator.
  LaunchOrder(std::shared_ptr<Endpoint> endpoint, std::string name);

  // Tells that this rank may start the operation from now on. The n-th call under a key on one rank
  // meets the n-th on the others. Callable from any thread.
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
  // Turns whose gather is under way, by key: they take numbers in the order in which they are
  // counted.
  std::map<std::string, std::deque<TurnPtr>> meeting_;
  // Used by the engine's thread only.
  int64_t clock_ = 0;  // the largest number seen, divided by the number of ranks
  // Turns by number; by this rank's proposal, which is no larger, until the number is known.
  std::map<int64_t, TurnPtr> queue_;
  Status failure_;
};

}  // namespace whale
