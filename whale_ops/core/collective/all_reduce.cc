// All-reduces, with the choice of the algorithm of least predicted time.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>

#include "whale_ops/core/collective/schedules.h"

namespace whale {
namespace {

// Recursive halving and doubling: each step halves the part of the chunk that a rank adds up,
// together with a partner at half the previous distance; then the parts are gathered by the same
// steps in reverse. Thakur et al., "Optimization of collective communication operations in MPICH",
// 2005, section 4.4.
void halving_doubling(const Problem& p, const Chunking& c, int64_t lane_index, int64_t chunk,
                      Lane* lane) {
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
    lane->push_back({{{partner, id, part(Buffer::kOutput, first, blocks)}},
                     {{partner, id, part(Buffer::kOutput, theirs, blocks)}},
                     {}});
    first = std::min(first, theirs);
  }
}

// Partial sums go up a binomial tree to the first rank, and the result comes down again.
void tree(const Problem& p, const Chunking& c, int64_t lane_index, int64_t chunk, Lane* lane) {
  const auto round = static_cast<size_t>(chunk / c.lanes);
  const uint32_t up = message_id(lane_index, 2 * round),
                 down = message_id(lane_index, 2 * round + 1);
  const Slice input = c.global(Buffer::kInput, 0, chunk),
              output = c.global(Buffer::kOutput, 0, chunk);
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

Schedule direct_all_reduce(const Problem& p) {
  const int64_t n = p.counts[0];
  Step step;
  Local sum{{Buffer::kOutput, 0, n}, {}};
  for (int i = 0; i < p.size; ++i) {
    sum.sources.push_back(i == p.rank ? Slice{Buffer::kInput, 0, n}
                                      : Slice{Buffer::kScratch, i * n, n});
    if (i == p.rank) continue;
    step.sends.push_back({i, 0, {Buffer::kInput, 0, n}});
    step.recvs.push_back({i, 0, {Buffer::kScratch, i * n, n}});
  }
  step.locals.push_back(std::move(sum));
  return {name_of(Algorithm::kDirect), {{std::move(step)}}, n * p.size};
}

// All algorithms; of those that take the same time, the first one is chosen.
constexpr Algorithm kAllReduces[] = {
    Algorithm::kDirect, Algorithm::kPairwise,     Algorithm::kRing,  Algorithm::kHalvingDoubling,
    Algorithm::kTree,   Algorithm::kHierarchical, Algorithm::kLeader};

Algorithm choose(const Problem& p) {
  if (p.algorithm != Algorithm::kAuto && std::isfinite(all_reduce_s(p, p.algorithm)))
    return p.algorithm;
  return *std::min_element(
      std::begin(kAllReduces), std::end(kAllReduces),
      [&](Algorithm a, Algorithm b) { return all_reduce_s(p, a) < all_reduce_s(p, b); });
}

}  // namespace

Schedule all_reduce(const Problem& p) {
  const int64_t n = p.counts[0];
  if (p.size == 1)
    return {"copy", {{copy_step({Buffer::kOutput, 0, n}, {Buffer::kInput, 0, n})}}, 0};
  const Algorithm algorithm = choose(p);
  if (algorithm == Algorithm::kDirect) return direct_all_reduce(p);
  if (algorithm == Algorithm::kHierarchical || algorithm == Algorithm::kLeader)
    return hierarchical(p, algorithm);
  const bool whole = algorithm == Algorithm::kTree || algorithm == Algorithm::kHalvingDoubling;
  std::vector<int64_t> blocks(whole ? 1 : p.size, n);
  for (int i = 0; !whole && i < p.size; ++i) blocks[i] = n / p.size + (i < n % p.size ? 1 : 0);
  const Chunking c(blocks, p.element_bytes, Hosts(p).max_lanes());
  Schedule schedule{name_of(algorithm), std::vector<Lane>(c.lanes), 0};
  schedule.scratch_count = c.lanes * c.slot *
                           (whole                               ? 1
                            : algorithm == Algorithm::kPairwise ? p.size
                                                                : 2);
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

namespace {

// How many times the size of the tensor leaves the busiest host.
double leaving(const Problem& p, const Hosts& hosts, Algorithm algorithm) {
  const double size = p.size;
  std::vector<double> out(hosts.members.size(), 0);
  const auto meet = [&](int from, int to, double tensors) {
    if (hosts.of[from] != hosts.of[to]) out[hosts.of[from]] += tensors;
  };
  for (int host = 0; host < hosts.count(); ++host) {
    const auto here = static_cast<double>(hosts.members[host].size());
    if (algorithm == Algorithm::kDirect) out[host] = here * (size - here);
    if (algorithm == Algorithm::kPairwise) out[host] = 2 * here * (size - here) / size;
  }
  for (int rank = 0; rank < p.size; ++rank) {
    if (algorithm == Algorithm::kRing) meet(rank, (rank + 1) % p.size, 2 * (size - 1) / size);
    for (int distance = 1; algorithm == Algorithm::kHalvingDoubling && distance < p.size;
         distance *= 2) {
      meet(rank, rank ^ distance, 2 * distance / size);
    }
    if (algorithm == Algorithm::kTree && rank > 0) {
      meet(rank, rank & (rank - 1), 1);
      meet(rank & (rank - 1), rank, 1);
    }
  }
  return *std::max_element(out.begin(), out.end());
}

}  // namespace

// The alpha-beta formulas of cost_model/kernels/collectives.py, plus the time of handling a message
// on a rank, since one thread handles them all; and with one link that all ranks of a host share.
double all_reduce_s(const Problem& p, Algorithm algorithm) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  const bool power_of_two = (p.size & (p.size - 1)) == 0;
  const bool chain = algorithm == Algorithm::kRing || algorithm == Algorithm::kHalvingDoubling ||
                     algorithm == Algorithm::kTree;
  if (p.narrow_float && chain) return kNever;
  if (algorithm == Algorithm::kHalvingDoubling && !power_of_two) return kNever;
  const Hosts hosts(p);
  if (algorithm == Algorithm::kHierarchical || algorithm == Algorithm::kLeader)
    return hierarchical_s(p, hosts, algorithm);
  const bool one_host = hosts.count() == 1;
  const Costs& costs = one_host ? kMemory : p.network;
  const double others = p.size - 1, rounds = std::ceil(std::log2(p.size));
  const double bytes = static_cast<double>(p.counts[0] * p.element_bytes);
  // Within a host every rank moves its own part; between hosts the ranks of a host share its link.
  const double parts_s = one_host ? 2 * others / p.size * bytes / costs.bytes_per_s
                                  : leaving(p, hosts, algorithm) * bytes / costs.bytes_per_s;
  switch (algorithm) {
    // Each rank adds up the whole tensor once it has arrived; in the other algorithms ranks add up
    // one block while the next one arrives.
    case Algorithm::kDirect:
      return costs.step_s +
             others * (costs.message_s + (one_host ? 2 : 1) * bytes / kMemory.bytes_per_s) +
             (one_host ? 0 : 2 * parts_s);
    case Algorithm::kPairwise:
      // Between machines, as many flows as there are ranks meet at each receiver, which together
      // get less of its link than one after the other would.
      return 2 * (costs.step_s + others * costs.message_s) +
             (one_host || p.size == 2 ? 1.0 : 1.2) * parts_s;
    case Algorithm::kRing: return 2 * others * (costs.step_s + costs.message_s) + parts_s;
    case Algorithm::kHalvingDoubling:
      return 2 * rounds * (costs.step_s + costs.message_s) + parts_s;
    case Algorithm::kTree:
      return 2 * rounds * (costs.step_s + costs.message_s + bytes / costs.bytes_per_s);
    default: return kNever;
  }
}

Hosts::Hosts(const Problem& p) : of(p.hosts) {
  if (of.empty()) {
    of.resize(p.size);
    std::iota(of.begin(), of.end(), 0);
  }
  members.resize(*std::max_element(of.begin(), of.end()) + 1);
  for (int rank = 0; rank < p.size; ++rank) members[of[rank]].push_back(rank);
  most = least = members[0].size();
  for (const auto& ranks : members) {
    most = std::max(most, ranks.size());
    least = std::min(least, ranks.size());
  }
}

}  // namespace whale
