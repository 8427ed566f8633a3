// Building blocks of the collectives' schedules.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "whale_ops/core/collective/algorithms.h"

namespace whale {

// A chunk fits into the second-level cache, and is large enough to amortise a message.
constexpr int64_t kChunkBytes = 256 << 10;
// Chunks in flight. Between hosts as many as fill a link of 1 Gbit/s with a round trip of 20 ms.
constexpr int64_t kMaxLanes = 4, kMaxLanesBetweenHosts = 16;

inline uint32_t message_id(int64_t lane, size_t step) {
  return static_cast<uint32_t>(lane << 24) | static_cast<uint32_t>(step);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline std::vector<int64_t> offsets_of(const std::vector<int64_t>& counts) {
  std::vector<int64_t> offsets(counts.size() + 1, 0);
  std::partial_sum(counts.begin(), counts.end(), offsets.begin() + 1);
  return offsets;
}

// Divides the elements of every block into `chunks` parts; chunk c consists of the c-th part of
// each block.
struct Chunking {
  std::vector<int64_t> offsets;  // where each block begins, and the end of the last one
  int64_t chunks = 1;
  int64_t lanes = 1;
  int64_t slot = 0;  // elements of the largest chunk

  Chunking(const std::vector<int64_t>& counts, int64_t element_bytes, int64_t max_lanes = kMaxLanes)
      : offsets(offsets_of(counts)) {
    const int64_t largest = *std::max_element(counts.begin(), counts.end());
    chunks = std::max<int64_t>(1, ceil_div(largest * element_bytes, kChunkBytes));
    lanes = std::min(chunks, max_lanes);
    slot = ceil_div(largest, chunks);
  }
  int64_t count(int block, int64_t chunk) const {
    return begin(block, chunk + 1) - begin(block, chunk);
  }
  // Where the chunk begins within its block.
  int64_t begin(int block, int64_t chunk) const {
    const int64_t n = offsets[block + 1] - offsets[block];
    return std::min(n, chunk * ceil_div(n, chunks));
  }
  Slice slice(Buffer buffer, int64_t base, int block, int64_t chunk) const {
    return {buffer, base + begin(block, chunk), count(block, chunk)};
  }
  Slice global(Buffer buffer, int block, int64_t chunk) const {
    return slice(buffer, offsets[block], block, chunk);
  }
};

inline Step copy_step(Slice dst, Slice src) { return {{}, {}, {{dst, {src}}}}; }

// Each appends one chunk's part of a collective to the lane.
void ring_reduce_scatter(const Problem& p, const Chunking& c, int64_t lane_index, int64_t chunk,
                         int64_t output_base, Lane* lane);
void ring_all_gather(const Problem& p, const Chunking& c, int64_t lane_index, int64_t chunk,
                     Lane* lane);
// Every rank receives all parts of its own block and adds them in rank order: the same bytes as
// with a ring, in one step.
void direct_reduce_scatter(const Problem& p, const Chunking& c, int64_t lane_index, int64_t chunk,
                           int64_t output_base, Lane* lane);
void direct_all_gather(const Problem& p, const Chunking& c, int64_t lane_index, int64_t chunk,
                       Lane* lane);

Schedule all_reduce(const Problem& p);

// Default for ranks of one machine, which exchange through memory.
constexpr Costs kMemory{10e-6, 3e-6, 8e9};

// The ranks of a problem, by host.
struct Hosts {
  explicit Hosts(const Problem& p);
  std::vector<std::vector<int>> members;  // of each host, in rank order
  std::vector<int> of;                    // each rank's host
  size_t most = 1, least = 1;             // the most and the fewest ranks that a host has

  int count() const { return static_cast<int>(members.size()); }
  int64_t max_lanes() const { return count() > 1 ? kMaxLanesBetweenHosts : kMaxLanes; }
};

// Two-level all-reduce. Ranks of a host add up what they have through memory; `owners` ranks of
// each host, each with a block of its own, then add up between hosts; the other ranks get the
// result from them. As many owners as the smallest host has ranks keep all ranks busy; one owner,
// the host's leader, needs fewer messages.
Schedule hierarchical(const Problem& p, Algorithm algorithm);
double hierarchical_s(const Problem& p, const Hosts& hosts, Algorithm algorithm);

// Ways of all-gathers and reduce-scatters: a rank exchanges with all others, with the next one in a
// ring, or with one rank of each other host.
enum class BlockWay : uint8_t { kDirect, kRing, kHierarchical };
Schedule hierarchical_all_gather(const Problem& p, const Hosts& hosts);
Schedule hierarchical_reduce_scatter(const Problem& p, const Hosts& hosts);
double blocks_s(const Problem& p, const Hosts& hosts, BlockWay way);

// All-to-all between hosts: `packed` sends one message to one rank of each other host, else one to
// every rank.
Schedule packed_all_to_all(const Problem& p, const Hosts& hosts);
double all_to_all_s(const Problem& p, const Hosts& hosts, bool packed);

}  // namespace whale
