// Names and attributes of the ops that exchange tensors in the memory of the device that the rank
// has opened. They name the communicator instead of taking its handle, since TensorFlow would place
// the handle, and all ops that take it, on that device. Everything else is as in the op without
// "Device" in its name (communication/registration.cc).
#include "tensorflow/core/framework/common_shape_fns.h"
#include "whale_ops/tf_kernels/communication/shapes.h"

// What all these ops have.
#define WHALE_DEVICE_OP(name)       \
  REGISTER_OP(name)                 \
      .Attr("communicator: string") \
      .Attr("rank: int")            \
      .Attr("key: string")          \
      .SetIsStateful()              \
      .SetIsDistributedCommunication()

namespace whale_ops {
namespace {

constexpr char kRanks[] = "ranks: list(int) = []";
// Done as soon as it is queued: TensorFlow's stream waits for the operation, and its executor does
// not.
constexpr char kInStream[] = "in_stream: bool = false";
constexpr char kReductionOfDevices[] = "reduction: {'sum', 'min', 'max', 'prod'} = 'sum'";
constexpr char kFloats[] = "T: {half, bfloat16, float, double}";
constexpr char kAny[] = "T: type";

}  // namespace

WHALE_DEVICE_OP("WhaleDeviceAllReduce")
    .Input("inputs: N * T")
    .Output("outputs: N * T")
    .Attr(kRanks)
    .Attr(kInStream)
    .Attr(kReductionOfDevices)
    .Attr("N: int >= 1")
    .Attr(kFloats)
    .Attr("wire_dtype: {'', 'float16', 'bfloat16'} = ''")
    .SetShapeFn(same_shapes)
    .Doc(
        "Element-wise reduction over the ranks. wire_dtype: float32 inputs are rounded to it "
        "before they are sent, and added in it where the device does so.");

WHALE_DEVICE_OP("WhaleDeviceAllGather")
    .Input("input: T")
    .Output("output: T")
    .Attr(kRanks)
    .Attr(kInStream)
    .Attr("axis: int = 0")
    .Attr("sizes: list(int) >= 1")
    .Attr(kAny)
    .SetShapeFn(all_gather_shape)
    .Doc("Concatenation of the ranks' inputs along an axis; sizes: each rank's size along it.");

WHALE_DEVICE_OP("WhaleDeviceReduceScatter")
    .Input("input: T")
    .Output("output: T")
    .Attr(kRanks)
    .Attr(kInStream)
    .Attr(kReductionOfDevices)
    .Attr("axis: int = 0")
    .Attr("sizes: list(int)")
    .Attr(kFloats)
    .SetShapeFn(reduce_scatter_shape)
    .Doc(
        "Element-wise reduction over the ranks, of which each rank keeps its share along an axis.");

WHALE_DEVICE_OP("WhaleDeviceAllToAll")
    .Input("input: T")
    .Output("output: T")
    .Attr(kRanks)
    .Attr(kInStream)
    .Attr("split_axis: int")
    .Attr("split_sizes: list(int)")
    .Attr("concat_axis: int")
    .Attr("concat_sizes: list(int)")
    .Attr(kAny)
    .SetShapeFn(all_to_all_shape)
    .Doc(
        "From a share of concat_axis with all of split_axis to all of concat_axis with a share of "
        "split_axis.");

WHALE_DEVICE_OP("WhaleDeviceBroadcast")
    .Input("inputs: N * T")
    .Output("outputs: N * T")
    .Attr(kRanks)
    .Attr(kInStream)
    .Attr("root: int = 0")
    .Attr("shapes: list(shape) >= 1")
    .Attr("N: int >= 1")
    .Attr(kAny)
    .SetShapeFn(broadcast_shape)
    .Doc(
        "The root's inputs, of the given shapes, on every rank; the inputs of the other ranks are "
        "ignored.");

WHALE_DEVICE_OP("WhaleDeviceSend")
    .Input("input: T")
    .Attr("peer: int")
    .Attr(kAny)
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Sends a tensor to the rank `peer` of the communicator.");

WHALE_DEVICE_OP("WhaleDeviceRecv")
    .Output("output: T")
    .Attr("peer: int")
    .Attr("shape: shape = {unknown_rank: true}")
    .Attr(kAny)
    .SetShapeFn([](InferenceContext* c) { return set_shape(c, "shape"); })
    .Doc("Receives a tensor from the rank `peer` of the communicator.");

}  // namespace whale_ops
