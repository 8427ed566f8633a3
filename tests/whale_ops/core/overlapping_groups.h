// Ranks in threads that exchange between devices, and random exchanges of groups that overlap.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/whale_ops/core/core_test.h"
#include "whale_ops/core/device/device_rank.h"
#include "whale_ops/core/progress/engine.h"
#include "whale_ops/core/transport/in_process.h"

namespace {

using whale::DeviceOperation;
using whale::OpKind;

constexpr int kOperations = 3;       // operations of one order
constexpr int kUnderWay = 40;        // orders, before all ranks wait for them
constexpr size_t kBufferBytes = 64;  // most all-reduces travel in parts

// Ranks in threads, with a device each.
class Ranks {
 public:
  // `ordinal_of`: the device of a rank.
  Ranks(const std::string& name, int size, const whale::DevicePlugin& plugin, const char* transport,
        int (*ordinal_of)(int rank), size_t buffer_bytes = kBufferBytes)
      : name_(name) {
    require(whale::Engine::instance()
                .add(name, whale::make_in_process_transports(size), &endpoints_)
                .ok(),
            name);
    each([&](int rank) {
      // Every third rank of those whose exchanges go through the host has no device.
      const bool none = std::strcmp(transport, whale::kPinned) == 0 && rank % 3 == 1;
      const whale::Status opened =
          whale::DeviceRank::open(endpoints_[static_cast<size_t>(rank)], none ? nullptr : &plugin,
                                  transport, ordinal_of(rank), buffer_bytes);
      require(opened.ok(), "a device opens: " + opened.message);
    });
  }
  ~Ranks() {
    each([&](int rank) { whale::DeviceRank::close(endpoint(rank)); });
    for (const auto& endpoint : endpoints_) {
      whale::Engine::instance().forget(*endpoint);
      endpoint->leave();
    }
  }
  template <typename Body>
  void each(const Body& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < static_cast<int>(endpoints_.size()); ++rank)
      threads.emplace_back([&body, rank] { body(rank); });
    for (auto& thread : threads) thread.join();
  }
  whale::Endpoint& endpoint(int rank) { return *endpoints_[static_cast<size_t>(rank)]; }
  std::shared_ptr<whale::DeviceRank> device(int rank) {
    whale::Status status;
    return whale::DeviceRank::find(name_, rank, &status);
  }

 private:
  const std::string name_;
  std::vector<std::shared_ptr<whale::Endpoint>> endpoints_;
};

// Waits until something has been done so often.
class Count {
 public:
  void up() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++count_;
    changed_.notify_all();
  }
  void wait(int count, double timeout_s) {
    std::unique_lock<std::mutex> lock(mutex_);
    require(changed_.wait_for(lock, std::chrono::duration<double>(timeout_s),
                              [&] { return count_ >= count; }),
            "devices end in time");
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
};

// An exchange of random kind, group and sizes: the same on every rank that makes it of the same
// seed.
struct Exchange {
  OpKind kind = OpKind::kAllReduce;
  std::vector<int> group;
  int count = 0, root = 0, seed = 0, number = 0;  // of its order among those under way

  static Exchange make(std::mt19937* draw, int size) {
    const auto below = [draw](int end) {
      return static_cast<int>((*draw)() % static_cast<unsigned>(end));
    };
    Exchange made;
    made.kind = static_cast<OpKind>(below(6));
    made.group.resize(static_cast<size_t>(size));
    std::iota(made.group.begin(), made.group.end(), 0);
    std::shuffle(made.group.begin(), made.group.end(), *draw);
    made.group.resize(static_cast<size_t>(made.kind == OpKind::kSend ? 2 : 2 + below(size - 1)));
    made.count = below(12);
    made.root = below(static_cast<int>(made.group.size()));
    made.seed = below(1000);
    return made;
  }
  int size() const { return static_cast<int>(group.size()); }
  int index_of(int rank) const {
    return static_cast<int>(std::find(group.begin(), group.end(), rank) - group.begin());
  }
  int64_t part(int of) const { return count + of; }
  int64_t moved(int from, int to) const { return (from * 3 + to * 2 + seed) % 4; }  // AllToAll
  // The i-th value that a member has.
  double value(int member, int64_t i) const {
    return seed + 1000.0 * group[static_cast<size_t>(member)] + static_cast<double>(i);
  }
  double sum(int64_t i) const {
    double total = 0;
    for (int member = 0; member < size(); ++member) total += value(member, i);
    return total;
  }
  std::string key() const {
    return "exchange " + std::to_string(static_cast<int>(kind)) + " of order " +
           std::to_string(number) + ", " + whale::join_ranks(group);
  }
};

// A rank's side of it: its values, what it must have in the end, and what it has.
struct Side {
  std::vector<double> input, wanted, output;
  DeviceOperation what;

  Side(const Exchange& x, int rank) {
    const int own = x.index_of(rank);
    what.kind = x.kind == OpKind::kSend && own == 1 ? OpKind::kRecv : x.kind;
    what.group = x.group;
    what.index = own;
    what.root = x.root;
    what.dtype = what.wire = whale::DType::kFloat64;
    what.element_bytes = sizeof(double);
    int64_t inputs = x.count;
    const auto want = [&](int member, int64_t begin, int64_t count) {
      for (int64_t i = 0; i < count; ++i)
        wanted.push_back(member < 0 ? x.sum(begin + i) : x.value(member, begin + i));
    };
    for (int member = 0; member < x.size(); ++member) {
      if (x.kind == OpKind::kAllToAll) what.counts.push_back(x.moved(own, member));
      if (x.kind == OpKind::kAllToAll) what.recv_counts.push_back(x.moved(member, own));
      if (x.kind == OpKind::kAllGather || x.kind == OpKind::kReduceScatter)
        what.counts.push_back(x.part(member));
    }
    what.largest = 3;
    switch (x.kind) {
      case OpKind::kAllReduce: want(-1, 0, inputs); break;
      case OpKind::kBroadcast: want(x.root, 0, inputs); break;
      case OpKind::kAllGather:
        inputs = x.part(own);
        for (int member = 0; member < x.size(); ++member) want(member, 0, x.part(member));
        break;
      case OpKind::kReduceScatter:
        inputs = std::accumulate(what.counts.begin(), what.counts.end(), int64_t{0});
        want(-1, whale::offsets_of(what.counts)[static_cast<size_t>(own)], x.part(own));
        break;
      case OpKind::kAllToAll:
        inputs = std::accumulate(what.counts.begin(), what.counts.end(), int64_t{0});
        for (int member = 0; member < x.size(); ++member) {
          int64_t before = 0;
          for (int to = 0; to < own; ++to) before += x.moved(member, to);
          want(member, before, x.moved(member, own));
        }
        break;
      default:
        if (own == 1) want(0, 0, inputs);
        if (own == 1) inputs = 0;
    }
    for (int64_t i = 0; i < inputs; ++i) input.push_back(x.value(own, i));
    output.resize(wanted.size());
    const int64_t count = x.kind == OpKind::kSend ? x.count : inputs;
    what.tensors = {{input.data(), output.data(), count}};
  }
};

// An exchange that a rank has under way, or will have.
struct Flight {
  Exchange exchange;
  std::unique_ptr<Side> side;
  Flight* next = nullptr;  // ready when this has ended
  bool waits = false;
};
using Step = std::function<void()>;

// Every rank has the operations of each order ready in an order of its own, and some only after
// others have ended; orders overlap. Other ranks may do the same in any order that is possible at
// all: by their numbers. `start(flight, next, ended)` starts it; `next` is called when what waits
// for it may start, and `ended`, after that, when it has ended.
template <typename Start>
void in_random_orders(int rank, int size, int orders, unsigned seed, const Start& start) {
  // What is exchanged, and when it is ready.
  std::mt19937 shared(1 + seed), own(static_cast<unsigned>(rank) + 1000 * seed);
  for (int done = 0; done < orders; done += kUnderWay) {
    std::vector<std::vector<Flight>> rounds(
        static_cast<size_t>(std::min(kUnderWay, orders - done)));
    Count ended;
    int expected = 0;
    std::function<void(Flight*)> begin = [&](Flight* flight) {
      const auto next = [&begin, flight] {
        if (flight->next != nullptr) begin(flight->next);
      };
      start(*flight, next, [&ended] { ended.up(); });
    };
    int number = 0;
    for (auto& round : rounds) {
      ++number;
      for (int i = 0; i < kOperations; ++i) {
        Exchange made = Exchange::make(&shared, size);
        made.number = number;
        const bool again = std::any_of(round.begin(), round.end(), [&](const Flight& other) {
          return other.exchange.key() == made.key();
        });
        // Under one key the first that is ready is the first everywhere.
        if (made.index_of(rank) == made.size() || again) continue;
        round.push_back({made, std::make_unique<Side>(made, rank)});
      }
      for (size_t i = 0; i + 1 < round.size(); ++i) {
        if (own() % 3 != 0) continue;
        round[i].next = &round[i + 1];
        round[i + 1].waits = true;
      }
      expected += static_cast<int>(round.size());
    }
    for (auto& round : rounds) {
      std::vector<Flight*> ready;
      for (Flight& flight : round) ready.push_back(&flight);
      std::shuffle(ready.begin(), ready.end(), own);
      for (Flight* flight : ready) {
        if (!flight->waits) begin(flight);
      }
    }
    ended.wait(expected, kTimeoutS);
  }
}

}  // namespace
