// Decisions: 0043, 0186 (docs/decisions).
#include "whale_ops/core/collective/algorithms.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "whale_ops/core/collective/schedules.h"

namespace whale {
namespace {

constexpr int64_t kSmallBytes = 64 << 10;  // all-gather, reduce-scatter below this: one exchange
constexpr int kPeersPerStep = 16;          // all-to-all: peers addressed at once

}  // namespace

// Ring reduce-scatter: rank r is the last one to add to block r, and keeps the result. Partial sums
// travel through two scratch slots, so the input is never written. Patarasuk and Yuan, "Bandwidth
// optimal all-reduce algorithms", JPDC 2009.
void ring_reduce_scatter(const Problem& p, const Chunking& c, int64_t lane_index, int64_t chunk,
                         int64_t output_base, Lane* lane) {
  const int right = (p.rank + 1) % p.size;
  const int left = (p.rank + p.size - 1) % p.size;
  const int64_t scratch = lane_index * 2 * c.slot;
  for (int k = 0; k + 1 < p.size; ++k) {
    const int send_block = (p.rank - k - 1 + p.size) % p.size;
    const int recv_block = (p.rank - k - 2 + 2 * p.size) % p.size;
    const Slice arriving{Buffer::kScratch, scratch + (k % 2) * c.slot, c.count(recv_block, chunk)};
    const Slice leaving = k == 0 ? c.global(Buffer::kInput, send_block, chunk)
                                 : Slice{Buffer::kScratch, scratch + ((k + 1) % 2) * c.slot,
                                         c.count(send_block, chunk)};
    const bool last = k + 2 == p.size;
    const Slice dst = last ? c.slice(Buffer::kOutput, output_base, recv_block, chunk) : arriving;
    const uint32_t id = message_id(lane_index, lane->size());
    lane->push_back({{{right, id, leaving}},
                     {{left, id, arriving}},
                     {{dst, {arriving, c.global(Buffer::kInput, recv_block, chunk)}}}});
  }
}

void ring_all_gather(const Problem& p, const Chunking& c, int64_t lane_index, int64_t chunk,
                     Lane* lane) {
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

void direct_reduce_scatter(const Problem& p, const Chunking& c, int64_t lane_index, int64_t chunk,
                           int64_t output_base, Lane* lane) {
  const uint32_t id = message_id(lane_index, lane->size());
  Step step;
  Local sum{c.slice(Buffer::kOutput, output_base, p.rank, chunk), {}};
  for (int i = 0; i < p.size; ++i) {
    const Slice part = i == p.rank ? c.global(Buffer::kInput, p.rank, chunk)
                                   : Slice{Buffer::kScratch, (lane_index * p.size + i) * c.slot,
                                           c.count(p.rank, chunk)};
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

void direct_all_gather(const Problem& p, const Chunking& c, int64_t lane_index, int64_t chunk,
                       Lane* lane) {
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

namespace {

// `only_direct`: whether a ring is ruled out.
BlockWay block_way(const Problem& p, const Hosts& hosts, const Chunking& c, bool only_direct) {
  const bool direct = only_direct || c.offsets.back() * p.element_bytes <= kSmallBytes;
  const BlockWay flat = direct ? BlockWay::kDirect : BlockWay::kRing;
  if (hosts.count() == 1 || hosts.most == 1) return flat;
  const bool levels = p.algorithm == Algorithm::kHierarchical ||
                      blocks_s(p, hosts, BlockWay::kHierarchical) < blocks_s(p, hosts, flat);
  return levels ? BlockWay::kHierarchical : flat;
}

Schedule reduce_scatter(const Problem& p) {
  const Hosts hosts(p);
  const Chunking c(p.counts, p.element_bytes, hosts.max_lanes());
  if (p.size == 1)
    return {"copy",
            {{copy_step({Buffer::kOutput, 0, p.counts[0]}, {Buffer::kInput, 0, p.counts[0]})}},
            0};
  const BlockWay way = block_way(p, hosts, c, p.narrow_float);
  if (way == BlockWay::kHierarchical) return hierarchical_reduce_scatter(p, hosts);
  const bool direct = way == BlockWay::kDirect;
  Schedule schedule{direct ? "direct" : "ring", std::vector<Lane>(c.lanes),
                    c.lanes * c.slot * (direct ? p.size : 2)};
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
  const Hosts hosts(p);
  const Chunking c(p.counts, p.element_bytes, hosts.max_lanes());
  const BlockWay way = block_way(p, hosts, c, p.size <= 2);
  if (way == BlockWay::kHierarchical) return hierarchical_all_gather(p, hosts);
  const bool direct = way == BlockWay::kDirect;
  Schedule schedule{direct ? "direct" : "ring", std::vector<Lane>(c.lanes), 0};
  for (int64_t chunk = 0; chunk < c.chunks; ++chunk) {
    const int64_t index = chunk % c.lanes;
    Lane* lane = &schedule.lanes[index];
    lane->push_back(copy_step(c.global(Buffer::kOutput, p.rank, chunk),
                              c.slice(Buffer::kInput, 0, p.rank, chunk)));
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
  const Hosts hosts(p);
  const double packed_s = all_to_all_s(p, hosts, true);
  if (packed_s < all_to_all_s(p, hosts, false) ||
      (p.algorithm == Algorithm::kHierarchical && std::isfinite(packed_s))) {
    return packed_all_to_all(p, hosts);
  }
  const auto to_offsets = offsets_of(p.counts);
  const auto from_offsets = offsets_of(p.recv_counts);
  Lane lane{copy_step({Buffer::kOutput, from_offsets[p.rank], p.recv_counts[p.rank]},
                      {Buffer::kInput, to_offsets[p.rank], p.counts[p.rank]})};
  for (int k = 1; k < p.size; ++k) {
    const int to = (p.rank + k) % p.size;
    const int from = (p.rank - k + p.size) % p.size;
    if ((k - 1) % kPeersPerStep == 0) lane.emplace_back();
    lane.back().sends.push_back({to, 0, {Buffer::kInput, to_offsets[to], p.counts[to]}});
    lane.back().recvs.push_back(
        {from, 0, {Buffer::kOutput, from_offsets[from], p.recv_counts[from]}});
  }
  return {"pairwise", {std::move(lane)}, 0};
}

// Binomial tree; the chunks of a large tensor follow each other down the tree.
Schedule broadcast(const Problem& p) {
  const Chunking c({p.counts[0]}, p.element_bytes);
  const int position = (p.rank - p.root + p.size) % p.size;
  Schedule schedule{"binomial tree", std::vector<Lane>(c.lanes), 0};
  const Buffer source = position == 0 ? Buffer::kInput : Buffer::kOutput;
  // The children of a position are at position + 1, 2, 4, ... below the position's lowest set bit.
  int children_below = 1;
  while (children_below < p.size && (position & children_below) == 0) children_below *= 2;
  for (int64_t chunk = 0; chunk < c.chunks; ++chunk) {
    const int64_t index = chunk % c.lanes;
    Lane* lane = &schedule.lanes[index];
    const uint32_t id = message_id(index, static_cast<size_t>(chunk / c.lanes));
    if (position == 0) {
      lane->push_back(
          copy_step(c.global(Buffer::kOutput, 0, chunk), c.global(Buffer::kInput, 0, chunk)));
    } else {
      const int parent = (position - (position & -position) + p.root) % p.size;
      lane->push_back({{}, {{parent, id, c.global(Buffer::kOutput, 0, chunk)}}, {}});
    }
    Step forward;
    for (int distance = children_below / 2; distance >= 1; distance /= 2) {
      if (position + distance >= p.size) continue;
      forward.sends.push_back(
          {(position + distance + p.root) % p.size, id, c.global(source, 0, chunk)});
    }
    lane->push_back(std::move(forward));
  }
  return schedule;
}

// Dissemination barrier: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization",
// 1988.
Schedule barrier(const Problem& p) {
  Lane lane;
  for (int distance = 1; distance < p.size; distance *= 2) {
    const uint32_t id = message_id(0, lane.size());
    lane.push_back({{{(p.rank + distance) % p.size, id, {}}},
                    {{(p.rank - distance + p.size) % p.size, id, {}}},
                    {}});
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
    case Algorithm::kHierarchical: return "hierarchical";
    case Algorithm::kLeader: return "leader";
  }
  return "unknown algorithm";
}

Schedule make_schedule(const Problem& p) {
  switch (p.kind) {
    case OpKind::kAllReduce: return all_reduce(p);
    case OpKind::kAllGather: return all_gather(p);
    case OpKind::kReduceScatter: return reduce_scatter(p);
    case OpKind::kAllToAll: return all_to_all(p);
    case OpKind::kBroadcast: return broadcast(p);
    case OpKind::kSend:
      return {"point to point", {{{{{p.root, 0, {Buffer::kInput, 0, p.counts[0]}}}, {}, {}}}}, 0};
    case OpKind::kRecv:
      return {"point to point", {{{{}, {{p.root, 0, {Buffer::kOutput, 0, p.counts[0]}}}, {}}}}, 0};
    case OpKind::kBarrier: return barrier(p);
  }
  return {};
}

int64_t logical_bytes(const Problem& p) {
  const int64_t others = p.size - 1;
  switch (p.kind) {
    case OpKind::kAllReduce: {
      // Divides 2(p-1)T bytes so that the ranks' parts add up exactly.
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
