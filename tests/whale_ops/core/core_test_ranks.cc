// Ranks as threads over the in-process transport: sums, and ranks that disagree or stop.
#include <string>
#include <thread>
#include <vector>

#include "tests/whale_ops/core/core_test.h"
#include "whale_ops/core/base/types.h"
#include "whale_ops/core/c_api/c_api.h"

namespace {

using whale::Code;
using whale::OpKind;

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
    for (size_t rank = 0; rank < handles_.size(); ++rank)
      threads.emplace_back(body, static_cast<int>(rank), handles_[rank]);
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

}  // namespace

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
        const int sum_of_ranks = size * (size - 1) / 2;
        const auto expected = static_cast<float>(sum_of_ranks + size * index);
        for (const float value : values[index])
          require(value == expected, "the sum over the ranks");
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
    require(std::string(whale_last_error()).find("'k'") != std::string::npos,
            "which names the operation");
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
