// One order of starts on all ranks, for libraries that do not match operations by key (NCCL).
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "whale_ops/core/engine/endpoint.h"

namespace whale {

// Operations become ready in an order of their own on every rank. The communicator's first rank gives them numbers, each as soon
// as all ranks are ready for it, and every rank starts them by these numbers. So what is started never waits for something that
// another rank has yet to compute, whatever depends on what there; and where nothing is under way, nothing waits for its turn.
class WHALE_EXPORT LaunchOrder : public std::enable_shared_from_this<LaunchOrder> {
 public:
  // Called once, on the engine's thread: to start the operation, or with the error because of which it cannot start. Must not block.
  using Launch = std::function<void(const Status&)>;

  // `name`: of the order; equal on all ranks, and another one for every order of the communicator.
  LaunchOrder(std::shared_ptr<Endpoint> endpoint, std::string name);

  // This rank may start the operation from now on; the n-th call under a key is that of the other ranks. `text`: what else must
  // be equal on all ranks (shapes, dtype). Any thread.
  void ready(const std::string& key, const std::string& text, Launch launch);

 private:
  struct Turn {
    std::string text;
    Launch launch;
    std::vector<char> ready;  // a byte of each rank, and this rank's once more: what they tell is that they come
    int64_t number = 0;
  };

  void announce(const std::string& key, std::shared_ptr<Turn> turn);
  void take(const std::shared_ptr<Turn>& turn, const Status& status);
  Request request(OpKind kind, const std::string& key, const std::shared_ptr<Turn>& turn) const;

  const std::shared_ptr<Endpoint> endpoint_;
  const std::string name_;
  std::mutex mutex_;  // guards what follows
  std::map<std::string, std::deque<std::shared_ptr<Turn>>> unnumbered_;  // of the first rank, by key
  // Engine thread.
  int64_t given_ = 0;    // numbers, on the first rank
  int64_t started_ = 0;  // operations
  std::map<int64_t, Launch> numbered_;  // that wait for those before them
  Status failure_;
};

}  // namespace whale
