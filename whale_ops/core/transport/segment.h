// The memory that a rank owns and its peers on the machine map: rings of records, and slots for
// payloads.
// Decision: 0002 (docs/decisions).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "whale_ops/core/transport/process_memory.h"

namespace whale {

// Size of a ring: announcements and small payloads from one peer that are under way.
constexpr size_t kRingBytes = 256 << 10;
constexpr size_t kCacheLine = 64;

// A ring with one writer and one reader, each in a process of its own. All zeros is an empty ring.
struct Ring {
  alignas(kCacheLine) std::atomic<uint64_t> written;  // bytes ever written
  // Set if the ring is full: the reader then rings the writer's bell.
  std::atomic<uint32_t> writer_waits;
  alignas(kCacheLine) std::atomic<uint64_t> read;  // bytes ever taken out
  alignas(kCacheLine) char bytes[kRingBytes];
};

// Slots are for payloads that fit: they are copied into memory that the receiver has mapped. A copy
// that stays in the caches takes a fifth of the time of process_vm_readv, and the sender has its
// buffer back at once. The slot that was freed last is used first, so that a few slots stay in the
// caches.
constexpr size_t kSlotBytes = (256 << 10) + kPageBytes;
constexpr uint32_t kSlots = 32;

// What a rank owns and its peers map: its mark, a ring for each rank of the machine in the order of
// ranks, and its slots.
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

// Copies bytes into the ring at a position (writer), or out of it (reader).
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
