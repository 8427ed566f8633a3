// Tensors that are cut into parts along a dimension, one for each rank: attributes, shapes, and
// copies between a tensor and its parts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "whale_ops/tf_kernels/kernel.h"

namespace whale_ops {

int64_t total(const std::vector<int64_t>& sizes);
// Sizes in words, such as "[3,2]".
std::string join_sizes(const std::vector<int64_t>& sizes);

// A dimension that is sharded over the ranks of a group, and each rank's size of it. Both are
// attributes, whose values come from a program and may not fit the tensor.
struct Division {
  Division(OpKernelConstruction* ctx, const char* axis_name, const char* sizes_name) {
    read(ctx, axis_name, &axis, sizes_name, &sizes);
  }

  bool is_in(const TensorShape& shape) const { return axis >= 0 && axis < shape.dims(); }
  // Whether a tensor has the size of all ranks' parts together, or of one rank's part.
  bool fits_whole(const TensorShape& shape, size_t ranks) const {
    return is_in(shape) && sizes.size() == ranks && shape.dim_size(axis) == total(sizes);
  }
  bool fits_part(const TensorShape& shape, size_t ranks, int index) const {
    return is_in(shape) && sizes.size() == ranks && shape.dim_size(axis) == sizes[index];
  }
  // The shape with the dimension replaced.
  TensorShape whole(TensorShape shape) const {
    shape.set_dim(axis, total(sizes));
    return shape;
  }
  TensorShape part(TensorShape shape, int index) const {
    shape.set_dim(axis, sizes[index]);
    return shape;
  }
  bool is_even() const {
    return std::all_of(sizes.begin(), sizes.end(), [&](int64_t n) { return n == sizes[0]; });
  }
  // The division in words, such as "axis 0 sizes [3,2]".
  std::string text() const { return absl::StrCat("axis ", axis, " sizes ", join_sizes(sizes)); }

  int axis = 0;
  std::vector<int64_t> sizes;
};

// The attributes of an AllToAll: it changes the sharding from one dimension to another one.
struct Redivision {
  static constexpr char kExpected[] =
      "expected all of the split axis and this rank's share of the concat axis";

  explicit Redivision(OpKernelConstruction* ctx)
      : split(ctx, "split_axis", "split_sizes"), concat(ctx, "concat_axis", "concat_sizes") {}

  bool fits(const TensorShape& input, size_t ranks, int index) const {
    return split.axis != concat.axis && split.fits_whole(input, ranks) &&
           concat.fits_part(input, ranks, index);
  }
  // Whether any two ranks send each other equal amounts.
  bool is_even() const { return split.is_even() && concat.is_even(); }
  std::string text() const {
    return absl::StrCat("split ", split.text(), ", concat ", concat.text());
  }

  Division split, concat;
};

// A tensor seen as [outer, axis, inner] around one dimension. Its parts are [outer, sizes[r],
// inner], one after the other; if `outer` is 1, the tensor already has this order.
struct AxisView {
  AxisView(const TensorShape& shape, int axis);
  // Elements of each part.
  std::vector<int64_t> counts(const std::vector<int64_t>& sizes) const;

  int64_t outer = 1;
  int64_t inner = 1;
};

// Returns what is sent of `whole`: the tensor itself, or a copy in the order of parts.
absl::Status in_parts(OpKernelContext* ctx, const Tensor& whole, const AxisView& view,
                      const std::vector<int64_t>& sizes, Tensor* parts);

// Returns the memory that the parts of `whole` are received into: the tensor itself, or memory from
// which `finish` copies them (null: nothing to do).
absl::Status for_parts(OpKernelContext* ctx, const Tensor& whole, const AxisView& view,
                       const std::vector<int64_t>& sizes, Tensor* parts,
                       std::function<void()>* finish);

}  // namespace whale_ops
