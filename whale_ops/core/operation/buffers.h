// Finds the elements of an operation's slices: in the caller's tensors (one or several), or in
// scratch memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "whale_ops/core/collective/algorithms.h"
#include "whale_ops/core/operation/request.h"
#include "whale_ops/core/operation/scratch_pool.h"

namespace whale {

// Elements that are copied or added at a time, so that they stay in the first-level cache.
constexpr int64_t kPieceElements = 2048;

class Buffers {
 public:
  // Contiguous elements.
  struct Run {
    char* data = nullptr;
    int64_t count = 0;
  };

  // The arguments must live as long as this object, and may change until prepare().
  Buffers(const Request* request, const Problem* problem, ScratchPool* pool)
      : request_(request), problem_(problem), pool_(pool) {}

  // Allocates the scratch memory that the schedule needs.
  void prepare(const Schedule& schedule);
  void return_scratch();

  size_t element_of(Buffer buffer) const;  // bytes of an element
  size_t bytes_of(const Slice& slice) const {
    return static_cast<size_t>(slice.count) * element_of(slice.buffer);
  }
  // The slice's elements from `begin` on, as far as they are contiguous.
  Run run_at(const Slice& slice, int64_t begin) const;
  // Returns the slice's address, or null if it is not contiguous.
  char* address(const Slice& slice) const;
  void gather(const Slice& slice, void* to) const;
  void scatter(const void* from, const Slice& slice) const;
  // Returns memory for a slice that is not contiguous, to be sent from or received into as a whole.
  char* mirror(const Slice& slice);

 private:
  const Request* const request_;
  const Problem* const problem_;
  ScratchPool* const pool_;
  std::vector<int64_t> piece_begins_;  // where each of the request's pieces begins, in elements
  ScratchPool::Block scratch_;
  ScratchPool::Block mirror_;  // as large as all pieces; allocated on demand
  size_t wide_offset_ = 0;     // offset of Buffer::kWide in the scratch memory
};

}  // namespace whale
