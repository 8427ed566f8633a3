#include "algorithms.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace whale {
namespace {

constexpr int64_t kSmallBytes = 64 << 10;    // all-gather, reduce-scatter below this: one exchange
constexpr int64_t kChunkBytes = 256 << 10;   // fits the second-level cache, large enough to amortise a message
constexpr int64_t kMaxLanes = 4;             // chunks in flight
constexpr int kPeersPerStep = 16;            // all-to-all: peers addressed at once

uint32_t message_id(int64_t lane, size_t step) { return static_cast<uint32_t>(lane << 24) | static_cast<uint32_t>(step); }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

std::vector<int64_t> offsets_of(const std::vector<int64_t>& counts) {
  std::vector<int64_t> offsets(counts.size() + 1, 0);
  std::partial_sum(counts.begin(), counts.end(), offsets.begin() + 1);
  return offsets;
}

// Divides the elements of every block into `chunks` parts; chunk c is then the same part of each block.
struct Chunking {
  std::vector<int64_t> offsets;  // of the blocks, one more than blocks
  int64_t chunks = 1;
  int64_t lanes = 1;
  int64_t slot = 0;  // largest chunk, elements

  Chunking(const std::vector<int64_t>& counts, int64_t element_bytes) : offsets(offsets_of(counts)) {
    const int64_t largest = *std::max_element(counts.begin(), counts.end());
    chunks = std::max<int64_t>(1, ceil_div(largest * element_bytes, kChunkBytes));
    lanes = std::min(chunks, kMaxLanes);
    slot = ceil_div(largest, chunks);
  }
  int64_t count(int block, int64_t chunk) const { return begin(block, chunk + 1) - begin(block, chunk); }
  // Position of the chunk relative to its block.
  int64_t begin(int block, int64_t chunk) const {
    const int64_t n = offsets[block + 1] - offsets[block];
    return std::min(n, chunk * ceil_div(n, chunks));
  }
  Slice slice(Buffer buffer, int64_t base, int block, int64_t chunk) const {
    return {buffer, base + begin(block, chunk), count(block, chunk)};
  }
  Slice global(Buffer buffer, int block, int64_t chunk) const { return slice(buffer, offsets[block], block, chunk); }
};

// The last rank of the ring to add to block r is rank r, which keeps the result. Partial sums travel through two scratch
// slots, so the input is never written. Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009.
void ring_reduce_scatter(const Problem& p, const Chunking& c, int64_t lane_index, int64_t chunk, int64_t output_base, Lane* lane) {
  const int right = (p.rank + 1) % p.size;
  const int left = (p.rank + p.size - 1) % p.size;
  const int64_t scratch = lane_index * 2 * c.slot;
  for (int k = 0; k + 1 < p.size; ++k) {
    const int send_block = (p.rank - k - 1 + p.size) % p.size;
    const int recv_block = (p.rank - k - 2 + 2 * p.size) % p.size;
    const Slice arriving{Buffer::kScratch, scratch + (k % 2) * c.slot, c.count(recv_block, chunk)};
    const Slice leaving = k == 0 ? c.global(Buffer::kInput, send_block, chunk)
                                 : Slice{Buffer::kScratch, scratch + ((k + 1) % 2) * c.slot, c.count(send_block, chunk)};
    const bool last = k + 2 == p.size;
    const Slice dst = last ? c.slice(Buffer::kOutput, output_base, recv_block, chunk) : arriving;
    const uint32_t id = message_id(lane_index, lane->size());
    lane->push_back({{{right, id, leaving}}, {{left, id, arriving}}, {{dst, {arriving, c.global(Buffer::kInput, recv_block, chunk)}}}});
  }
}

void ring_all_gather(const Problem& p, const Chunking& c, int64_t lane_index, int64_t chunk, Lane* lane) {
  const int right = (p.rank + 1) % p.size;
  const int left = (p.rank + p.size - 1) % p.size;
  for (int k = 0; k + 1 < p.size; ++k) {
    const int send_block = (p.rank - k + p.size) % p.size;
    const int recv_block = (p.rank - k - 1 + p.size) % p.size;
    const uint32_t id = message_id(lane_index, lane->size());
    lane->push_back({{{right, id, c.global(Buffer::kOutput, send_block, chunk)}},
                     {{left, id, c.global(Buffer::kOutput, recv_block, chunk)}},
                     {}});
  }
}

// Every rank receives all parts of its own block and adds them in rank order: the bytes of the ring in one step.
void direct_reduce_scatter(const Problem& p, const Chunking& c, int64_t lane_index, int64_t chunk, int64_t output_base, Lane* lane) {
  const uint32_t id = message_id(lane_index, lane->size());
  Step step;
  Local sum{c.slice(Buffer::kOutput, output_base, p.rank, chunk), {}};
  for (int i = 0; i < p.size; ++i) {
    const Slice part = i == p.rank ? c.global(Buffer::kInput, p.rank, chunk)
                                   : Slice{Buffer::kScratch, (lane_index * p.size + i) * c.slot, c.count(p.rank, chunk)};
    sum.sources.push_back(part);
  }
  for (int k = 1; k < p.size; ++k) {
    const int to = (p.rank + k) % p.size;
    const int from = (p.rank - k + p.size) % p.size;
    step.sends.push_back({to, id, c.global(Buffer::kInput, to, chunk)});
    step.recvs.push_back({from, id, sum.sources[from]});
  }
  step.locals.push_back(std::move(sum));
  lane->push_back(std::move(step));
}

void direct_all_gather(const Problem& p, const Chunking& c, int64_t lane_index, int64_t chunk, Lane* lane) {
  const uint32_t id = message_id(lane_index, lane->size());
  Step step;
  for (int k = 1; k < p.size; ++k) {
    const int to = (p.rank + k) % p.size;
    const int from = (p.rank - k + p.size) % p.size;
    step.sends.push_back({to, id, c.global(Buffer::kOutput, p.rank, chunk)});
    step.recvs.push_back({from, id, c.global(Buffer::kOutput, from, chunk)});
  }
  lane->push_back(std::move(step));
}

Step copy_step(Slice dst, Slice src) { return {{}, {}, {{dst, {src}}}}; }

// Each step halves the part of the chunk that a rank adds up, with a partner half as far away; then the parts come together
// again the other way. Thakur et al., "Optimization of collective communication operations in MPICH", 2005, section 4.4.
void halving_doubling(const Problem& p, const Chunking& c, int64_t lane_index, int64_t chunk, Lane* lane) {
  const int64_t base = c.begin(0, chunk), n = c.count(0, chunk);
  const auto part = [&](Buffer buffer, int first, int blocks) {
    const int64_t begin = n * first / p.size, end = n * (first + blocks) / p.size;
    return Slice{buffer, base + begin, end - begin};
  };
  int first = 0;  // of the blocks that this rank still adds up
  for (int blocks = p.size / 2; blocks >= 1; blocks /= 2) {
    const int partner = p.rank ^ blocks;
    const int kept = p.rank & blocks ? first + blocks : first;
    const int given = p.rank & blocks ? first : first + blocks;
    const Buffer sum = blocks == p.size / 2 ? Buffer::kInput : Buffer::kOutput;
    const uint32_t id = message_id(lane_index, lane->size());
    const Slice arriving{Buffer::kScratch, lane_index * c.slot, part(sum, kept, blocks).count};
    lane->push_back({{{partner, id, part(sum, given, blocks)}},
                     {{partner, id, arriving}},
                     {{part(Buffer::kOutput, kept, blocks), {part(sum, kept, blocks), arriving}}}});
    first = kept;
  }
  for (int blocks = 1; blocks < p.size; blocks *= 2) {
    const int partner = p.rank ^ blocks;
    const int theirs = p.rank & blocks ? first - blocks : first + blocks;
    const uint32_t id = message_id(lane_index, lane->size());
    lane->push_back({{{partner, id, part(Buffer::kOutput, first, blocks)}}, {{partner, id, part(Buffer::kOutput, theirs, blocks)}}, {}});
    first = std::min(first, theirs);
  }
}

// Sums go up a binomial tree to the first rank, and the result comes down again.
void tree(const Problem& p, const Chunking& c, int64_t lane_index, int64_t chunk, Lane* lane) {
  const auto round = static_cast<size_t>(chunk / c.lanes);
  const uint32_t up = message_id(lane_index, 2 * round), down = message_id(lane_index, 2 * round + 1);
  const Slice input = c.global(Buffer::kInput, 0, chunk), output = c.global(Buffer::kOutput, 0, chunk);
  const Slice arriving{Buffer::kScratch, lane_index * c.slot, input.count};
  Slice sum = input;
  int distance = 1;
  for (; distance < p.size && (p.rank & distance) == 0; distance *= 2) {
    if (p.rank + distance >= p.size) continue;
    lane->push_back({{}, {{p.rank + distance, up, arriving}}, {{output, {sum, arriving}}}});
    sum = output;
  }
  if (p.rank != 0) {
    lane->push_back({{{p.rank - distance, up, sum}}, {}, {}});
    lane->push_back({{}, {{p.rank - distance, down, output}}, {}});
  }
  Step forward;
  for (distance /= 2; distance >= 1; distance /= 2) {
    if (p.rank + distance < p.size) forward.sends.push_back({p.rank + distance, down, output});
  }
  lane->push_back(std::move(forward));
}

// Seconds until a message is seen, seconds of handling one, and bytes per second of one rank: estimates for ranks of one
// machine, and for machines on Ethernet of 10 Gbit/s. They only have to rank the algorithms.
struct Costs {
  double step_s, message_s, bytes_per_s;
};
constexpr Costs kMemory{10e-6, 3e-6, 8e9};
constexpr Costs kNetwork{30e-6, 5e-6, 1.2e9};

Schedule direct_all_reduce(const Problem& p) {
  const int64_t n = p.counts[0];
  Step step;
  Local sum{{Buffer::kOutput, 0, n}, {}};
  for (int i = 0; i < p.size; ++i) {
    sum.sources.push_back(i == p.rank ? Slice{Buffer::kInput, 0, n} : Slice{Buffer::kScratch, i * n, n});
    if (i == p.rank) continue;
    step.sends.push_back({i, 0, {Buffer::kInput, 0, n}});
    step.recvs.push_back({i, 0, {Buffer::kScratch, i * n, n}});
  }
  step.locals.push_back(std::move(sum));
  return {name_of(Algorithm::kDirect), {{std::move(step)}}, n * p.size};
}

// In the order in which they are preferred where they take the same time.
constexpr Algorithm kAllReduces[] = {Algorithm::kDirect, Algorithm::kPairwise, Algorithm::kRing, Algorithm::kHalvingDoubling,
                                     Algorithm::kTree};

Algorithm choose(const Problem& p) {
  if (p.algorithm != Algorithm::kAuto && std::isfinite(all_reduce_s(p, p.algorithm))) return p.algorithm;
  return *std::min_element(std::begin(kAllReduces), std::end(kAllReduces),
                           [&](Algorithm a, Algorithm b) { return all_reduce_s(p, a) < all_reduce_s(p, b); });
}

Schedule all_reduce(const Problem& p) {
  const int64_t n = p.counts[0];
  if (p.size == 1) return {"copy", {{copy_step({Buffer::kOutput, 0, n}, {Buffer::kInput, 0, n})}}, 0};
  const Algorithm algorithm = choose(p);
  if (algorithm == Algorithm::kDirect) return direct_all_reduce(p);
  const bool whole = algorithm == Algorithm::kTree || algorithm == Algorithm::kHalvingDoubling;
  std::vector<int64_t> blocks(whole ? 1 : p.size, n);
  for (int i = 0; !whole && i < p.size; ++i) blocks[i] = n / p.size + (i < n % p.size ? 1 : 0);
  const Chunking c(blocks, p.element_bytes);
  Schedule schedule{name_of(algorithm), std::vector<Lane>(c.lanes), 0};
  schedule.scratch_count = c.lanes * c.slot * (whole ? 1 : algorithm == Algorithm::kPairwise ? p.size : 2);
  for (int64_t chunk = 0; chunk < c.chunks; ++chunk) {
    const int64_t index = chunk % c.lanes;
    Lane* lane = &schedule.lanes[index];
    if (algorithm == Algorithm::kPairwise) {
      direct_reduce_scatter(p, c, index, chunk, c.offsets[p.rank], lane);
      direct_all_gather(p, c, index, chunk, lane);
    } else if (algorithm == Algorithm::kRing) {
      ring_reduce_scatter(p, c, index, chunk, c.offsets[p.rank], lane);
      ring_all_gather(p, c, index, chunk, lane);
    } else if (algorithm == Algorithm::kTree) {
      tree(p, c, index, chunk, lane);
    } else {
      halving_doubling(p, c, index, chunk, lane);
    }
  }
  return schedule;
}

Schedule reduce_scatter(const Problem& p) {
  const Chunking c(p.counts, p.element_bytes);
  if (p.size == 1) return {"copy", {{copy_step({Buffer::kOutput, 0, p.counts[0]}, {Buffer::kInput, 0, p.counts[0]})}}, 0};
  const bool direct = p.narrow_float || c.offsets.back() * p.element_bytes <= kSmallBytes;
  Schedule schedule{direct ? "direct" : "ring", std::vector<Lane>(c.lanes), c.lanes * c.slot * (direct ? p.size : 2)};
  for (int64_t chunk = 0; chunk < c.chunks; ++chunk) {
    const int64_t index = chunk % c.lanes;
    if (direct) {
      direct_reduce_scatter(p, c, index, chunk, 0, &schedule.lanes[index]);
    } else {
      ring_reduce_scatter(p, c, index, chunk, 0, &schedule.lanes[index]);
    }
  }
  return schedule;
}

Schedule all_gather(const Problem& p) {
  const Chunking c(p.counts, p.element_bytes);
  const bool direct = p.size <= 2 || c.offsets.back() * p.element_bytes <= kSmallBytes;
  Schedule schedule{direct ? "direct" : "ring", std::vector<Lane>(c.lanes), 0};
  for (int64_t chunk = 0; chunk < c.chunks; ++chunk) {
    const int64_t index = chunk % c.lanes;
    Lane* lane = &schedule.lanes[index];
    lane->push_back(copy_step(c.global(Buffer::kOutput, p.rank, chunk), c.slice(Buffer::kInput, 0, p.rank, chunk)));
    if (p.size == 1) continue;
    if (direct) {
      direct_all_gather(p, c, index, chunk, lane);
    } else {
      ring_all_gather(p, c, index, chunk, lane);
    }
  }
  return schedule;
}

Schedule all_to_all(const Problem& p) {
  const auto to_offsets = offsets_of(p.counts);
  const auto from_offsets = offsets_of(p.recv_counts);
  Lane lane{copy_step({Buffer::kOutput, from_offsets[p.rank], p.recv_counts[p.rank]},
                      {Buffer::kInput, to_offsets[p.rank], p.counts[p.rank]})};
  for (int k = 1; k < p.size; ++k) {
    const int to = (p.rank + k) % p.size;
    const int from = (p.rank - k + p.size) % p.size;
    if ((k - 1) % kPeersPerStep == 0) lane.emplace_back();
    lane.back().sends.push_back({to, 0, {Buffer::kInput, to_offsets[to], p.counts[to]}});
    lane.back().recvs.push_back({from, 0, {Buffer::kOutput, from_offsets[from], p.recv_counts[from]}});
  }
  return {"pairwise", {std::move(lane)}, 0};
}

// Binomial tree; the chunks of a large tensor follow each other down the tree.
Schedule broadcast(const Problem& p) {
  const Chunking c({p.counts[0]}, p.element_bytes);
  const int position = (p.rank - p.root + p.size) % p.size;
  Schedule schedule{"binomial tree", std::vector<Lane>(c.lanes), 0};
  const Buffer source = position == 0 ? Buffer::kInput : Buffer::kOutput;
  int children_below = 1;  // children are position + 1, 2, 4, ... below the position's lowest set bit
  while (children_below < p.size && (position & children_below) == 0) children_below *= 2;
  for (int64_t chunk = 0; chunk < c.chunks; ++chunk) {
    const int64_t index = chunk % c.lanes;
    Lane* lane = &schedule.lanes[index];
    const uint32_t id = message_id(index, static_cast<size_t>(chunk / c.lanes));
    if (position == 0) {
      lane->push_back(copy_step(c.global(Buffer::kOutput, 0, chunk), c.global(Buffer::kInput, 0, chunk)));
    } else {
      const int parent = (position - (position & -position) + p.root) % p.size;
      lane->push_back({{}, {{parent, id, c.global(Buffer::kOutput, 0, chunk)}}, {}});
    }
    Step forward;
    for (int distance = children_below / 2; distance >= 1; distance /= 2) {
      if (position + distance >= p.size) continue;
      forward.sends.push_back({(position + distance + p.root) % p.size, id, c.global(source, 0, chunk)});
    }
    lane->push_back(std::move(forward));
  }
  return schedule;
}

// Dissemination barrier: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988.
Schedule barrier(const Problem& p) {
  Lane lane;
  for (int distance = 1; distance < p.size; distance *= 2) {
    const uint32_t id = message_id(0, lane.size());
    lane.push_back({{{(p.rank + distance) % p.size, id, {}}}, {{(p.rank - distance + p.size) % p.size, id, {}}}, {}});
  }
  return {"dissemination", {std::move(lane)}, 0};
}

}  // namespace

const char* name_of(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kAuto: return "auto";
    case Algorithm::kDirect: return "direct";
    case Algorithm::kPairwise: return "pairwise";
    case Algorithm::kRing: return "ring";
    case Algorithm::kHalvingDoubling: return "halving-doubling";
    case Algorithm::kTree: return "tree";
  }
  return "unknown algorithm";
}

// The alpha-beta formulas of cost_model/collectives.py, with what each message costs a rank, since one thread handles all.
double all_reduce_s(const Problem& p, Algorithm algorithm) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  const Costs& costs = p.one_machine ? kMemory : kNetwork;
  const double others = p.size - 1, rounds = std::ceil(std::log2(p.size));
  const double all_s = static_cast<double>(p.counts[0] * p.element_bytes) / costs.bytes_per_s;
  const double parts_s = 2 * others / p.size * all_s;
  const bool power_of_two = (p.size & (p.size - 1)) == 0;
  switch (algorithm) {
    // Each rank adds all of it, once it has arrived; the others add their part of one block while the next one arrives.
    case Algorithm::kDirect: return costs.step_s + others * (costs.message_s + 2 * all_s);
    case Algorithm::kPairwise:
      // Between machines as many flows as ranks meet at each receiver: they get less of its link than one after the other.
      return 2 * (costs.step_s + others * costs.message_s) + (p.one_machine || p.size == 2 ? 1.0 : 1.2) * parts_s;
    case Algorithm::kRing:
      return p.narrow_float ? kNever : 2 * others * (costs.step_s + costs.message_s) + parts_s;
    case Algorithm::kHalvingDoubling:
      return p.narrow_float || !power_of_two ? kNever : 2 * rounds * (costs.step_s + costs.message_s) + parts_s;
    case Algorithm::kTree: return p.narrow_float ? kNever : 2 * rounds * (costs.step_s + costs.message_s + all_s);
    case Algorithm::kAuto: break;
  }
  return kNever;
}

Schedule make_schedule(const Problem& p) {
  switch (p.kind) {
    case OpKind::kAllReduce: return all_reduce(p);
    case OpKind::kAllGather: return all_gather(p);
    case OpKind::kReduceScatter: return reduce_scatter(p);
    case OpKind::kAllToAll: return all_to_all(p);
    case OpKind::kBroadcast: return broadcast(p);
    case OpKind::kSend: return {"point to point", {{{{{p.root, 0, {Buffer::kInput, 0, p.counts[0]}}}, {}, {}}}}, 0};
    case OpKind::kRecv: return {"point to point", {{{{}, {{p.root, 0, {Buffer::kOutput, 0, p.counts[0]}}}, {}}}}, 0};
    case OpKind::kBarrier: return barrier(p);
  }
  return {};
}

int64_t logical_bytes(const Problem& p) {
  const int64_t others = p.size - 1;
  switch (p.kind) {
    case OpKind::kAllReduce: {
      // 2(p-1)T shared out so that the parts add up exactly.
      const int64_t total = 2 * others * p.counts[0] * p.element_bytes;
      return total / p.size + (p.rank < total % p.size ? 1 : 0);
    }
    case OpKind::kAllGather:
    case OpKind::kReduceScatter: return others * p.counts[p.rank] * p.element_bytes;
    case OpKind::kAllToAll: {
      const int64_t total = std::accumulate(p.counts.begin(), p.counts.end(), int64_t{0});
      return (total - p.counts[p.rank]) * p.element_bytes;
    }
    case OpKind::kBroadcast: return p.rank == p.root ? others * p.counts[0] * p.element_bytes : 0;
    case OpKind::kSend: return p.counts[0] * p.element_bytes;
    case OpKind::kRecv:
    case OpKind::kBarrier: return 0;
  }
  return 0;
}

}  // namespace whale
