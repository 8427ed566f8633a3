// What a rank owns in memory and its peers of the machine map: rings of records and slots for
// payloads.
// Decision: 0002 (docs/decisions).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "whale_ops/core/transport/process_memory.h"

namespace whale {

// Of announcements and small payloads under way from one peer.
constexpr size_t kRingBytes = 256 << 10;
constexpr size_t kCacheLine = 64;

// Of one writer and one reader, each in a process of its own. All zeros is an empty ring.
struct Ring {
  alignas(kCacheLine) std::atomic<uint64_t> written;  // bytes ever written
  // For room: the reader has to ring the writer's bell.
  std::atomic<uint32_t> writer_waits;
  alignas(kCacheLine) std::atomic<uint64_t> read;  // bytes ever taken out
  alignas(kCacheLine) char bytes[kRingBytes];
};

// Payloads that fit are copied into memory that the receiver has mapped: a copy that stays in the
// caches takes a fifth of the time that the system needs to read another process's memory, and the
// sender has its buffer back at once. The slot that came back last is used first, so a few of them
// are touched again and again.
constexpr size_t kSlotBytes = (256 << 10) + kPageBytes;
constexpr uint32_t kSlots = 32;

// What a rank owns and its peers map: its mark, a ring for each rank of the machine, in rank order,
// and its slots.
struct Segment {
  uint64_t mark[2];
  alignas(kCacheLine) Ring rings[1];

  static size_t slots_offset(size_t ranks) {
    return (sizeof(Segment) + (ranks - 1) * sizeof(Ring) + kPageBytes - 1) / kPageBytes *
           kPageBytes;
  }
  static size_t bytes_for(size_t ranks) { return slots_offset(ranks) + kSlots * kSlotBytes; }
  char* slot(size_t ranks, uint32_t index) {
    return reinterpret_cast<char*>(this) + slots_offset(ranks) + index * kSlotBytes;
  }
};

// Bytes at a position of the ring: a writer puts them there, a reader takes them out.
inline void copy_in(Ring* ring, uint64_t position, const char* from, size_t bytes) {
  const size_t start = position % kRingBytes, first = std::min(bytes, kRingBytes - start);
  std::memcpy(ring->bytes + start, from, first);
  std::memcpy(ring->bytes, from + first, bytes - first);
}

inline void copy_out(const Ring& ring, uint64_t position, void* to, size_t bytes) {
  const size_t start = position % kRingBytes, first = std::min(bytes, kRingBytes - start);
  std::memcpy(to, ring.bytes + start, first);
  std::memcpy(static_cast<char*>(to) + first, ring.bytes, bytes - first);
}

}  // namespace whale
