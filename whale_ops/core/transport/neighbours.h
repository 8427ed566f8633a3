// Maps the memory of other ranks on this machine: a segment with rings and slots, a doorbell, and
// an arena of tensors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "whale_ops/core/transport/doorbell.h"
#include "whale_ops/core/transport/segment.h"

namespace whale {

// What a rank tells all others before anything is shared.
struct Card {
  char machine[40];  // equal on ranks that run under one kernel
  int32_t process;
  int32_t segment_descriptor;  // -1: this rank has no shared memory
  int32_t bell_descriptor;
  int32_t pipe_descriptor;  // pipe that the bell's owner may wait for
  int32_t error;            // why this rank shares nothing: errno, or kSwitchedOff
  uint64_t mark[2];         // random; at the start of the segment, and at mark_address
  uint64_t mark_address;
  int32_t arena_descriptor;  // -1: this rank does not share its tensors
  uint64_t arena_bytes;

  static constexpr int kSwitchedOff = -1;
  // The card of a rank that shares nothing.
  static Card blank();
};

// Another rank, and what of its memory is mapped here.
struct Neighbour {
  int process = 0;
  Segment* segment = nullptr;  // the neighbour's
  Bell* bell = nullptr;
  int pipe = -1;  // its bell's pipe
  char* arena = nullptr;
  uint64_t arena_bytes = 0;
  Ring* in = nullptr;   // this rank's ring, into which the neighbour writes
  Ring* out = nullptr;  // the neighbour's ring, into which this rank writes

  void ring() const { bell->ring(pipe); }
  // Returns where an offset in its arena is mapped; null if it is out of range.
  char* at(uint64_t offset, uint64_t bytes) const {
    return offset <= arena_bytes && bytes <= arena_bytes - offset ? arena + offset : nullptr;
  }
};

class Neighbours {
 public:
  Neighbours(int rank, int size)
      : rank_(rank), size_(size), neighbours_(static_cast<size_t>(size)) {}
  ~Neighbours();
  Neighbours(const Neighbours&) = delete;

  // Creates this rank's segment for the other ranks of the machine, and fills in the card. `bell`:
  // this rank's.
  void offer(const Doorbell& bell, Card* card);
  // Maps what another rank offers; returns what prevents that, in words, or an empty string.
  std::string reach(int rank, const Card& card);
  const Neighbour& of(int rank) const { return neighbours_[static_cast<size_t>(rank)]; }
  // Slots of this rank's segment, or of a neighbour's.
  char* slot(uint32_t index) const { return own_->slot(static_cast<size_t>(size_), index); }
  char* slot_of(int rank, uint32_t index) const {
    return of(rank).segment->slot(static_cast<size_t>(size_), index);
  }

 private:
  const int rank_;
  const int size_;
  uint64_t mark_[2] = {};
  Segment* own_ = nullptr;
  size_t segment_bytes_ = 0;
  int descriptor_ = -1;
  std::vector<Neighbour> neighbours_;  // by rank
};

}  // namespace whale
