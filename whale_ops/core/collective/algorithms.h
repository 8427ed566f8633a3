// Collectives as data: a pure function of (operation, rank, size, counts) gives the steps that one
// rank performs.
#pragma once

#include <vector>

#include "whale_ops/core/base/types.h"

namespace whale {

// Where the elements of a slice lie. kWide: scratch memory that holds float32 sums of 16-bit
// floats.
enum class Buffer : uint8_t { kInput, kOutput, kScratch, kWide };

// A run of elements inside one of the operation's buffers.
struct Slice {
  Buffer buffer = Buffer::kInput;
  int64_t offset = 0;
  int64_t count = 0;

  bool operator==(const Slice& other) const {
    return buffer == other.buffer && offset == other.offset && count == other.count;
  }
};

// One message. Sender and receiver compute the same `id` for it; (sender, receiver, id) is unique
// in an operation.
struct Transfer {
  int peer = 0;
  uint32_t id = 0;
  Slice slice;
};

// dst = sources[0] (op) sources[1] ...; with a single source it is a copy.
struct Local {
  Slice dst;
  std::vector<Slice> sources;
};

// One step of a lane. All its messages are in flight together; `locals` run, in order, after all of
// them have completed. What arrives in scratch memory is read only by the locals of the same step,
// so it need not be copied there.
struct Step {
  std::vector<Transfer> sends;
  std::vector<Transfer> recvs;
  std::vector<Local> locals;
};

using Lane = std::vector<Step>;  // steps of one lane run one after the other

// Lanes are independent of each other: while one of them reduces, another one transfers.
struct Schedule {
  const char* algorithm = "";
  std::vector<Lane> lanes;
  int64_t scratch_count = 0;  // elements
  int64_t wide_count = 0;     // elements of kWide
};

// Algorithms of all-reduces, and of other collectives over several hosts. kAuto: the one with the
// least predicted time.
enum class Algorithm : uint8_t {
  kAuto = 0,
  kDirect = 1,
  kPairwise = 2,
  kRing = 3,
  kHalvingDoubling = 4,
  kTree = 5,
  kHierarchical = 6,
  kLeader = 7
};

// What messages cost: seconds until a message is seen by its receiver, seconds of CPU time to
// handle one, and bytes per second of one rank (between hosts: of one host). The figures only have
// to be good enough to rank the algorithms.
struct Costs {
  double step_s, message_s, bytes_per_s;
};
// Default for links between hosts that were not measured: Ethernet of 10 Gbit/s.
constexpr Costs kNetwork{30e-6, 5e-6, 1.2e9};

struct Problem {
  OpKind kind = OpKind::kBarrier;
  int rank = 0;  // index in the group
  int size = 1;
  int root = 0;  // Broadcast: index of the source; Send, Recv: index of the other rank
  int64_t element_bytes = 1;
  // Whether elements are 16-bit floats: every sum is then made in one go, so that it is rounded
  // once.
  bool narrow_float = false;

  // The host of each rank, numbered from 0; empty: every rank has a host of its own.
  std::vector<int> hosts;
  Algorithm algorithm = Algorithm::kAuto;
  Costs network = kNetwork;  // between hosts

  // AllReduce, Broadcast, Send, Recv: {elements}. AllGather, ReduceScatter: elements per rank.
  // AllToAll: elements to send to each rank. Barrier: {}.
  std::vector<int64_t> counts;
  std::vector<int64_t> recv_counts;  // AllToAll: elements to receive from each rank
  bool even = false;                 // AllToAll: any two ranks send each other as much
};

WHALE_EXPORT const char* name_of(Algorithm algorithm);
// Predicts the seconds of an all-reduce; infinity if the algorithm cannot serve the problem.
WHALE_EXPORT double all_reduce_s(const Problem& problem, Algorithm algorithm);

WHALE_EXPORT Schedule make_schedule(const Problem& problem);

// Returns the bytes that this rank's part of the operation has to move. The sum over the ranks is
// 2(p-1)T for AllReduce, (p-1)T for AllGather, ReduceScatter and Broadcast, the bytes that change
// their owner for AllToAll, T for Send.
WHALE_EXPORT int64_t logical_bytes(const Problem& problem);

}  // namespace whale
