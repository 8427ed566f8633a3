#include "whale_ops/core/device/pieces.h"

#include <algorithm>

namespace whale {
namespace {

char* at(const void* data, int64_t element, size_t element_bytes) {
  return static_cast<char*>(const_cast<void*>(data)) + static_cast<size_t>(element) * element_bytes;
}

// Pieces of concatenated tensors, which may be cut anywhere. `sends`, `receives`: whether this rank
// does.
std::vector<StagedPiece> in_a_row(const DeviceOperation& what, int64_t most, bool sends,
                                  bool receives) {
  std::vector<StagedPiece> pieces;
  for (const DeviceTensor& tensor : what.tensors) {
    for (int64_t begin = 0; begin < tensor.count;) {
      if (pieces.empty() || pieces.back().counts[0] == most) {
        pieces.emplace_back();
        pieces.back().counts = {0};
      }
      StagedPiece& piece = pieces.back();
      const int64_t count = std::min(most - piece.counts[0], tensor.count - begin);
      const size_t offset = static_cast<size_t>(piece.counts[0]) * what.element_bytes,
                   bytes = static_cast<size_t>(count) * what.element_bytes;
      if (sends) piece.out.push_back({at(tensor.input, begin, what.element_bytes), offset, bytes});
      if (receives &&
          (!sends || what.kind == OpKind::kAllReduce || tensor.output != tensor.input)) {
        piece.in.push_back({at(tensor.output, begin, what.element_bytes), offset, bytes});
      }
      piece.counts[0] += count;
      begin += count;
    }
  }
  return pieces;
}

// Cuts a range from each rank's part: returns how many elements of each part belong to the piece
// that begins at `begin`, and adds where these lie to `parts`.
std::vector<int64_t> cut(const void* tensor, const std::vector<int64_t>& counts, int64_t begin,
                         int64_t most, size_t element_bytes,
                         std::vector<StagedPiece::Part>* parts) {
  const std::vector<int64_t> offsets = offsets_of(counts);
  std::vector<int64_t> found;
  size_t position = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    found.push_back(std::clamp<int64_t>(counts[i] - begin, 0, most));
    const size_t bytes = static_cast<size_t>(found.back()) * element_bytes;
    if (parts != nullptr && bytes > 0)
      parts->push_back({at(tensor, offsets[i] + begin, element_bytes), position, bytes});
    position += bytes;
  }
  return found;
}

// Pieces that hold equally many elements of every rank's part, as many as fit.
std::vector<StagedPiece> side_by_side(const DeviceOperation& what, int64_t most) {
  const auto own = static_cast<size_t>(what.index);
  const DeviceTensor& tensor = what.tensors[0];
  const bool exchanges = what.kind == OpKind::kAllToAll, gathers = what.kind == OpKind::kAllGather;
  const int64_t longest =
      exchanges ? what.largest : *std::max_element(what.counts.begin(), what.counts.end());
  std::vector<StagedPiece> pieces;
  for (int64_t begin = 0; begin < longest; begin += most) {
    StagedPiece piece;
    if (exchanges) {
      piece.counts = cut(tensor.input, what.counts, begin, most, what.element_bytes, &piece.out);
      piece.recv_counts =
          cut(tensor.output, what.recv_counts, begin, most, what.element_bytes, &piece.in);
    } else {
      piece.counts = cut(gathers ? tensor.output : tensor.input, what.counts, begin, most,
                         what.element_bytes, gathers ? &piece.in : &piece.out);
      const void* alone = gathers ? tensor.input : tensor.output;
      cut(alone, {what.counts[own]}, begin, most, what.element_bytes,
          gathers ? &piece.out : &piece.in);
    }
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

}  // namespace

bool has_two_regions(OpKind kind) {
  return kind == OpKind::kAllGather || kind == OpKind::kReduceScatter || kind == OpKind::kAllToAll;
}

std::vector<StagedPiece> pieces_of(const DeviceOperation& what, size_t piece_bytes) {
  const auto elements = static_cast<int64_t>(piece_bytes / what.element_bytes);
  if (has_two_regions(what.kind))
    return side_by_side(what, elements / static_cast<int64_t>(what.size()));
  const bool root = what.kind != OpKind::kBroadcast || what.index == what.root;
  const bool sends = what.kind != OpKind::kRecv && root, receives = what.kind != OpKind::kSend;
  return in_a_row(what, elements, sends, receives);
}

}  // namespace whale
