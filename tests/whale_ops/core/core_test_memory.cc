// Ranks as threads that share memory as processes do, with and without an arena of tensors.
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/whale_ops/core/core_test.h"
#include "whale_ops/core/progress/endpoint.h"
#include "whale_ops/core/transport/arena.h"
#include "whale_ops/core/transport/host_transport.h"

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

}  // namespace

// Ranks that share memory, each with a thread of its own that does what the engine does: rings,
// slots (and reading the others' memory, where there are too few of them or the payload is large),
// in another order on every rank. Where the process has an arena, most tensors lie there, and some
// on some ranks only.
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
          whale::share_memory(std::make_unique<NoNetwork>(rank, size), true, {}, &Table::gather,
                              bell, &transport, &notes);
      require(status.ok() && notes.empty(),
              "the ranks share memory " + (notes.empty() ? "" : notes[0]));
      whale::Endpoint endpoint("shared memory", std::move(transport),
                               [&bell] { bell.bell()->ring(); });
      std::vector<std::vector<float>> own(kOperations);
      std::vector<float*> values(kOperations);
      whale::Arena* arena = whale::Arena::instance();
      for (int index = 0; index < kOperations; ++index) {
        own[index].resize(count(index));
        const bool inside = arena != nullptr && index % 5 != rank;
        values[index] = inside ? static_cast<float*>(arena->take(count(index) * sizeof(float)))
                               : own[index].data();
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
            require(values[index][i] == static_cast<float>(expected),
                    "the result over shared memory");
          }
        }
      }
      endpoint.leave();
      until([&] { return endpoint.closed(); });
    });
  }
  for (auto& thread : threads) thread.join();
}
