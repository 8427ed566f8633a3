// The core without Python: schedules whose messages fit together, and ranks as threads. Bazel runs it, also under the
// thread and the address sanitizer (bazel test --config=tsan //tests:core_cc_test).
#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "whale_ops/core/algorithms.h"
#include "whale_ops/core/arena.h"
#include "whale_ops/core/c_api.h"
#include "whale_ops/core/device_rank.h"
#include "whale_ops/core/endpoint.h"
#include "whale_ops/core/engine.h"
#include "whale_ops/core/host_transport.h"
#include "whale_ops/core/in_process.h"
#include "whale_ops/core/launch_order.h"

extern "C" const whale::DevicePlugin whale_device_plugin;  // host_device.cc

namespace {

using whale::Code;
using whale::OpKind;

constexpr double kTimeoutS = 30.0;

void require(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
  std::exit(1);
}

// Every message that one rank sends is received by its peer: same id, same number of elements, once.
void messages_fit(OpKind kind, const std::vector<std::vector<int64_t>>& counts, const std::vector<std::vector<int64_t>>& recv_counts,
                  int root, whale::Algorithm algorithm = whale::Algorithm::kAuto, const std::vector<int>& hosts = {},
                  bool narrow_float = false) {
  const int size = static_cast<int>(counts.size());
  std::map<std::tuple<int, int, uint32_t>, int64_t> sent, received;
  for (int rank = 0; rank < size; ++rank) {
    whale::Problem problem;
    problem.kind = kind;
    problem.rank = rank;
    problem.size = size;
    problem.root = root;
    problem.algorithm = algorithm;
    problem.hosts = hosts;
    problem.narrow_float = narrow_float;
    problem.element_bytes = narrow_float ? 2 : 4;
    problem.counts = counts[rank];
    problem.recv_counts = recv_counts[rank];
    for (const auto& lane : whale::make_schedule(problem).lanes) {
      for (const auto& step : lane) {
        for (const auto& one : step.sends) {
          require(sent.emplace(std::make_tuple(rank, one.peer, one.id), one.slice.count).second, "an id is sent once");
        }
        for (const auto& one : step.recvs) {
          require(received.emplace(std::make_tuple(one.peer, rank, one.id), one.slice.count).second, "an id is received once");
        }
      }
    }
  }
  const std::string where = std::string(whale::name_of(kind)) + " of " + std::to_string(size) + " ranks: ";
  require(sent == received, where + "what is sent is what is received");
  require(size == 1 || kind == OpKind::kAllToAll || !sent.empty(), where + "they exchange something");
}

void schedules() {
  std::mt19937 draw(1);
  for (int size = 1; size <= 7; ++size) {
    for (const int64_t largest : {1, 5, 40'000, 700'001}) {
      std::vector<int64_t> shares(size);
      for (auto& share : shares) share = draw() % (largest + 1);
      shares[0] = largest;
      const std::vector<std::vector<int64_t>> none(size), whole(size, {largest}), parts(size, shares);
      messages_fit(OpKind::kAllReduce, whole, none, 0);
      for (const auto algorithm : {whale::Algorithm::kDirect, whale::Algorithm::kPairwise, whale::Algorithm::kRing,
                                   whale::Algorithm::kHalvingDoubling, whale::Algorithm::kTree}) {
        messages_fit(OpKind::kAllReduce, whole, none, 0, algorithm);
      }
      for (int most = 2; most < size; ++most) {
        std::vector<int> hosts;  // of at most so many ranks, in a mixed order
        for (int rank = 0; rank < size; ++rank) hosts.push_back(rank % ((size + most - 1) / most));
        for (const auto algorithm : {whale::Algorithm::kHierarchical, whale::Algorithm::kLeader, whale::Algorithm::kAuto}) {
          messages_fit(OpKind::kAllReduce, whole, none, 0, algorithm, hosts);
          messages_fit(OpKind::kAllReduce, whole, none, 0, algorithm, hosts, true);
        }
      }
      messages_fit(OpKind::kBroadcast, whole, none, size - 1);
      messages_fit(OpKind::kAllGather, parts, none, 0);
      messages_fit(OpKind::kReduceScatter, parts, none, 0);
      std::vector<std::vector<int64_t>> out(size, std::vector<int64_t>(size)), in(size, std::vector<int64_t>(size));
      for (int i = 0; i < size; ++i) {
        for (int j = 0; j < size; ++j) out[i][j] = in[j][i] = draw() % (largest + 1);
      }
      messages_fit(OpKind::kAllToAll, out, in, 0);
    }
  }
}

class Ranks {
 public:
  Ranks(const char* name, int size) : handles_(size) {
    require(whale_in_process_create(name, size, nullptr, handles_.data()) == 0, whale_last_error());
  }
  ~Ranks() {
    for (void* handle : handles_) {
      int all_left = 0;
      whale_leave(handle, 0.0, &all_left);
      whale_release(handle);
    }
  }
  // body(rank, handle) of every rank, each in a thread of its own.
  template <typename Body>
  void each(Body body) {
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < handles_.size(); ++rank) threads.emplace_back(body, static_cast<int>(rank), handles_[rank]);
    for (auto& thread : threads) thread.join();
  }

 private:
  std::vector<void*> handles_;
};

void* all_reduce(void* handle, const std::string& key, std::vector<float>* values) {
  const int64_t count = static_cast<int64_t>(values->size());
  WhaleOperation operation{};
  operation.kind = static_cast<int32_t>(OpKind::kAllReduce);
  operation.dtype = static_cast<int32_t>(whale::DType::kFloat32);
  operation.element_bytes = sizeof(float);
  operation.key = key.c_str();
  operation.text = "float32";
  operation.input = values->data();
  operation.output = values->data();
  operation.counts = &count;
  operation.counts_size = 1;
  void* pending = nullptr;
  require(whale_submit(handle, &operation, &pending) == 0, whale_last_error());
  return pending;
}

// Many operations under way at once, submitted in another order on every rank.
void sums(int size) {
  constexpr int kOperations = 24;
  Ranks ranks("sums", size);
  ranks.each([size](int rank, void* handle) {
    std::vector<std::vector<float>> values(kOperations);
    std::vector<void*> pending(kOperations);
    for (int round = 0; round < 3; ++round) {
      for (int k = 0; k < kOperations; ++k) {
        const int index = rank % 2 ? kOperations - 1 - k : k;
        values[index].assign(index * index * 200, static_cast<float>(rank + index));
        pending[index] = all_reduce(handle, "sum " + std::to_string(index), &values[index]);
      }
      for (int index = 0; index < kOperations; ++index) {
        require(whale_wait(pending[index], kTimeoutS) == 0, whale_last_error());
        const float expected = static_cast<float>(size * (size - 1) / 2 + size * index);
        for (const float value : values[index]) require(value == expected, "the sum over the ranks");
      }
    }
  });
}

void disagreement() {
  Ranks ranks("disagreement", 3);
  ranks.each([](int rank, void* handle) {
    std::vector<float> values(rank == 1 ? 7 : 8);
    const int code = whale_wait(all_reduce(handle, "k", &values), kTimeoutS);
    require(code == static_cast<int>(Code::kInvalidArgument), "ranks that disagree get an error");
    require(std::string(whale_last_error()).find("'k'") != std::string::npos, "which names the operation");
  });
}

void abort_while_waiting() {
  Ranks ranks("abort", 3);
  ranks.each([](int rank, void* handle) {
    if (rank == 2) {
      require(whale_abort(handle, "enough") == 0, whale_last_error());
      return;
    }
    std::vector<float> values(100'000);
    const int code = whale_wait(all_reduce(handle, "k", &values), kTimeoutS);
    require(code == static_cast<int>(Code::kAborted), "an abort ends the others' waiting");
  });
}

// Ranks that start operations in one order. A rank's device is a list of what was started there.
class Devices {
 public:
  Devices(const char* name, int size) : devices_(size) {
    require(whale::Engine::instance().add(name, whale::make_in_process_transports(size), &endpoints_).ok(), name);
    for (int rank = 0; rank < size; ++rank) devices_[rank].order = std::make_shared<whale::LaunchOrder>(endpoints_[rank], "device");
  }
  ~Devices() {
    for (const auto& endpoint : endpoints_) {
      whale::Engine::instance().forget(*endpoint);
      endpoint->leave();
    }
  }
  // `then`: called when it has started.
  void ready(int rank, const std::string& key, const std::string& text, std::function<void()> then = [] {}) {
    devices_[rank].order->ready(key, text, [this, rank, key, then](const whale::Status& status) {
      if (status.ok()) then();
      const std::lock_guard<std::mutex> lock(mutex_);
      Device& device = devices_[rank];
      status.ok() ? device.started.push_back(key) : device.errors.push_back(status);
      changed_.notify_all();
    });
  }
  const std::vector<std::string>& started(int rank, size_t count) {
    wait([&] { return devices_[rank].started.size() >= count; });
    return devices_[rank].started;
  }
  const whale::Status& error(int rank) {
    wait([&] { return !devices_[rank].errors.empty(); });
    return devices_[rank].errors[0];
  }
  whale::Endpoint& endpoint(int rank) { return *endpoints_[rank]; }

 private:
  struct Device {
    std::shared_ptr<whale::LaunchOrder> order;
    std::vector<std::string> started;
    std::vector<whale::Status> errors;
  };
  template <typename Over>
  void wait(Over over) {
    std::unique_lock<std::mutex> lock(mutex_);
    require(changed_.wait_for(lock, std::chrono::duration<double>(kTimeoutS), over), "operations start in time");
  }
  std::vector<std::shared_ptr<whale::Endpoint>> endpoints_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Device> devices_;
};

// The order of a rank's own in which it has its operations ready, of each round.
std::vector<std::vector<int>> orders_of(int rank, int operations, int rounds) {
  std::mt19937 draw(rank);
  std::vector<int> order(operations);
  std::iota(order.begin(), order.end(), 0);
  std::vector<std::vector<int>> found;
  for (int round = 0; round < rounds; ++round) {
    std::shuffle(order.begin(), order.end(), draw);
    found.push_back(order);
  }
  return found;
}

// Every rank is ready in an order of its own, for the same keys several times. On odd ranks each third operation needs the one
// before it to have started, on the others it is ready at any time: an order that did not ask those would wait for ever.
void one_order_of_starts(int size) {
  constexpr int kOperations = 30, kRounds = 3;
  Devices devices("order", size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([rank, &devices] {
      const auto orders = orders_of(rank, kOperations, kRounds);
      for (int round = 0; round < kRounds; ++round) {
        for (const int index : orders[round]) {
          const std::string key = "operation " + std::to_string(index), next = "operation " + std::to_string(index + 1);
          if (rank % 2 == 0 || index % 3 == 0) {
            devices.ready(rank, key, "float32");
          } else if (index % 3 == 1) {
            devices.ready(rank, key, "float32", [rank, next, &devices] { devices.ready(rank, next, "float32"); });
          }
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  const std::vector<std::string> first = devices.started(0, kOperations * kRounds);
  require(first.size() == kOperations * kRounds, "every operation starts once");
  for (int rank = 1; rank < size; ++rank) require(devices.started(rank, first.size()) == first, "all ranks start in the same order");
}

void starts_that_fail() {
  {
    Devices devices("order that disagrees", 3);
    for (int rank = 0; rank < 3; ++rank) devices.ready(rank, "k", rank == 1 ? "[7]" : "[8]");
    for (int rank = 0; rank < 3; ++rank) {
      require(devices.error(rank).code == Code::kInvalidArgument, "ranks that disagree about what they start get an error");
      require(devices.error(rank).message.find("[7]") != std::string::npos, "which says how");
      require(devices.started(rank, 0).empty(), "and none has started it");
    }
  }
  Devices devices("order that ends", 3);
  for (int rank = 0; rank < 2; ++rank) devices.ready(rank, "k", "[8]");
  devices.endpoint(2).abort(whale::Status::Error(Code::kAborted, "enough"));
  for (int rank = 0; rank < 2; ++rank) require(devices.error(rank).code == Code::kAborted, "an abort ends the waiting for a turn");
}

// Ranks start reductions in orders of their own, and the device refuses those that the ranks launch in different ones.
void devices_reduce(int size) {
  constexpr int kOperations = 20, kRounds = 3;
  std::vector<std::shared_ptr<whale::Endpoint>> endpoints;
  require(whale::Engine::instance().add("devices", whale::make_in_process_transports(size), &endpoints).ok(), "devices");
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([rank, size, &endpoints] {
      require(whale::DeviceRank::open(endpoints[rank], whale_device_plugin, "", 0, 64).ok(), "a device opens");
      whale::Status status;
      const auto device = whale::DeviceRank::find("devices", rank, &status);
      std::mutex mutex;
      std::condition_variable changed;
      int done = 0;
      std::vector<std::vector<double>> tensors;
      for (int i = 0; i < kOperations * kRounds; ++i) tensors.emplace_back(i % kOperations + 1, rank + 1.0);
      const auto orders = orders_of(rank, kOperations, kRounds);
      for (int round = 0; round < kRounds; ++round) {
        for (const int index : orders[round]) {
          std::vector<double>& tensor = tensors[round * kOperations + index];
          whale::DeviceReduction what{{{tensor.data(), tensor.data(), static_cast<int64_t>(tensor.size())}}, whale::DType::kFloat64,
                                      whale::DType::kFloat64};
          device->all_reduce("operation " + std::to_string(index), "float64", what, nullptr, [&](const whale::Status& outcome) {
            require(outcome.ok(), outcome.message.c_str());
            const std::lock_guard<std::mutex> lock(mutex);
            ++done;
            changed.notify_all();
          });
        }
      }
      std::unique_lock<std::mutex> lock(mutex);
      const auto all_done = [&done] { return done == kOperations * kRounds; };
      require(changed.wait_for(lock, std::chrono::duration<double>(kTimeoutS), all_done), "devices reduce in time");
      for (const auto& tensor : tensors) {
        for (const double value : tensor) require(value == size * (size + 1) / 2.0, "devices add up");
      }
      whale::DeviceRank::close(*endpoints[rank]);
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& endpoint : endpoints) {
    whale::Engine::instance().forget(*endpoint);
    endpoint->leave();
  }
}

// A network that nobody has to use.
class NoNetwork final : public whale::Transport {
 public:
  NoNetwork(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void send(int, const whale::MessageHeader&, const std::string&, const void*, uint64_t, whale::TransportSink*) override { used(); }
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

// Ranks that share memory, each with a thread of its own that does what the engine does: rings, slots (and reading the others'
// memory, where there are too few of them or the payload is large), in another order on every rank. Where the process has an
// arena, most tensors lie there, and some on some ranks only.
void shared_memory(int size) {
  constexpr int kOperations = 32;
  const auto count = [](int index) { return int64_t{400} * index * index; };
  Table::reset(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([rank, size, count] {
      Table::rank = rank;
      whale::Doorbell bell;
      std::unique_ptr<whale::Transport> transport;
      std::vector<std::string> notes;
      const whale::Status status =
          whale::share_memory(std::make_unique<NoNetwork>(rank, size), true, {}, &Table::gather, bell, &transport, &notes);
      require(status.ok() && notes.empty(), "the ranks share memory " + (notes.empty() ? "" : notes[0]));
      whale::Endpoint endpoint("shared memory", std::move(transport), [&bell] { bell.bell()->ring(); });
      std::vector<std::vector<float>> own(kOperations);
      std::vector<float*> values(kOperations);
      whale::Arena* arena = whale::Arena::instance();
      for (int index = 0; index < kOperations; ++index) {
        own[index].resize(count(index));
        const bool inside = arena != nullptr && index % 5 != rank;
        values[index] = inside ? static_cast<float*>(arena->take(count(index) * sizeof(float))) : own[index].data();
      }
      int open = 0;
      const auto until = [&](auto over) {
        while (!over()) {
          const uint32_t rings = bell.rings();
          if (!endpoint.poll(whale::now_ns()) && !over()) bell.wait(rings, 100'000'000);
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
            require(values[index][i] == static_cast<float>(expected), "the result over shared memory");
          }
        }
      }
      endpoint.leave();
      until([&] { return endpoint.closed(); });
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace

int main() {
  schedules();
  for (const int size : {1, 2, 3, 5}) sums(size);
  disagreement();
  abort_while_waiting();
  for (const int size : {1, 2, 3, 5}) one_order_of_starts(size);
  starts_that_fail();
  for (const int size : {1, 3}) devices_reduce(size);
  for (const int size : {2, 3, 4}) shared_memory(size);
  require(whale::Arena::open(256 << 20) == 0, "an arena can be made");
  for (const int size : {2, 3, 4}) shared_memory(size);
  whale_stop();
  std::puts("core: all well");
}
