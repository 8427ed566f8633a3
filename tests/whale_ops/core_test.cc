// The core without Python: schedules whose messages fit together, and ranks as threads. Bazel runs it, also under the
// thread and the address sanitizer (bazel test --config=tsan //tests:core_cc_test).
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "whale_ops/core/algorithms.h"
#include "whale_ops/core/c_api.h"

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
                  int root) {
  const int size = static_cast<int>(counts.size());
  std::map<std::tuple<int, int, uint32_t>, int64_t> sent, received;
  for (int rank = 0; rank < size; ++rank) {
    whale::Problem problem;
    problem.kind = kind;
    problem.rank = rank;
    problem.size = size;
    problem.root = root;
    problem.element_bytes = 4;
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
    require(whale_in_process_create(name, size, handles_.data()) == 0, whale_last_error());
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

}  // namespace

int main() {
  schedules();
  for (const int size : {1, 2, 3, 5}) sums(size);
  disagreement();
  abort_while_waiting();
  whale_stop();
  std::puts("core: all well");
}
