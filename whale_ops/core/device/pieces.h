// An exchange of a device's memory as pieces that pass through the host's one after the other.
#pragma once

#include <cstdint>
#include <vector>

#include "whale_ops/core/device/device.h"

namespace whale {

// A piece has two regions of the host's memory, of the bytes of a piece each. Kinds whose parts are
// of several ranks are sent from the first and received into the second; the others use the first
// for both.
struct StagedPiece {
  struct Part {
    void* device = nullptr;
    size_t offset = 0;  // in the region
    size_t bytes = 0;
  };
  std::vector<Part> out;                     // what is copied out of the device
  std::vector<Part> in;                      // what is copied into it
  std::vector<int64_t> counts, recv_counts;  // as in Request; elements
};

// Whether what is received lies in the second region.
bool has_two_regions(OpKind kind);
// How many pieces the operation has follows from what is equal on all ranks of its group.
// `piece_bytes`: at least an element for each rank of the group.
std::vector<StagedPiece> pieces_of(const DeviceOperation& what, size_t piece_bytes);

}  // namespace whale
