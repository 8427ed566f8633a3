// The single progress thread of the process, and the communicators that it serves.
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
  // Started on first use. Never destroyed, because TensorFlow's threads may still submit while the
  // process exits.
  static Engine& instance();

  // Adds a communicator's ranks. Errors: the name is taken, or this process was forked from one
  // that had started the engine.
  Status add(const std::string& name, std::vector<std::unique_ptr<Transport>> transports,
             std::vector<std::shared_ptr<Endpoint>>* endpoints);
  // Finds a rank of a communicator; rank -1: the only rank of that name in this process. Returns
  // null, and a status that says what exists, if there is none.
  std::shared_ptr<Endpoint> find(const std::string& name, int rank, Status* status);
  // Called after leave(): operations can no longer find the rank; the engine serves it until all
  // ranks have left.
  void forget(const Endpoint& endpoint);
  void wake();
  // Starts an operation of a rank. If it is small, and the rank reaches its peers through memory
  // alone, the calling thread carries it on in the place of the progress thread, for as long as
  // that is worth it; `done` may then be called on this thread, before this call returns.
  void submit(const std::shared_ptr<Endpoint>& endpoint, uint64_t id, Request request);
  // Runs `task` on the progress thread, which makes all calls into MPI, and waits for it to end.
  void call(const std::function<void()>& task);
  // Ends the progress thread, when the process exits.
  void stop();
  static Status check_not_forked();
  // The bell that is rung for everything that the progress thread has to look at.
  const Doorbell& doorbell() const { return doorbell_; }

 private:
  Engine() = default;
  void start_locked();
  void run();
  struct Watch {
    bool polling = false;          // some transport cannot ring the bell
    bool active = false;           // operations are under way
    bool between = false;          // some transport connects to other processes
    std::vector<int> descriptors;  // readable when transports have something to read
  };
  void idle(std::unique_lock<std::mutex>* progress, uint32_t rings, const Watch& watch,
            int64_t sleep_ns, int64_t quiet_ns);

  std::mutex progress_;  // held by the thread that looks at endpoints; locked before mutex_
  std::mutex mutex_;     // guards what follows
  std::vector<std::function<void()>> tasks_;
  bool stopping_ = false;
  bool running_ = false;
  std::vector<std::shared_ptr<Endpoint>> endpoints_;
  std::map<std::pair<std::string, int>, std::shared_ptr<Endpoint>> registry_;
  std::thread thread_;
  Doorbell doorbell_;
  Patience patience_;  // of the progress thread
};

}  // namespace whale
