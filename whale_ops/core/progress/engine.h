// The one progress thread of the process, and the communicators that it serves.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "whale_ops/core/progress/endpoint.h"
#include "whale_ops/core/transport/doorbell.h"

namespace whale {

class WHALE_EXPORT Engine {
 public:
  // Started on first use; never destroyed, because TensorFlow's threads may still submit while the
  // process exits.
  static Engine& instance();

  // Errors: the name is taken; this process was forked from one that had started the engine.
  Status add(const std::string& name, std::vector<std::unique_ptr<Transport>> transports,
             std::vector<std::shared_ptr<Endpoint>>* endpoints);
  // rank -1: the only rank of that name in this process. Null with a status that says what exists.
  std::shared_ptr<Endpoint> find(const std::string& name, int rank, Status* status);
  // After leave(): operations can no longer look the rank up; the engine serves it until all ranks
  // have left.
  void forget(const Endpoint& endpoint);
  void wake();
  // Starts an operation of a rank. Where it is small, and the rank reaches its peers through memory
  // alone, the calling thread carries it on as the progress thread would, for as long as that is
  // worth it; its `done` may be called on this thread, before the call returns.
  void submit(const std::shared_ptr<Endpoint>& endpoint, uint64_t id, Request request);
  // Runs `task` on the progress thread, which makes all calls into MPI, and waits for it.
  void call(const std::function<void()>& task);
  // Ends the progress thread; for the exit of the process.
  void stop();
  static Status check_not_forked();
  // Rung for everything that the progress thread has to look at.
  const Doorbell& doorbell() const { return doorbell_; }

 private:
  Engine() = default;
  void start_locked();
  void run();
  struct Watch {
    bool polling = false;          // some transport does not ring
    bool active = false;           // operations are under way
    bool between = false;          // some transport leads to other processes
    std::vector<int> descriptors;  // that transports have to be read
  };
  void idle(std::unique_lock<std::mutex>* progress, uint32_t rings, const Watch& watch,
            int64_t sleep_ns, int64_t quiet_ns);

  std::mutex progress_;  // held by the thread that looks at endpoints; taken before the next one
  std::mutex mutex_;     // guards what follows
  std::vector<std::function<void()>> tasks_;
  bool stopping_ = false;
  bool running_ = false;
  std::vector<std::shared_ptr<Endpoint>> endpoints_;
  std::map<std::pair<std::string, int>, std::shared_ptr<Endpoint>> registry_;
  std::thread thread_;
  Doorbell doorbell_;
  Patience patience_;  // of the engine's thread
};

}  // namespace whale
