// A GPU that copies to the host's memory and back, beside the computation, for exchanges between
// GPUs that reach no other one.
#pragma once

#include <memory>

#include "whale_ops/core/device/device.h"

namespace whale::cuda {

Status open_copies(int ordinal, std::unique_ptr<DeviceCopies>* copies);

}  // namespace whale::cuda
