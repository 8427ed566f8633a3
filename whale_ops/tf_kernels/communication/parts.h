// Tensors in parts along a dimension, a part for each rank: their sizes, and copies between a
// tensor and its parts.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"

namespace whale_ops {

int64_t total(const std::vector<int64_t>& sizes);
// "[3,2]"
std::string join_sizes(const std::vector<int64_t>& sizes);

inline char* data_of(const tensorflow::Tensor& tensor) {
  return const_cast<char*>(static_cast<const char*>(tensor.data()));
}

// A tensor seen as [outer, axis, inner] around one dimension. Its parts are [outer, sizes[r],
// inner], one behind the other: where `outer` is 1, that is how they lie in the tensor.
struct AxisView {
  AxisView(const tensorflow::TensorShape& shape, int axis);
  // Elements of each part.
  std::vector<int64_t> counts(const std::vector<int64_t>& sizes) const;

  int64_t outer = 1;
  int64_t inner = 1;
};

// What is sent of `whole`: itself, or a copy in parts.
absl::Status in_parts(tensorflow::OpKernelContext* ctx, const tensorflow::Tensor& whole,
                      const AxisView& view, const std::vector<int64_t>& sizes,
                      tensorflow::Tensor* parts);

// Into what the parts of `whole` are received: itself, or memory from which `finish` copies them
// (null: nothing is to be done).
absl::Status for_parts(tensorflow::OpKernelContext* ctx, const tensorflow::Tensor& whole,
                       const AxisView& view, const std::vector<int64_t>& sizes,
                       tensorflow::Tensor* parts, std::function<void()>* finish);

}  // namespace whale_ops
