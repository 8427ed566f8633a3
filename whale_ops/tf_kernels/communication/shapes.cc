#include "whale_ops/tf_kernels/communication/shapes.h"

#include <algorithm>
#include <vector>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "whale_ops/tf_kernels/communication/parts.h"

namespace whale_ops {
namespace {

// A sharded dimension of an input, as described by two attributes.
struct InferredDivision {
  const char* axis_name;
  const char* sizes_name;
  int input = -1;  // index, counted after the communicator's handle, if any; -1: the last input
  int64_t axis = 0;
  std::vector<int64_t> sizes = {};

  ShapeHandle tensor(InferenceContext* c) const {
    return c->input(input < 0 ? c->num_inputs() - 1 : input);
  }

  absl::Status read(InferenceContext* c) {
    TF_RETURN_IF_ERROR(c->GetAttr(axis_name, &axis));
    TF_RETURN_IF_ERROR(c->GetAttr(sizes_name, &sizes));
    const int32_t rank = c->Rank(tensor(c));
    if (axis < 0 || (rank != InferenceContext::kUnknownRank && axis >= rank)) {
      return invalid(axis_name, " is ", axis, " for an input of shape ", c->DebugString(tensor(c)),
                     "; expected a dimension of the input, counted from 0");
    }
    for (const int64_t size : sizes) {
      if (size < 0) {
        return invalid(sizes_name, " contains ", size, "; expected one size >= 0 per rank");
      }
    }
    return absl::OkStatus();
  }

  // This rank's part of the dimension: known if all parts are equal.
  DimensionHandle share(InferenceContext* c) const {
    for (const int64_t size : sizes) {
      if (size != sizes[0]) return c->UnknownDim();
    }
    return sizes.empty() ? c->UnknownDim() : c->MakeDim(sizes[0]);
  }

  // Checks that the input's dimension is the sum of the sizes.
  absl::Status check_whole(InferenceContext* c) const {
    const DimensionHandle dim = of_input(c);
    if (c->ValueKnown(dim) && c->Value(dim) != total(sizes)) {
      return invalid("dimension ", axis, " of the input of shape ", c->DebugString(tensor(c)),
                     " has ", c->Value(dim), " elements, ", sizes_name, " add up to ", total(sizes),
                     "; give sizes that add up to the input's dimension");
    }
    return absl::OkStatus();
  }

  // Checks that the input's dimension is the size of one part.
  absl::Status check_part(InferenceContext* c) const {
    const DimensionHandle dim = of_input(c);
    if (sizes.empty() || !c->ValueKnown(dim)) return absl::OkStatus();
    if (std::find(sizes.begin(), sizes.end(), c->Value(dim)) != sizes.end())
      return absl::OkStatus();
    return invalid("dimension ", axis, " of the input of shape ", c->DebugString(tensor(c)),
                   " has a size that is none of ", sizes_name, "; give each rank's own size");
  }

  // The shape with the dimension replaced.
  absl::Status replace(InferenceContext* c, ShapeHandle shape, DimensionHandle dim,
                       ShapeHandle* out) const {
    if (c->RankKnown(shape)) return c->ReplaceDim(shape, axis, dim, out);
    *out = c->UnknownShape();
    return absl::OkStatus();
  }

 private:
  DimensionHandle of_input(InferenceContext* c) const {
    return c->RankKnown(tensor(c)) ? c->Dim(tensor(c), axis) : c->UnknownDim();
  }
};

}  // namespace

absl::Status same_shapes(InferenceContext* c) {
  const int first = c->num_inputs() - c->num_outputs();
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(first + i));
  return absl::OkStatus();
}

absl::Status all_gather_shape(InferenceContext* c) {
  const int first = c->num_inputs() - c->num_outputs();
  for (int i = 0; i < c->num_outputs(); ++i) {
    InferredDivision division{"axis", "sizes", first + i};
    TF_RETURN_IF_ERROR(division.read(c));
    TF_RETURN_IF_ERROR(division.check_part(c));
    ShapeHandle out;
    const DimensionHandle dim =
        division.sizes.empty() ? c->UnknownDim() : c->MakeDim(total(division.sizes));
    TF_RETURN_IF_ERROR(division.replace(c, division.tensor(c), dim, &out));
    c->set_output(i, out);
  }
  return absl::OkStatus();
}

absl::Status reduce_scatter_shape(InferenceContext* c) {
  InferredDivision division{"axis", "sizes"};
  TF_RETURN_IF_ERROR(division.read(c));
  TF_RETURN_IF_ERROR(division.check_whole(c));
  ShapeHandle out;
  TF_RETURN_IF_ERROR(division.replace(c, division.tensor(c), division.share(c), &out));
  c->set_output(0, out);
  return absl::OkStatus();
}

absl::Status all_to_all_shape(InferenceContext* c) {
  InferredDivision split{"split_axis", "split_sizes"}, concat{"concat_axis", "concat_sizes"};
  TF_RETURN_IF_ERROR(split.read(c));
  TF_RETURN_IF_ERROR(concat.read(c));
  if (split.axis == concat.axis || split.sizes.size() != concat.sizes.size()) {
    return invalid("split_axis is ", split.axis, " with ", split.sizes.size(),
                   " sizes, concat_axis is ", concat.axis, " with ", concat.sizes.size(),
                   "; expected two different dimensions and one size per rank for both");
  }
  TF_RETURN_IF_ERROR(split.check_whole(c));
  TF_RETURN_IF_ERROR(concat.check_part(c));
  ShapeHandle out;
  TF_RETURN_IF_ERROR(split.replace(c, split.tensor(c), split.share(c), &out));
  TF_RETURN_IF_ERROR(concat.replace(c, out, c->MakeDim(total(concat.sizes)), &out));
  c->set_output(0, out);
  return absl::OkStatus();
}

absl::Status broadcast_shape(InferenceContext* c) {
  std::vector<PartialTensorShape> shapes;
  TF_RETURN_IF_ERROR(c->GetAttr("shapes", &shapes));
  if (shapes.empty()) return tensorflow::shape_inference::UnknownShape(c);
  return set_shapes(c, "inputs", "give one shape per input, or none");
}

}  // namespace whale_ops
