// Copies between a GPU and host memory, in parallel with the computation, for exchanges between
// GPUs that cannot reach each other directly.
#pragma once

#include <memory>

#include "whale_ops/core/device/device.h"

namespace whale::cuda {

Status open_copies(int ordinal, std::unique_ptr<DeviceCopies>* copies);

}  // namespace whale::cuda
