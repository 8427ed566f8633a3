// Shape functions of the ops. Those of a device's memory take the same tensors without the
// communicator's handle before them.
#pragma once

#include "tensorflow/core/framework/shape_inference.h"

namespace whale_ops {

absl::Status same_shapes(tensorflow::shape_inference::InferenceContext* c);
absl::Status all_gather_shape(tensorflow::shape_inference::InferenceContext* c);
absl::Status reduce_scatter_shape(tensorflow::shape_inference::InferenceContext* c);
absl::Status all_to_all_shape(tensorflow::shape_inference::InferenceContext* c);
absl::Status broadcast_shape(tensorflow::shape_inference::InferenceContext* c);
absl::Status call_shapes(tensorflow::shape_inference::InferenceContext* c);
absl::Status recv_shape(tensorflow::shape_inference::InferenceContext* c);

}  // namespace whale_ops
