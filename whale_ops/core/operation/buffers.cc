#include "whale_ops/core/operation/buffers.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace whale {

void Buffers::prepare(const Schedule& schedule) {
  piece_begins_.clear();
  int64_t begin = 0;
  for (const Piece& piece : request_->pieces) {
    piece_begins_.push_back(begin);
    begin += piece.count;
  }
  wide_offset_ = static_cast<size_t>(schedule.scratch_count) * request_->element_bytes;
  wide_offset_ += (alignof(std::max_align_t) - wide_offset_ % alignof(std::max_align_t)) %
                  alignof(std::max_align_t);
  const size_t scratch_bytes =
      wide_offset_ + static_cast<size_t>(schedule.wide_count) * sizeof(float);
  if (scratch_bytes > 0) scratch_ = pool_->take(scratch_bytes);
}

void Buffers::return_scratch() {
  pool_->give(std::move(scratch_));
  pool_->give(std::move(mirror_));
}

size_t Buffers::element_of(Buffer buffer) const {
  return buffer == Buffer::kWide ? sizeof(float) : request_->element_bytes;
}

Buffers::Run Buffers::run_at(const Slice& slice, int64_t begin) const {
  const int64_t offset = slice.offset + begin, left = slice.count - begin;
  const auto in = [&](const void* base) {
    return static_cast<char*>(const_cast<void*>(base)) + offset * problem_->element_bytes;
  };
  switch (slice.buffer) {
    case Buffer::kScratch: return {in(scratch_.data.get()), left};
    case Buffer::kWide:
      return {scratch_.data.get() + wide_offset_ + static_cast<size_t>(offset) * sizeof(float),
              left};
    case Buffer::kInput:
    case Buffer::kOutput: break;
  }
  const bool input = slice.buffer == Buffer::kInput;
  if (request_->pieces.empty()) return {in(input ? request_->input : request_->output), left};
  const auto after = std::upper_bound(piece_begins_.begin(), piece_begins_.end(), offset);
  const auto index = static_cast<size_t>(after - piece_begins_.begin()) - 1;
  const Piece& piece = request_->pieces[index];
  const int64_t within = offset - piece_begins_[index];
  const void* base = input ? piece.input : piece.output;
  return {static_cast<char*>(const_cast<void*>(base)) + within * problem_->element_bytes,
          std::min(left, piece.count - within)};
}

char* Buffers::address(const Slice& slice) const {
  const Run run = run_at(slice, 0);
  return run.count == slice.count ? run.data : nullptr;
}

void Buffers::gather(const Slice& slice, void* to) const {
  auto* position = static_cast<char*>(to);
  for (int64_t begin = 0; begin < slice.count;) {
    const Run run = run_at(slice, begin);
    const size_t bytes = static_cast<size_t>(run.count) * element_of(slice.buffer);
    std::memcpy(position, run.data, bytes);
    position += bytes;
    begin += run.count;
  }
}

void Buffers::scatter(const void* from, const Slice& slice) const {
  const auto* position = static_cast<const char*>(from);
  for (int64_t begin = 0; begin < slice.count;) {
    const Run run = run_at(slice, begin);
    const size_t bytes = static_cast<size_t>(run.count) * element_of(slice.buffer);
    std::memcpy(run.data, position, bytes);
    position += bytes;
    begin += run.count;
  }
}

// Input and output use the same mirror, as they may use the same memory.
char* Buffers::mirror(const Slice& slice) {
  if (mirror_.bytes == 0)
    mirror_ = pool_->take(static_cast<size_t>(problem_->counts[0] * problem_->element_bytes));
  return mirror_.data.get() + slice.offset * problem_->element_bytes;
}

}  // namespace whale
