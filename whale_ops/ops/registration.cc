// Names, attributes and shape functions of the ops. All are stateful; those that communicate take the communicator's handle first.
#include <algorithm>
#include <vector>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "whale_ops/ops/parts.h"

namespace whale_ops {
namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

constexpr char kReduction[] = "reduction: {'sum', 'min', 'max', 'prod'} = 'sum'";
constexpr char kReducible[] =
    "T: {half, bfloat16, float, double, int8, int16, int32, int64, uint8, uint16, uint32, uint64, bool, complex64, complex128}";

// A dimension of the input and its division among the ranks, as two attributes say.
struct Division {
  const char* axis_name;
  const char* sizes_name;
  int64_t axis = 0;
  std::vector<int64_t> sizes = {};

  absl::Status read(InferenceContext* c) {
    TF_RETURN_IF_ERROR(c->GetAttr(axis_name, &axis));
    TF_RETURN_IF_ERROR(c->GetAttr(sizes_name, &sizes));
    const int32_t rank = c->Rank(c->input(1));
    if (axis < 0 || (rank != InferenceContext::kUnknownRank && axis >= rank)) {
      return absl::InvalidArgumentError(absl::StrCat(axis_name, " is ", axis, " for an input of shape ", c->DebugString(c->input(1)),
                                                     "; expected a dimension of the input, counted from 0"));
    }
    for (const int64_t size : sizes) {
      if (size < 0) {
        return absl::InvalidArgumentError(absl::StrCat(sizes_name, " contains ", size, "; expected one size >= 0 per rank"));
      }
    }
    return absl::OkStatus();
  }

  // A rank's own share: known when all shares are equal.
  DimensionHandle share(InferenceContext* c) const {
    for (const int64_t size : sizes) {
      if (size != sizes[0]) return c->UnknownDim();
    }
    return sizes.empty() ? c->UnknownDim() : c->MakeDim(sizes[0]);
  }

  // The input's dimension must be the sum of the sizes.
  absl::Status check_whole(InferenceContext* c) const {
    const DimensionHandle dim = of_input(c);
    if (c->ValueKnown(dim) && c->Value(dim) != total(sizes)) {
      return absl::InvalidArgumentError(absl::StrCat("dimension ", axis, " of the input of shape ", c->DebugString(c->input(1)),
                                                     " has ", c->Value(dim), " elements, ", sizes_name, " add up to ", total(sizes),
                                                     "; give sizes that add up to the input's dimension"));
    }
    return absl::OkStatus();
  }

  // The input's dimension must be one rank's size.
  absl::Status check_part(InferenceContext* c) const {
    const DimensionHandle dim = of_input(c);
    if (sizes.empty() || !c->ValueKnown(dim)) return absl::OkStatus();
    if (std::find(sizes.begin(), sizes.end(), c->Value(dim)) != sizes.end()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("dimension ", axis, " of the input of shape ", c->DebugString(c->input(1)),
                                                   " is none of ", sizes_name, "; give each rank's own size"));
  }

  // The shape with another dimension in its place.
  absl::Status replace(InferenceContext* c, ShapeHandle shape, DimensionHandle dim, ShapeHandle* out) const {
    if (c->RankKnown(shape)) return c->ReplaceDim(shape, axis, dim, out);
    *out = c->UnknownShape();
    return absl::OkStatus();
  }

 private:
  DimensionHandle of_input(InferenceContext* c) const {
    return c->RankKnown(c->input(1)) ? c->Dim(c->input(1), axis) : c->UnknownDim();
  }
};

absl::Status same_shapes(InferenceContext* c) {
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(i + 1));
  return absl::OkStatus();
}

absl::Status all_gather_shape(InferenceContext* c) {
  Division division{"axis", "sizes"};
  TF_RETURN_IF_ERROR(division.read(c));
  TF_RETURN_IF_ERROR(division.check_part(c));
  ShapeHandle out;
  const DimensionHandle dim = division.sizes.empty() ? c->UnknownDim() : c->MakeDim(total(division.sizes));
  TF_RETURN_IF_ERROR(division.replace(c, c->input(1), dim, &out));
  c->set_output(0, out);
  return absl::OkStatus();
}

absl::Status reduce_scatter_shape(InferenceContext* c) {
  Division division{"axis", "sizes"};
  TF_RETURN_IF_ERROR(division.read(c));
  TF_RETURN_IF_ERROR(division.check_whole(c));
  ShapeHandle out;
  TF_RETURN_IF_ERROR(division.replace(c, c->input(1), division.share(c), &out));
  c->set_output(0, out);
  return absl::OkStatus();
}

absl::Status all_to_all_shape(InferenceContext* c) {
  Division split{"split_axis", "split_sizes"}, concat{"concat_axis", "concat_sizes"};
  TF_RETURN_IF_ERROR(split.read(c));
  TF_RETURN_IF_ERROR(concat.read(c));
  if (split.axis == concat.axis || split.sizes.size() != concat.sizes.size()) {
    return absl::InvalidArgumentError(absl::StrCat("split_axis is ", split.axis, " with ", split.sizes.size(), " sizes, concat_axis is ",
                                                   concat.axis, " with ", concat.sizes.size(),
                                                   "; expected two different dimensions and one size per rank for both"));
  }
  TF_RETURN_IF_ERROR(split.check_whole(c));
  TF_RETURN_IF_ERROR(concat.check_part(c));
  ShapeHandle out;
  TF_RETURN_IF_ERROR(split.replace(c, c->input(1), split.share(c), &out));
  TF_RETURN_IF_ERROR(concat.replace(c, out, c->MakeDim(total(concat.sizes)), &out));
  c->set_output(0, out);
  return absl::OkStatus();
}

// The outputs' shapes, one by one from the attribute `shapes`; not known where that is empty and may be. `outputs`, `advice`: words
// of the error about another number of them.
absl::Status given_shapes(InferenceContext* c, bool may_be_empty, const char* outputs, const char* advice) {
  std::vector<tensorflow::PartialTensorShape> shapes;
  TF_RETURN_IF_ERROR(c->GetAttr("shapes", &shapes));
  if (shapes.empty() && may_be_empty) return tensorflow::shape_inference::UnknownShape(c);
  if (static_cast<int>(shapes.size()) != c->num_outputs()) {
    return absl::InvalidArgumentError(
        absl::StrCat("shapes has ", shapes.size(), " entries for ", c->num_outputs(), " ", outputs, "; ", advice));
  }
  for (int i = 0; i < c->num_outputs(); ++i) {
    ShapeHandle out;
    TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(shapes[i], &out));
    c->set_output(i, out);
  }
  return absl::OkStatus();
}

absl::Status broadcast_shape(InferenceContext* c) { return given_shapes(c, true, "inputs", "give one shape per input, or none"); }

absl::Status call_shapes(InferenceContext* c) { return given_shapes(c, false, "results", "give one shape per result"); }

absl::Status recv_shape(InferenceContext* c) {
  tensorflow::PartialTensorShape shape;
  TF_RETURN_IF_ERROR(c->GetAttr("shape", &shape));
  ShapeHandle out;
  TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(shape, &out));
  c->set_output(0, out);
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("WhaleCommunicator")
    .Output("handle: resource")
    .Attr("communicator: string")
    .Attr("rank: int = -1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc("Handle of the communicator that the host program made under this name; rank -1: the only rank in this process.");

REGISTER_OP("WhaleAllReduce")
    .Input("comm: resource")
    .Input("inputs: N * T")
    .Output("outputs: N * T")
    .Attr("key: string")
    .Attr(kReduction)
    .Attr("ranks: list(int) = []")
    .Attr("N: int >= 1")
    .Attr(kReducible)
    .Attr("wire_dtype: {'', 'float16', 'bfloat16'} = ''")
    .SetIsStateful()
    .SetShapeFn(same_shapes)
    .Doc("Element-wise reduction over the ranks; several inputs travel as one message, in order. wire_dtype: float32 inputs are "
         "rounded to it before they are sent, added in float32, and the result is rounded to it once more.");

REGISTER_OP("WhaleDeviceAllReduce")
    .Input("inputs: N * T")
    .Output("outputs: N * T")
    .Attr("communicator: string")
    .Attr("rank: int")
    .Attr("key: string")
    .Attr(kReduction)
    .Attr("N: int >= 1")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("wire_dtype: {'', 'float16', 'bfloat16'} = ''")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(i));
      return absl::OkStatus();
    })
    .Doc("Element-wise reduction over all ranks by the device in whose memory the tensors lie, which the rank has opened. It names the "
         "communicator and takes no handle: TensorFlow would place the handle, and all ops that take it, on that device. wire_dtype: "
         "float32 inputs are rounded to it before they are sent.");

REGISTER_OP("WhaleAllGather")
    .Input("comm: resource")
    .Input("input: T")
    .Output("output: T")
    .Attr("key: string")
    .Attr("axis: int = 0")
    .Attr("sizes: list(int) = []")
    .Attr("ranks: list(int) = []")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(all_gather_shape)
    .Doc("Concatenation of the ranks' inputs along an axis; sizes: each rank's size along it, exchanged first when not given.");

REGISTER_OP("WhaleReduceScatter")
    .Input("comm: resource")
    .Input("input: T")
    .Output("output: T")
    .Attr("key: string")
    .Attr(kReduction)
    .Attr("axis: int = 0")
    .Attr("sizes: list(int)")
    .Attr("ranks: list(int) = []")
    .Attr(kReducible)
    .SetIsStateful()
    .SetShapeFn(reduce_scatter_shape)
    .Doc("Element-wise reduction over the ranks, of which each rank keeps its share along an axis.");

REGISTER_OP("WhaleAllToAll")
    .Input("comm: resource")
    .Input("input: T")
    .Output("output: T")
    .Attr("key: string")
    .Attr("split_axis: int")
    .Attr("split_sizes: list(int)")
    .Attr("concat_axis: int")
    .Attr("concat_sizes: list(int)")
    .Attr("ranks: list(int) = []")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(all_to_all_shape)
    .Doc("From a share of concat_axis with all of split_axis to all of concat_axis with a share of split_axis.");

REGISTER_OP("WhaleBroadcast")
    .Input("comm: resource")
    .Input("inputs: N * T")
    .Output("outputs: N * T")
    .Attr("key: string")
    .Attr("root: int = 0")
    .Attr("shapes: list(shape) = []")
    .Attr("ranks: list(int) = []")
    .Attr("N: int >= 1")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(broadcast_shape)
    .Doc("The root's inputs on every rank; the inputs of the other ranks are ignored. Unknown shapes are sent first.");

REGISTER_OP("WhaleSend")
    .Input("comm: resource")
    .Input("input: T")
    .Attr("key: string")
    .Attr("peer: int")
    .Attr("ranks: list(int) = []")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Sends a tensor to the rank `peer` of the communicator.");

REGISTER_OP("WhaleRecv")
    .Input("comm: resource")
    .Output("output: T")
    .Attr("key: string")
    .Attr("peer: int")
    .Attr("shape: shape = {unknown_rank: true}")
    .Attr("ranks: list(int) = []")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(recv_shape)
    .Doc("Receives a tensor from the rank `peer` of the communicator.");

REGISTER_OP("WhaleBarrier")
    .Input("comm: resource")
    .Attr("key: string")
    .Attr("ranks: list(int) = []")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Ends when all ranks have started it.");

REGISTER_OP("WhaleCheck")
    .Input("comm: resource")
    .Attr("key: string")
    .Attr("fingerprint: string")
    .Attr("what: string")
    .Attr("ranks: list(int) = []")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Compares the fingerprint over the ranks; a difference aborts the communicator on all of them.");

REGISTER_OP("WhaleCall")
    .Input("args: Tin")
    .Output("output: Tout")
    .Attr("Tin: list(type) >= 0")
    .Attr("Tout: list(type) >= 0")
    .Attr("f: string")
    .Attr("bodies: list(func) = []")
    .Attr("shapes: list(shape)")
    .SetIsStateful()
    .SetShapeFn(call_shapes)
    .Doc("What the function makes of the arguments, in the shapes that are given. The function is never copied into its caller. bodies: "
         "functions that the graph is to hold; one of its nodes names f there, and TensorFlow's graph passes read it once.");

REGISTER_OP("WhaleHold")
    .Input("input: T")
    .Output("output: T")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc("The input, as something that is known only when the step runs: nothing behind it is computed while TensorFlow optimises.");

REGISTER_OP("WhaleOffload")
    .Input("input: T")
    .Output("output: T")
    .Attr("to_host: bool")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc("The input. Counts its bytes, as those that come to the host's memory from another device, or go from there to one.");

}  // namespace whale_ops
