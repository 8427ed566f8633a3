// Exchanges of devices that cannot reach other ranks directly: through host memory and Whale's own
// exchange, in pieces, so that one piece is copied out of the device while another one travels and
// a third is copied back.
// Decision: 0103 (docs/decisions).
#pragma once

#include <memory>

#include "whale_ops/core/device/device.h"
#include "whale_ops/core/progress/endpoint.h"

namespace whale {

constexpr size_t kStagedPieces = 4;  // number of pieces under way at a time

// Opens such a device. `buffer_bytes`: total size of the pieces under way, equal on all ranks;
// twice as much host memory is allocated. The endpoint counts copied bytes under the two keys here,
// and exchanged bytes under "device/staged/" and the operation's key.
constexpr char kCopiedOut[] = "device/copied out";
constexpr char kCopiedIn[] = "device/copied in";
Status open_staged(const std::shared_ptr<Endpoint>& endpoint, std::unique_ptr<DeviceCopies> copies,
                   size_t buffer_bytes, std::unique_ptr<Device>* device);

// Copies for ranks without a device, whose "device memory" is host memory.
std::unique_ptr<DeviceCopies> host_copies();

}  // namespace whale
