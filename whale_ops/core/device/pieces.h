// Cuts an exchange of device memory into pieces that pass through host memory one after the other.
#pragma once

#include <cstdint>
#include <vector>

#include "whale_ops/core/device/device.h"

namespace whale {

// A piece has two regions of host memory. Kinds of exchanges whose parts belong to several ranks
// send from the first region and receive into the second; the others use the first one for both.
struct StagedPiece {
  struct Part {
    void* device = nullptr;
    size_t offset = 0;  // offset within the region
    size_t bytes = 0;
  };
  std::vector<Part> out;                     // what is copied out of the device
  std::vector<Part> in;                      // what is copied into it
  std::vector<int64_t> counts, recv_counts;  // as in Request; elements
};

// Whether the piece receives into the second region.
bool has_two_regions(OpKind kind);
// Cuts an operation into pieces. Their number follows from what is equal on all ranks of the group.
// `piece_bytes`: large enough for an element of each rank of the group.
std::vector<StagedPiece> pieces_of(const DeviceOperation& what, size_t piece_bytes);

}  // namespace whale
