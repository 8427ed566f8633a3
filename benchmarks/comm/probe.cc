// The memory traffic that no all-reduce within a machine can do without: thread r reads its share
// of every rank's tensor and writes the sum into that share of every rank's tensor. Nothing is
// copied twice, nobody waits but for the last one.
//
// And the traffic of an all-reduce between processes, whose tensors lie where only their own
// process reaches them: what goes to another rank is copied into a slot that both reach, and out of
// it. The slots stay in the caches; a thread waits for nothing but for a slot's content. (Here they
// are threads of one process, which keep to that by themselves.)
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kBlock = 4096;  // elements

struct Memory {
  std::vector<float*> tensors;
  int64_t elements = 0;

  void hold(int ranks, int64_t wanted) {
    if (wanted == elements && static_cast<int>(tensors.size()) == ranks) return;
    for (float* tensor : tensors) std::free(tensor);
    tensors.clear();
    elements = wanted;
    for (int r = 0; r < ranks; ++r) {
      tensors.push_back(static_cast<float*>(
          std::aligned_alloc(64, static_cast<size_t>((wanted * 4 + 63) / 64 * 64))));
      for (int64_t i = 0; i < wanted; ++i) tensors.back()[i] = 0;
    }
  }
};

void reduce(const std::vector<float*>& tensors, int64_t begin, int64_t end) {
  for (int64_t block = begin; block < end; block += kBlock) {
    const int64_t stop = block + kBlock < end ? block + kBlock : end;
    float* first = tensors[0];
    for (size_t r = 1; r < tensors.size(); ++r) {
      const float* next = tensors[r];
      for (int64_t i = block; i < stop; ++i) first[i] += next[i];
    }
    for (size_t r = 1; r < tensors.size(); ++r) {
      float* next = tensors[r];
      for (int64_t i = block; i < stop; ++i) next[i] = first[i];
    }
  }
}

// Elements of a slot: of those tried (8,192 to 65,536) the fastest.
constexpr int64_t kPart = 8192;
constexpr int kAhead = 2;  // parts between what a rank publishes, adds up and takes
// Who publishes a part has taken the sum that lay in its slot.
constexpr int kSlots = 2 * kAhead + 1;

// What one rank shows to the others.
struct Shelf {
  std::vector<float> inputs[kSlots];  // a part of each rank's share, one behind the other
  std::vector<float> sums[kSlots];    // a part of its own share
  alignas(64) std::atomic<int64_t> published{0};
  alignas(64) std::atomic<int64_t> summed{0};
};

void wait_for(const std::atomic<int64_t>& count, int64_t least) {
  while (count.load(std::memory_order_acquire) < least) std::this_thread::yield();
}

void exchange(float* tensor, int rank, int64_t elements, std::vector<Shelf>& shelves,
              int64_t before) {
  const int ranks = static_cast<int>(shelves.size());
  const int64_t share = elements / ranks, parts = (share + kPart - 1) / kPart;
  const auto begin = [&](int owner, int64_t part) { return tensor + owner * share + part * kPart; };
  const auto count = [&](int64_t part) { return std::min(kPart, share - part * kPart); };
  Shelf& mine = shelves[rank];
  for (int64_t step = 0; step < parts + 2 * kAhead; ++step) {
    if (const int64_t part = step; part < parts) {
      // Who has summed a later part has read what this slot held.
      for (int r = 0; r < ranks && part >= kSlots; ++r)
        wait_for(shelves[r].summed, before + part - kSlots + 1);
      for (int r = 0; r < ranks; ++r) {
        if (r != rank)
          std::memcpy(&mine.inputs[part % kSlots][r * kPart], begin(r, part),
                      count(part) * sizeof(float));
      }
      mine.published.store(before + part + 1, std::memory_order_release);
    }
    if (const int64_t part = step - kAhead; part >= 0 && part < parts) {
      float* sum = begin(rank, part);
      for (int r = 0; r < ranks; ++r) {
        if (r == rank) continue;
        wait_for(shelves[r].published, before + part + 1);
        const float* next = &shelves[r].inputs[part % kSlots][rank * kPart];
        for (int64_t i = 0; i < count(part); ++i) sum[i] += next[i];
      }
      std::memcpy(mine.sums[part % kSlots].data(), sum, count(part) * sizeof(float));
      mine.summed.store(before + part + 1, std::memory_order_release);
    }
    if (const int64_t part = step - 2 * kAhead; part >= 0) {
      for (int r = 0; r < ranks; ++r) {
        if (r == rank) continue;
        wait_for(shelves[r].summed, before + part + 1);
        std::memcpy(begin(r, part), shelves[r].sums[part % kSlots].data(),
                    count(part) * sizeof(float));
      }
    }
  }
}

Memory memory;

// `times` all-reduces by as many threads as ranks; `body` is one, on one of them.
template <typename Body>
void run(int ranks, int64_t elements, int times, const Body& body) {
  memory.hold(ranks, elements);
  std::atomic<int64_t> arrived{0};
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      for (int round = 1; round <= times; ++round) {
        body(r, round);
        arrived.fetch_add(1);
        while (arrived.load() < static_cast<int64_t>(round) * ranks) std::this_thread::yield();
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace

extern "C" void all_reduce_limit(int ranks, int64_t elements, int times) {
  run(ranks, elements, times, [&](int r, int) {
    reduce(memory.tensors, elements * r / ranks, elements * (r + 1) / ranks);
  });
}

extern "C" void exchange_limit(int ranks, int64_t elements, int times) {
  std::vector<Shelf> shelves(ranks);
  for (Shelf& shelf : shelves) {
    for (auto& slot : shelf.inputs) slot.resize(ranks * kPart);
    for (auto& slot : shelf.sums) slot.resize(kPart);
  }
  const int64_t parts = (elements / ranks + kPart - 1) / kPart;
  run(ranks, elements, times, [&](int r, int round) {
    exchange(memory.tensors[r], r, elements, shelves, (round - 1) * parts);
  });
}
