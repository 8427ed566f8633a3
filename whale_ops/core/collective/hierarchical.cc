// All-reduces in two levels: within hosts through memory, between hosts through the network.
// Decision: 0005 (docs/decisions).
#include <algorithm>
#include <limits>

#include "whale_ops/core/collective/schedules.h"

namespace whale {
namespace {

constexpr int64_t kWideBytes = 4;  // of an element of Buffer::kWide

int owners_of(const Hosts& hosts, Algorithm algorithm) {
  return algorithm == Algorithm::kLeader ? 1 : static_cast<int>(hosts.least);
}

struct Between {
  // Each owner sends its host's whole sum of a block; else sums are divided and gathered again.
  bool whole;
  double seconds;
};

// Between the owners of one block, all owners of a host at once. `bytes`: of the tensor.
Between between(const Problem& p, int hosts, double bytes) {
  const double others = hosts - 1, message_s = others * kNetwork.message_s;
  // Sums travel in float32.
  const double sums = p.narrow_float ? kWideBytes / static_cast<double>(p.element_bytes) : 1;
  const double whole_s = kNetwork.step_s + message_s + others * sums * bytes / kNetwork.bytes_per_s;
  const double parts_s = 2 * (kNetwork.step_s + message_s) +
                         others / hosts * (sums + 1) * bytes / kNetwork.bytes_per_s;
  return {whole_s <= parts_s, std::min(whole_s, parts_s)};
}

// The messages of a chunk. A rank that is no owner has nothing to do between the hosts, so ids are
// numbered by phase.
enum Phase { kInside, kWholeSums, kPartSums, kParts, kOutside, kPhases };

// This rank's view of the hosts.
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

// Sends the chunk of each block to its owner here; what this rank owns is added up in rank order.
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

// Adds what the owners of the block have, host by host in the same order everywhere, so that all
// hosts hold the same bits.
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
  // An owner reads its block of every other rank of the host, and every rank reads the blocks that
  // it does not own.
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
  const Chunking c(blocks, p.element_bytes);
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
      // 16-bit sums stay in float32 until all of them are added: they are rounded once.
      const Slice sum =
          at.narrow ? Slice{Buffer::kWide, wide + host * c.slot, result.count} : result;
      lane->push_back(add_inside(at, c, chunk, first_id + kInside, scratch, sum));
      add_between(hosts, at, c, first_id, scratch, wide, sum, result, lane);
    }
    lane->push_back(give_inside(at, c, chunk, first_id + kOutside));
  }
  return schedule;
}

}  // namespace whale
