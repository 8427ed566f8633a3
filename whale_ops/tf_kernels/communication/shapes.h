// Shape functions of the ops. Ops for GPU memory take the same tensors without the communicator's
// handle.
#pragma once

#include "whale_ops/tf_kernels/kernel.h"

// What all communicating ops have: the communicator's handle first, and marks that keep the code
// and payload of their errors (registration.cc).
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
