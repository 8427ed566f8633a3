// Blocks of memory that threads take and give back.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "tests/whale_ops/core/core_test.h"
#include "whale_ops/core/transport/block_heap.h"

namespace {

using std::chrono::milliseconds;
using whale::BlockHeap;

constexpr size_t kPage = 4096, kAll = 1 << 20;

// One piece of memory, handed out front to back; every fourth piece does not follow the one before.
class Range {
 public:
  void* take(size_t bytes) {
    if (++pieces_ % 4 == 0) taken_ += kPage;
    if (taken_ + bytes > 2 * kAll) return nullptr;
    taken_ += bytes;
    return begin() + taken_ - bytes;
  }
  char* begin() { return memory_.get(); }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> memory_{static_cast<char*>(std::aligned_alloc(kPage, 2 * kAll))};
  size_t taken_ = 0;
  int pieces_ = 0;
};

// No two blocks overlap, whichever thread takes and gives them back, and all memory is whole again
// in the end.
void blocks_of_threads() {
  Range range;
  BlockHeap heap(kAll, [&range](size_t bytes) { return range.take(bytes); });
  std::atomic<int> waited{0};
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([number, &heap, &waited] {
      std::minstd_rand random(number + 1);
      std::vector<std::pair<unsigned char*, size_t>> own;
      for (int turn = 0; turn < 4000; ++turn) {
        if (own.size() < 8 && random() % 2) {
          const size_t bytes = 1 + random() % (kAll / 24);
          auto* const block = static_cast<unsigned char*>(heap.allocate(bytes, milliseconds(0)));
          waited += block == nullptr;
          if (block == nullptr) continue;
          require(reinterpret_cast<uintptr_t>(block) % BlockHeap::kAlignment == 0, "blocks align");
          std::fill_n(block, bytes, static_cast<unsigned char>(number + 1));
          own.emplace_back(block, bytes);
        } else if (!own.empty()) {
          std::swap(own[random() % own.size()], own.back());
          const auto [block, bytes] = own.back();
          require(std::all_of(block, block + bytes,
                              [number](unsigned char one) { return one == number + 1; }),
                  "no other thread has this block");
          own.pop_back();
          heap.release(block);
        }
      }
      for (const auto& [block, bytes] : own) heap.release(block);
    });
  }
  for (auto& thread : threads) thread.join();
  const BlockHeap::Statistics found = heap.statistics();
  require(found.used_bytes == 0, "every block came back");
  require(found.taken_bytes <= kAll, "the limit holds");
  require(found.most_used_bytes <= found.taken_bytes, "blocks lie in what was taken");
  require(found.largest_free_bytes > kAll / 24, "blocks that came back are joined");
}

// A block is as large as was asked for, and memory grows by what a free block at its end lacks.
void blocks_are_cut() {
  Range range;
  BlockHeap heap(kAll, [&range](size_t bytes) { return range.take(bytes); });
  void* const first = heap.allocate(3 * kPage, milliseconds(0));
  void* const second = heap.allocate(kPage, milliseconds(0));
  heap.release(second);
  require(heap.allocate(2 * kPage, milliseconds(0)) == second, "the end grows");
  require(heap.statistics().taken_bytes == 5 * kPage, "it grows by what is lacking");
  heap.release(first);
  require(heap.allocate(kPage - 100, milliseconds(0)) == first, "the free block is cut");
  char* const rest = range.begin() + kPage;
  require(heap.allocate(2 * kPage - 100, milliseconds(0)) == rest, "its rest is used");
  const BlockHeap::Statistics found = heap.statistics();
  require(found.used_bytes == 5 * kPage && found.allocations == 5, "bytes are counted");
  heap.reset_peak();
  require(heap.statistics().allocations == 0, "counts begin anew");
}

// What does not fit waits for what comes back, and no longer than it may.
void blocks_are_waited_for() {
  Range range;
  BlockHeap heap(kAll, [&range](size_t bytes) { return range.take(bytes); });
  void* const all = heap.allocate(kAll, milliseconds(0));
  require(heap.allocate(kPage, milliseconds(20)) == nullptr, "nothing is left");
  require(heap.allocate(~size_t{0}, milliseconds(0)) == nullptr, "sizes do not wrap around");
  std::thread other([&heap, all] {
    std::this_thread::sleep_for(milliseconds(50));
    heap.release(all);
  });
  require(heap.allocate(kPage, std::chrono::seconds(30)) != nullptr, "another thread's block");
  other.join();
}

}  // namespace

void blocks() {
  blocks_of_threads();
  blocks_are_cut();
  blocks_are_waited_for();
}
