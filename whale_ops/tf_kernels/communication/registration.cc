// Names, attributes and shape functions of the ops. All are stateful; those that communicate take
// the communicator's handle first. They are marked as distributed communication, and so is what
// calls them: of any other op TensorFlow makes the error "unavailable" an internal one, and drops
// its payload (see exchange_error).
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
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
    .SetIsDistributedCommunication()
    .SetShapeFn(same_shapes)
    .Doc(
        "Element-wise reduction over the ranks; several inputs travel as one message, in order. "
        "wire_dtype: float32 inputs are rounded to it before they are sent, added in float32, and "
        "the result is rounded to it once more.");

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
    .SetIsDistributedCommunication()
    .SetShapeFn(all_gather_shape)
    .Doc(
        "Concatenation of the ranks' inputs along an axis; sizes: each rank's size along it, "
        "exchanged first when not given.");

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
    .SetIsDistributedCommunication()
    .SetShapeFn(reduce_scatter_shape)
    .Doc(
        "Element-wise reduction over the ranks, of which each rank keeps its share along an axis.");

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
    .SetIsDistributedCommunication()
    .SetShapeFn(all_to_all_shape)
    .Doc(
        "From a share of concat_axis with all of split_axis to all of concat_axis with a share of "
        "split_axis.");

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
    .SetIsDistributedCommunication()
    .SetShapeFn(broadcast_shape)
    .Doc(
        "The root's inputs on every rank; the inputs of the other ranks are ignored. Unknown "
        "shapes are sent first.");

REGISTER_OP("WhaleSend")
    .Input("comm: resource")
    .Input("input: T")
    .Attr("key: string")
    .Attr("peer: int")
    .Attr("ranks: list(int) = []")
    .Attr("T: type")
    .SetIsStateful()
    .SetIsDistributedCommunication()
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
    .SetIsDistributedCommunication()
    .SetShapeFn(recv_shape)
    .Doc("Receives a tensor from the rank `peer` of the communicator.");

REGISTER_OP("WhaleBarrier")
    .Input("comm: resource")
    .Attr("key: string")
    .Attr("ranks: list(int) = []")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Ends when all ranks have started it.");

REGISTER_OP("WhaleCheck")
    .Input("comm: resource")
    .Attr("key: string")
    .Attr("fingerprint: string")
    .Attr("what: string")
    .Attr("ranks: list(int) = []")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(
        "Compares the fingerprint over the ranks; a difference aborts the communicator on all of "
        "them.");

REGISTER_OP("WhaleCall")
    .Input("args: Tin")
    .Output("output: Tout")
    .Attr("Tin: list(type) >= 0")
    .Attr("Tout: list(type) >= 0")
    .Attr("f: string")
    .Attr("bodies: list(func) = []")
    .Attr("shapes: list(shape)")
    .Attr("cancelled_alone: bool = false")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(call_shapes)
    .Doc(
        "What the function makes of the arguments, in the shapes that are given. The function is "
        "never copied into its caller. bodies: functions that the graph is to hold; one of its "
        "nodes names f there, and TensorFlow's graph passes read it once. cancelled_alone: an "
        "error in the function ends what runs in it, and the caller's other nodes after it has "
        "been reported: it is the first that the caller hears of.");

REGISTER_OP("WhaleHold")
    .Input("input: T")
    .Output("output: T")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc(
        "The input, as something that is known only when the step runs: nothing behind it is "
        "computed while TensorFlow optimises.");

REGISTER_OP("WhaleOffload")
    .Input("input: T")
    .Output("output: T")
    .Attr("to_host: bool")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc(
        "The input. Counts its bytes, as those that come to the host's memory from another device, "
        "or go from there to one.");

}  // namespace whale_ops
