// Collectives in two levels: within hosts through shared memory, between hosts through the network.
// Decisions: 0005, 0175 (docs/decisions).
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "whale_ops/core/collective/schedules.h"

namespace whale {
namespace {

constexpr int64_t kWideBytes = 4;  // of an element of Buffer::kWide

int owners_of(const Hosts& hosts, Algorithm algorithm) {
  return algorithm == Algorithm::kLeader ? 1 : static_cast<int>(hosts.least);
}

struct Between {
  // Whether each owner sends its host's sum of a whole block; else the sums are reduce-scattered
  // and gathered again.
  bool whole;
  double seconds;
};

// The cheaper way between the owners of one block, with all owners of a host working at once.
// `bytes`: size of the tensor.
Between between(const Problem& p, int hosts, double bytes) {
  const double others = hosts - 1, message_s = others * p.network.message_s;
  // Sums travel as float32.
  const double sums = p.narrow_float ? kWideBytes / static_cast<double>(p.element_bytes) : 1;
  const double whole_s =
      p.network.step_s + message_s + others * sums * bytes / p.network.bytes_per_s;
  const double parts_s = 2 * (p.network.step_s + message_s) +
                         others / hosts * (sums + 1) * bytes / p.network.bytes_per_s;
  return {whole_s <= parts_s, std::min(whole_s, parts_s)};
}

// The phases of a chunk. Ids of messages are numbered by phase, not by step, since ranks that own
// no block skip the phases between hosts.
enum Phase { kInside, kWholeSums, kPartSums, kParts, kOutside, kPhases };

// This rank's view of its host.
struct Place {
  const std::vector<int>& here;  // ranks of its host
  int host;
  int index;  // in its host
  int owners;
  bool whole;
  bool narrow;

  bool owns() const { return index < owners; }
};

Slice part_of(Slice whole, int part, int parts) {
  const int64_t begin = whole.count * part / parts, end = whole.count * (part + 1) / parts;
  return {whole.buffer, whole.offset + begin, end - begin};
}

// Sends this rank's chunk of each block to the block's owner on this host; an owner adds up what it
// receives in the order of ranks.
Step add_inside(const Place& at, const Chunking& c, int64_t chunk, uint32_t id, int64_t scratch,
                Slice sum) {
  Step step;
  Local add{sum, {}};
  for (int i = 0; i < static_cast<int>(at.here.size()); ++i) {
    if (i == at.index) {
      if (at.owns()) add.sources.push_back(c.global(Buffer::kInput, at.index, chunk));
      continue;
    }
    if (i < at.owners) step.sends.push_back({at.here[i], id, c.global(Buffer::kInput, i, chunk)});
    if (!at.owns()) continue;
    const Slice arriving{Buffer::kScratch, scratch + i * c.slot, sum.count};
    step.recvs.push_back({at.here[i], id, arriving});
    add.sources.push_back(arriving);
  }
  if (at.owns()) step.locals.push_back(std::move(add));
  return step;
}

// Adds up what the owners of a block on all hosts have, in the same order of hosts everywhere, so
// that all hosts get the same bits.
void add_between(const Hosts& hosts, const Place& at, const Chunking& c, uint32_t first_id,
                 int64_t scratch, int64_t wide, Slice sum, Slice result, Lane* lane) {
  Step add, gather;
  const int count = hosts.count();
  const auto mine = [&](Slice all) { return at.whole ? all : part_of(all, at.host, count); };
  Local total{mine(result), {}};
  for (int host = 0; host < count; ++host) {
    if (host == at.host) {
      total.sources.push_back(mine(sum));
      continue;
    }
    const int peer = hosts.members[host][at.index];
    const Slice arriving{at.narrow ? Buffer::kWide : Buffer::kScratch,
                         (at.narrow ? wide : scratch) + host * c.slot, mine(sum).count};
    total.sources.push_back(arriving);
    const uint32_t id = first_id + (at.whole ? kWholeSums : kPartSums);
    add.sends.push_back({peer, id, at.whole ? sum : part_of(sum, host, count)});
    add.recvs.push_back({peer, id, arriving});
    if (at.whole) continue;
    gather.sends.push_back({peer, first_id + kParts, mine(result)});
    gather.recvs.push_back({peer, first_id + kParts, part_of(result, host, count)});
  }
  add.locals.push_back(std::move(total));
  lane->push_back(std::move(add));
  if (!at.whole) lane->push_back(std::move(gather));
}

Step give_inside(const Place& at, const Chunking& c, int64_t chunk, uint32_t id) {
  Step step;
  for (int i = 0; i < static_cast<int>(at.here.size()); ++i) {
    if (i == at.index) continue;
    if (at.owns())
      step.sends.push_back({at.here[i], id, c.global(Buffer::kOutput, at.index, chunk)});
    if (i < at.owners) step.recvs.push_back({at.here[i], id, c.global(Buffer::kOutput, i, chunk)});
  }
  return step;
}

}  // namespace

double hierarchical_s(const Problem& p, const Hosts& hosts, Algorithm algorithm) {
  const int owners = owners_of(hosts, algorithm);
  if (hosts.count() == 1 || hosts.most == 1) return std::numeric_limits<double>::infinity();
  const double bytes = static_cast<double>(p.counts[0] * p.element_bytes),
               most = static_cast<double>(hosts.most);
  // An owner reads its block from every other rank of the host, and every rank reads the blocks
  // that it does not own.
  const double memory_s = ((most - 1) / owners + 1) * bytes / kMemory.bytes_per_s;
  const double messages = (most - 1 + owners - 1) / 2;  // an owner's, there and back
  return 2 * (kMemory.step_s + messages * kMemory.message_s) + memory_s +
         between(p, hosts.count(), bytes).seconds;
}

Schedule hierarchical(const Problem& p, Algorithm algorithm) {
  const Hosts hosts(p);
  const int owners = owners_of(hosts, algorithm);
  const int host = hosts.of[p.rank];
  const auto& here = hosts.members[host];
  const int64_t n = p.counts[0];
  const Place at{here,
                 host,
                 static_cast<int>(std::find(here.begin(), here.end(), p.rank) - here.begin()),
                 owners,
                 between(p, hosts.count(), static_cast<double>(n * p.element_bytes)).whole,
                 p.narrow_float};
  std::vector<int64_t> blocks(owners);
  for (int i = 0; i < owners; ++i) blocks[i] = n / owners + (i < n % owners ? 1 : 0);
  const Chunking c(blocks, p.element_bytes, hosts.max_lanes());
  const int64_t per_lane =
      std::max<int64_t>(static_cast<int64_t>(hosts.most), hosts.count()) * c.slot;
  const int64_t wide_per_lane = at.narrow ? hosts.count() * c.slot : 0;
  Schedule schedule{name_of(algorithm), std::vector<Lane>(c.lanes), c.lanes * per_lane,
                    c.lanes * wide_per_lane};
  for (int64_t chunk = 0; chunk < c.chunks; ++chunk) {
    const int64_t index = chunk % c.lanes;
    const int64_t scratch = index * per_lane, wide = index * wide_per_lane;
    const uint32_t first_id = message_id(index, static_cast<size_t>(chunk / c.lanes) * kPhases);
    Lane* lane = &schedule.lanes[index];
    if (!at.owns()) {
      lane->push_back(add_inside(at, c, chunk, first_id + kInside, scratch, {}));
    } else {
      const Slice result = c.global(Buffer::kOutput, at.index, chunk);
      // Sums of 16-bit floats stay in float32 until all of them are added, so that they are rounded
      // once.
      const Slice sum =
          at.narrow ? Slice{Buffer::kWide, wide + host * c.slot, result.count} : result;
      lane->push_back(add_inside(at, c, chunk, first_id + kInside, scratch, sum));
      add_between(hosts, at, c, first_id, scratch, wide, sum, result, lane);
    }
    lane->push_back(give_inside(at, c, chunk, first_id + kOutside));
  }
  return schedule;
}

namespace {

struct Own {
  int host;
  int index;  // in its host
};

Own own_of(const Hosts& hosts, int rank) {
  const auto& here = hosts.members[hosts.of[rank]];
  return {hosts.of[rank],
          static_cast<int>(std::find(here.begin(), here.end(), rank) - here.begin())};
}

// The rank of another host that exchanges with the ranks of index `index` on other hosts.
int partner(const Hosts& hosts, int host, int index) {
  const auto& there = hosts.members[host];
  return there[index % there.size()];
}

// The ranks of other hosts with which `rank` exchanges.
std::vector<int> dealt_with(const Hosts& hosts, int rank) {
  std::vector<int> found;
  for (int host = 0; host < hosts.count(); ++host) {
    if (host == hosts.of[rank]) continue;
    const auto& there = hosts.members[host];
    for (size_t i = 0; i < there.size(); ++i) {
      if (partner(hosts, hosts.of[rank], static_cast<int>(i)) == rank) found.push_back(there[i]);
    }
  }
  return found;
}

bool are_in_a_row(const std::vector<int>& ranks) {
  return ranks.back() - ranks.front() + 1 == static_cast<int>(ranks.size());
}

}  // namespace

// Seconds that an all-gather or reduce-scatter of T bytes keeps the busiest link occupied: each
// rank exchanges with all others, with the next one, or with one rank of each other host.
double blocks_s(const Problem& p, const Hosts& hosts, BlockWay way) {
  const double size = p.size, others = size - 1, most = static_cast<double>(hosts.most);
  const double count = hosts.count(),
               bytes = static_cast<double>(
                   std::accumulate(p.counts.begin(), p.counts.end(), int64_t{0}) * p.element_bytes);
  if (way == BlockWay::kRing) {
    double out = 0;
    for (const auto& members : hosts.members) {
      double here = 0;
      for (const int rank : members)
        here += hosts.of[rank] != hosts.of[(rank + 1) % p.size] ? 1 : 0;
      out = std::max(out, here);
    }
    return others * (p.network.step_s + p.network.message_s) +
           out * others / size * bytes / p.network.bytes_per_s;
  }
  if (way == BlockWay::kDirect) {
    return p.network.step_s + (size - most) * p.network.message_s + (most - 1) * kMemory.message_s +
           most * (size - most) / size * bytes / p.network.bytes_per_s;
  }
  // Sums travel as float32.
  const double sums = p.kind == OpKind::kReduceScatter && p.narrow_float
                          ? kWideBytes / static_cast<double>(p.element_bytes)
                          : 1;
  const double dealt = std::ceil((size - most) / most);
  return p.network.step_s + (count - 1) * p.network.message_s +
         most * (count - 1) / size * sums * bytes / p.network.bytes_per_s + kMemory.step_s +
         (most - 1) * (1 + dealt) * kMemory.message_s + bytes / kMemory.bytes_per_s;
}

// Each block goes to each other host once: from its owner to the owner's partner there, which
// passes it on to the other ranks of its host.
Schedule hierarchical_all_gather(const Problem& p, const Hosts& hosts) {
  const Chunking c(p.counts, p.element_bytes, hosts.max_lanes());
  const auto own = own_of(hosts, p.rank);
  const std::vector<int> dealt = dealt_with(hosts, p.rank);
  Schedule schedule{name_of(Algorithm::kHierarchical), std::vector<Lane>(c.lanes), 0};
  const auto ids = static_cast<size_t>(p.size) + 1;
  for (int64_t chunk = 0; chunk < c.chunks; ++chunk) {
    const int64_t index = chunk % c.lanes;
    const size_t first = static_cast<size_t>(chunk / c.lanes) * ids;
    const auto id_of = [&](int block) { return message_id(index, first + 1 + block); };
    const auto block = [&](int rank) { return c.global(Buffer::kOutput, rank, chunk); };
    Step meet = copy_step(block(p.rank), c.slice(Buffer::kInput, 0, p.rank, chunk)), give;
    Lane* lane = &schedule.lanes[index];
    lane->push_back(std::move(meet));
    meet = {};
    for (const int mate : hosts.members[own.host]) {
      if (mate == p.rank) continue;
      meet.sends.push_back({mate, id_of(p.rank), block(p.rank)});
      meet.recvs.push_back({mate, id_of(mate), block(mate)});
      for (const int rank : dealt) give.sends.push_back({mate, id_of(rank), block(rank)});
      for (const int rank : dealt_with(hosts, mate)) {
        give.recvs.push_back({mate, id_of(rank), block(rank)});
      }
    }
    for (int host = 0; host < hosts.count(); ++host) {
      if (host == own.host) continue;
      meet.sends.push_back({partner(hosts, host, own.index), id_of(p.rank), block(p.rank)});
    }
    for (const int rank : dealt) meet.recvs.push_back({rank, id_of(rank), block(rank)});
    lane->push_back(std::move(meet));
    lane->push_back(std::move(give));
  }
  return schedule;
}

// The reverse of the all-gather: the blocks that a host's ranks have for a rank of another host are
// added up by that rank's partner here, and the sum is sent once.
Schedule hierarchical_reduce_scatter(const Problem& p, const Hosts& hosts) {
  const Chunking c(p.counts, p.element_bytes, hosts.max_lanes());
  const auto own = own_of(hosts, p.rank);
  const auto& here = hosts.members[own.host];
  const std::vector<int> dealt = dealt_with(hosts, p.rank);
  std::vector<int> added = dealt;  // whose blocks this rank adds up; its own block last
  added.push_back(p.rank);
  // Scratch memory of a lane: the parts of `added` from each rank of this host, then sums from
  // other hosts, then own sums, which are in float32 if elements have 16 bits.
  const auto mates = static_cast<int64_t>(here.size()), count = static_cast<int64_t>(added.size());
  const int64_t parts = count * mates, per_lane = (parts + hosts.count() + count) * c.slot;
  const Buffer sums = p.narrow_float ? Buffer::kWide : Buffer::kScratch;
  Schedule schedule{name_of(Algorithm::kHierarchical), std::vector<Lane>(c.lanes),
                    c.lanes * per_lane, p.narrow_float ? c.lanes * per_lane : 0};
  const auto ids = static_cast<size_t>(p.size) + 1;
  for (int64_t chunk = 0; chunk < c.chunks; ++chunk) {
    const int64_t index = chunk % c.lanes, base = index * per_lane;
    const size_t first = static_cast<size_t>(chunk / c.lanes) * ids;
    const auto id_of = [&](int block) { return message_id(index, first + block); };
    const uint32_t crossing = message_id(index, first + p.size);
    const auto slot = [&](Buffer buffer, int64_t number, int rank) {
      return Slice{buffer, base + number * c.slot, c.count(rank, chunk)};
    };
    Step inside, between;
    for (int i = 0; i < mates; ++i) {
      if (i == own.index) continue;
      std::vector<int> theirs = dealt_with(hosts, here[i]);
      theirs.push_back(here[i]);
      for (const int rank : theirs) {
        inside.sends.push_back({here[i], id_of(rank), c.global(Buffer::kInput, rank, chunk)});
      }
      for (int64_t k = 0; k < count; ++k) {
        inside.recvs.push_back(
            {here[i], id_of(added[k]), slot(Buffer::kScratch, k * mates + i, added[k])});
      }
    }
    const auto sum_of = [&](int64_t k) { return slot(sums, parts + hosts.count() + k, added[k]); };
    for (int64_t k = 0; k < count; ++k) {
      Local add{sum_of(k), {}};
      for (int64_t i = 0; i < mates; ++i) {
        add.sources.push_back(i == own.index ? c.global(Buffer::kInput, added[k], chunk)
                                             : slot(Buffer::kScratch, k * mates + i, added[k]));
      }
      inside.locals.push_back(std::move(add));
    }
    Local total{c.slice(Buffer::kOutput, 0, p.rank, chunk), {}};
    for (int host = 0; host < hosts.count(); ++host) {
      const Slice arriving =
          host == own.host ? sum_of(count - 1) : slot(sums, parts + host, p.rank);
      total.sources.push_back(arriving);
      if (host == own.host) continue;
      between.recvs.push_back({partner(hosts, host, own.index), crossing, arriving});
    }
    for (int64_t k = 0; k + 1 < count; ++k)
      between.sends.push_back({added[k], crossing, sum_of(k)});
    between.locals.push_back(std::move(total));
    schedule.lanes[index].push_back(std::move(inside));
    schedule.lanes[index].push_back(std::move(between));
  }
  return schedule;
}

// Whether hosts have equal numbers of ranks, each host's ranks have consecutive numbers, and all
// ranks send each other equal amounts.
bool can_pack(const Problem& p, const Hosts& hosts) {
  return p.even && hosts.count() > 1 && hosts.most > 1 && hosts.most == hosts.least &&
         std::all_of(hosts.members.begin(), hosts.members.end(), are_in_a_row);
}

double all_to_all_s(const Problem& p, const Hosts& hosts, bool packed) {
  const double most = static_cast<double>(hosts.most), others = p.size - most;
  if (!packed) {
    return p.network.step_s + others * p.network.message_s + (most - 1) * kMemory.message_s;
  }
  if (!can_pack(p, hosts)) return std::numeric_limits<double>::infinity();
  const double bytes = others * static_cast<double>(p.counts[0] * p.element_bytes);
  return kMemory.step_s + hosts.count() * (most - 1) * kMemory.message_s + p.network.step_s +
         (hosts.count() - 1) * p.network.message_s + 2 * bytes / kMemory.bytes_per_s;
}

// What the ranks of a host have for the ranks of one index on other hosts is collected by the rank
// of this index here, so that one message goes to each of those.
Schedule packed_all_to_all(const Problem& p, const Hosts& hosts) {
  const auto own = own_of(hosts, p.rank);
  const auto& here = hosts.members[own.host];
  const auto mates = static_cast<int64_t>(here.size());
  const int64_t each = p.counts[0];
  const auto to = [&](int rank) { return Slice{Buffer::kInput, rank * each, each}; };
  const int64_t packed = hosts.count() * mates * each;  // offset of the packed blocks
  const auto place = [&](int64_t begin, int host, int64_t i) {
    return Slice{Buffer::kScratch, begin + (host * mates + i) * each, each};
  };
  Step pack = copy_step({Buffer::kOutput, p.rank * each, each}, to(p.rank)), cross;
  for (int host = 0; host < hosts.count(); ++host) {
    const auto& there = hosts.members[host];
    const auto id = static_cast<uint32_t>(host);
    for (int64_t i = 0; i < mates; ++i) {
      if (i != own.index) {
        pack.sends.push_back({here[i], id, to(there[i])});
        pack.recvs.push_back(
            {here[i], id,
             host == own.host ? Slice{Buffer::kOutput, here[i] * each, each} : place(0, host, i)});
      }
      if (host == own.host) continue;
      const Slice source = i == own.index ? to(there[own.index]) : place(0, host, i);
      pack.locals.push_back({place(packed, host, i), {source}});
    }
    if (host == own.host) continue;
    const auto crossing = static_cast<uint32_t>(hosts.count());
    cross.sends.push_back({there[own.index],
                           crossing,
                           {Buffer::kScratch, place(packed, host, 0).offset, mates * each}});
    cross.recvs.push_back(
        {there[own.index], crossing, {Buffer::kOutput, there[0] * each, mates * each}});
  }
  return {name_of(Algorithm::kHierarchical), {{std::move(pack), std::move(cross)}}, 2 * packed};
}

}  // namespace whale
