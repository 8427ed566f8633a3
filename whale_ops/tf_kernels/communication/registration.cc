// Names, attributes and shape functions of the ops. All are stateful, and take the communicator's
// handle first. They are marked as distributed communication, and so are ops that call them: for
// any other op TensorFlow converts the error "unavailable" to an internal one and drops its payload
// (see exchange_error).
#include "tensorflow/core/framework/common_shape_fns.h"
#include "whale_ops/tf_kernels/communication/shapes.h"

namespace whale_ops {
namespace {

constexpr char kReduction[] = "reduction: {'sum', 'min', 'max', 'prod'} = 'sum'";
constexpr char kReducible[] =
    "T: {half, bfloat16, float, double, int8, int16, int32, int64, uint8, uint16, uint32, uint64, "
    "bool, complex64, complex128}";

}  // namespace

REGISTER_OP("WhaleCommunicator")
    .Output("handle: resource")
    .Attr("communicator: string")
    .Attr("rank: int = -1")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(
        "Handle of the communicator that the host program made under this name; rank -1: the only "
        "rank in this process.");

WHALE_EXCHANGE_OP("WhaleAllReduce")
    .Input("inputs: N * T")
    .Output("outputs: N * T")
    .Attr(kReduction)
    .Attr("N: int >= 1")
    .Attr(kReducible)
    .Attr("wire_dtype: {'', 'float16', 'bfloat16'} = ''")
    .SetShapeFn(same_shapes)
    .Doc(
        "Element-wise reduction over the ranks; several inputs travel as one message, in order. "
        "wire_dtype: float32 inputs are rounded to it before they are sent, added in float32, and "
        "the result is rounded to it once more.");

WHALE_EXCHANGE_OP("WhaleAllGather")
    .Input("inputs: N * T")
    .Output("outputs: N * T")
    .Attr("axis: int = 0")
    .Attr("sizes: list(int) = []")
    .Attr("N: int >= 1 = 1")
    .Attr("T: type")
    .SetShapeFn(all_gather_shape)
    .Doc(
        "Concatenation of the ranks' inputs along an axis; sizes: each rank's size along it, "
        "exchanged first when not given. Several inputs, of given sizes, travel as one message.");

WHALE_EXCHANGE_OP("WhaleReduceScatter")
    .Input("input: T")
    .Output("output: T")
    .Attr(kReduction)
    .Attr("axis: int = 0")
    .Attr("sizes: list(int)")
    .Attr(kReducible)
    .SetShapeFn(reduce_scatter_shape)
    .Doc(
        "Element-wise reduction over the ranks, of which each rank keeps its share along an axis.");

WHALE_EXCHANGE_OP("WhaleAllToAll")
    .Input("input: T")
    .Output("output: T")
    .Attr("split_axis: int")
    .Attr("split_sizes: list(int)")
    .Attr("concat_axis: int")
    .Attr("concat_sizes: list(int)")
    .Attr("T: type")
    .SetShapeFn(all_to_all_shape)
    .Doc(
        "From a share of concat_axis with all of split_axis to all of concat_axis with a share of "
        "split_axis.");

WHALE_EXCHANGE_OP("WhaleBroadcast")
    .Input("inputs: N * T")
    .Output("outputs: N * T")
    .Attr("root: int = 0")
    .Attr("shapes: list(shape) = []")
    .Attr("N: int >= 1")
    .Attr("T: type")
    .SetShapeFn(broadcast_shape)
    .Doc(
        "The root's inputs on every rank; the inputs of the other ranks are ignored. Unknown "
        "shapes are sent first.");

WHALE_EXCHANGE_OP("WhaleSend")
    .Input("input: T")
    .Attr("peer: int")
    .Attr("T: type")
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Sends a tensor to the rank `peer` of the communicator.");

WHALE_EXCHANGE_OP("WhaleRecv")
    .Output("output: T")
    .Attr("peer: int")
    .Attr("shape: shape = {unknown_rank: true}")
    .Attr("T: type")
    .SetShapeFn([](InferenceContext* c) { return set_shape(c, "shape"); })
    .Doc("Receives a tensor from the rank `peer` of the communicator.");

WHALE_EXCHANGE_OP("WhaleBarrier")
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Ends when all ranks have started it.");

WHALE_EXCHANGE_OP("WhaleCheck")
    .Attr("fingerprint: string")
    .Attr("what: string")
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(
        "Compares the fingerprint over the ranks; a difference aborts the communicator on all of "
        "them.");

}  // namespace whale_ops
