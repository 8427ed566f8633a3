// Ranks as threads that exchange as processes do: through shared memory, with and without an arena
// of tensors, and over sockets.
#include <sys/socket.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/whale_ops/core/core_test.h"
#include "whale_ops/core/progress/endpoint.h"
#include "whale_ops/core/progress/engine.h"
#include "whale_ops/core/transport/arena.h"
#include "whale_ops/core/transport/host_transport.h"
#include "whale_ops/core/transport/sockets.h"

namespace {

using whale::OpKind;

// A network that nobody has to use.
class NoNetwork final : public whale::Transport {
 public:
  NoNetwork(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void send(int, const whale::MessageHeader&, const std::string&, const void*, uint64_t,
            whale::TransportSink*) override {
    used();
  }
  void receive(const whale::Arrival&, void*, uint64_t, whale::TransportSink*) override { used(); }
  void discard(const whale::Arrival&) override { used(); }
  bool progress(whale::TransportSink*) override {
    used();
    return false;
  }
  bool needs_polling() const override { return true; }
  bool between_processes() const override { return true; }
  bool drained() const override { return true; }

 private:
  static void used() { require(false, "ranks of one machine use no network"); }
  const int rank_;
  const int size_;
};

// What the ranks, which are threads here, tell each other before they share memory.
class Table {
 public:
  static void reset(int size) { size_ = size; }
  static thread_local int rank;
  static whale::Status gather(const void* mine, size_t bytes, void* all) {
    std::unique_lock<std::mutex> lock(mutex_);
    cells_.resize(bytes * size_);
    std::memcpy(cells_.data() + bytes * rank, mine, bytes);
    meet(&lock);
    std::memcpy(all, cells_.data(), bytes * size_);
    meet(&lock);  // before anybody writes again
    return whale::Status::Ok();
  }

 private:
  static void meet(std::unique_lock<std::mutex>* lock) {
    const int round = round_;
    if (++waiting_ == size_) {
      waiting_ = 0;
      ++round_;
      everybody_.notify_all();
    }
    everybody_.wait(*lock, [round] { return round_ != round; });
  }
  static std::mutex mutex_;
  static std::condition_variable everybody_;
  static std::vector<char> cells_;
  static int size_, waiting_, round_;
};
thread_local int Table::rank = 0;
std::mutex Table::mutex_;
std::condition_variable Table::everybody_;
std::vector<char> Table::cells_;
int Table::size_ = 0, Table::waiting_ = 0, Table::round_ = 0;

// What one of the ranks does, in a thread of its own, as the engine would: operations of many
// sizes, in another order on every rank. Where the process has an arena, most tensors lie there,
// and some on some ranks only.
void exchange_in_orders(int rank, int size, std::unique_ptr<whale::Transport> transport,
                        whale::Doorbell* bell) {
  constexpr int kOperations = 32;
  const auto count = [](int index) { return int64_t{400} * index * index; };
  whale::Endpoint endpoint("exchanges", std::move(transport), [bell] { bell->ring(); });
  std::vector<std::vector<float>> own(kOperations);
  std::vector<float*> values(kOperations);
  whale::Arena* arena = whale::Arena::instance();
  for (int index = 0; index < kOperations; ++index) {
    own[index].resize(count(index));
    const bool inside = arena != nullptr && index % 5 != rank;
    values[index] =
        inside ? static_cast<float*>(arena->take(count(index) * sizeof(float))) : own[index].data();
  }
  int open = 0;
  const auto until = [&](auto over) {
    while (!over()) {
      const uint32_t rings = bell->rings();
      if (endpoint.poll(whale::now_ns()) || over()) continue;
      std::vector<int> descriptors;
      if (endpoint.descriptor() >= 0) descriptors.push_back(endpoint.descriptor());
      bell->fall_asleep(descriptors);
      bell->wait(rings, 100'000'000, descriptors);
      bell->awake();
    }
  };
  for (int round = 0; round < 3; ++round) {
    for (int k = 0; k < kOperations; ++k) {
      const int index = rank % 2 ? kOperations - 1 - k : k;
      std::fill_n(values[index], count(index), static_cast<float>(rank + index));
      whale::Request request;
      request.kind = index % 4 == 3 ? OpKind::kBroadcast : OpKind::kAllReduce;
      request.key = "operation " + std::to_string(index);
      request.dtype = whale::DType::kFloat32;
      request.element_bytes = sizeof(float);
      request.input = request.output = values[index];
      request.counts = {count(index)};
      request.done = [&open](const whale::Status& outcome) {
        require(outcome.ok(), outcome.message);
        --open;
      };
      ++open;
      endpoint.submit(std::move(request));
    }
    until([&] { return open == 0; });
    for (int index = 0; index < kOperations; ++index) {
      const int expected = index % 4 == 3 ? index : size * (size - 1) / 2 + size * index;
      for (int64_t i = 0; i < count(index); ++i) {
        require(values[index][i] == static_cast<float>(expected), "the result between processes");
      }
    }
  }
  endpoint.leave();
  until([&] { return endpoint.closed(); });
}

}  // namespace

// Ranks that share memory: rings, slots (and reading the others' memory, where there are too few of
// them or the payload is large).
void shared_memory(int size) {
  Table::reset(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([rank, size] {
      Table::rank = rank;
      whale::Doorbell bell;
      std::unique_ptr<whale::Transport> transport;
      std::vector<std::string> notes;
      const whale::Status status =
          whale::share_memory(std::make_unique<NoNetwork>(rank, size), true, {}, &Table::gather,
                              bell, &transport, &notes);
      require(status.ok() && notes.empty(),
              "the ranks share memory " + (notes.empty() ? "" : notes[0]));
      exchange_in_orders(rank, size, std::move(transport), &bell);
    });
  }
  for (auto& thread : threads) thread.join();
}

// Small operations are carried on by the threads that submit them, two of each rank, and large ones
// beside them by the engine's.
void submitting_threads(int size) {
  constexpr int kThreads = 2, kRounds = 100;
  Table::reset(size);
  whale::Engine& engine = whale::Engine::instance();
  std::vector<std::unique_ptr<whale::Transport>> transports(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([rank, size, &engine, &transports] {
      Table::rank = rank;
      std::vector<std::string> notes;
      const whale::Status status =
          whale::share_memory(std::make_unique<NoNetwork>(rank, size), true, {}, &Table::gather,
                              engine.doorbell(), &transports[rank], &notes);
      require(status.ok() && notes.empty(), "the ranks share memory");
    });
  }
  for (auto& thread : threads) thread.join();
  threads.clear();
  std::vector<std::shared_ptr<whale::Endpoint>> endpoints;
  const std::string name = "threads of " + std::to_string(size);
  require(engine.add(name, std::move(transports), &endpoints).ok(), "the engine takes ranks");
  for (int rank = 0; rank < size; ++rank) {
    for (int number = 0; number < kThreads; ++number) {
      threads.emplace_back([rank, number, size, &engine, endpoint = endpoints[rank]] {
        for (int round = 0; round < kRounds; ++round) {
          std::vector<float> values(round % 10 == 9 ? 100'000 : 100,
                                    static_cast<float>(rank + round));
          std::promise<whale::Status> ended;
          whale::Request request;
          request.kind = OpKind::kAllReduce;
          request.key = "of thread " + std::to_string(number);
          request.dtype = whale::DType::kFloat32;
          request.element_bytes = sizeof(float);
          request.input = request.output = values.data();
          request.counts = {static_cast<int64_t>(values.size())};
          request.done = [&ended](const whale::Status& outcome) { ended.set_value(outcome); };
          engine.submit(endpoint, endpoint->reserve(), std::move(request));
          const whale::Status outcome = ended.get_future().get();
          require(outcome.ok(), outcome.message);
          const int total = size * (size - 1) / 2 + size * round;
          const auto expected = static_cast<float>(total);
          require(values.front() == expected && values.back() == expected, "the threads' sums");
        }
      });
    }
  }
  for (auto& thread : threads) thread.join();
  for (const auto& endpoint : endpoints) {
    engine.forget(*endpoint);
    endpoint->leave();
  }
  for (const auto& endpoint : endpoints) {
    while (!endpoint->closed()) std::this_thread::yield();
  }
}

// Ranks that sockets connect.
void sockets(int size) {
  std::vector<std::vector<int>> ends(size, std::vector<int>(size, -1));
  for (int one = 0; one < size; ++one) {
    for (int other = 0; other < one; ++other) {
      int pair[2];
      require(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "sockets can be made");
      ends[one][other] = pair[0];
      ends[other][one] = pair[1];
    }
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([rank, size, &ends] {
      whale::Doorbell bell;
      exchange_in_orders(rank, size, whale::make_socket_transport(rank, ends[rank]), &bell);
    });
  }
  for (auto& thread : threads) thread.join();
}
