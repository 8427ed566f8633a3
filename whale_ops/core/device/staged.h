// Exchanges of devices that reach no other rank by themselves: through the host's memory and
// Whale's own exchange, in pieces, of which one is copied out of the device while another travels
// and a third is copied back.
// Decision: 0103 (docs/decisions).
#pragma once

#include <memory>

#include "whale_ops/core/device/device.h"
#include "whale_ops/core/progress/endpoint.h"

namespace whale {

constexpr size_t kStagedPieces = 4;  // that are under way at a time

// `buffer_bytes`: of the pieces under way together, equal on all ranks. The host's memory that the
// device copies to is twice that. What has been copied is counted by the endpoint under these keys,
// as what is exchanged under "device/staged/" and the operation's key.
constexpr char kCopiedOut[] = "device/copied out";
constexpr char kCopiedIn[] = "device/copied in";
Status open_staged(const std::shared_ptr<Endpoint>& endpoint, std::unique_ptr<DeviceCopies> copies,
                   size_t buffer_bytes, std::unique_ptr<Device>* device);

// The host's memory as that of a device, for ranks that have none: their processor copies.
std::unique_ptr<DeviceCopies> host_copies();

}  // namespace whale
