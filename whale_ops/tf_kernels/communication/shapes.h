// Shape functions of the ops. Those of a device's memory take the same tensors without the
// communicator's handle before them.
#pragma once

#include "whale_ops/tf_kernels/kernel.h"

// What all ops that communicate have: the communicator's handle first, and marks by which their
// errors keep their code and payload (registration.cc).
#define WHALE_EXCHANGE_OP(name)      \
  REGISTER_OP(name)                  \
      .Input("comm: resource")       \
      .Attr("key: string")           \
      .Attr("ranks: list(int) = []") \
      .SetIsStateful()               \
      .SetIsDistributedCommunication()

namespace whale_ops {

absl::Status same_shapes(InferenceContext* c);
absl::Status all_gather_shape(InferenceContext* c);
absl::Status reduce_scatter_shape(InferenceContext* c);
absl::Status all_to_all_shape(InferenceContext* c);
absl::Status broadcast_shape(InferenceContext* c);

}  // namespace whale_ops
