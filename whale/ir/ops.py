"""Defines named sets of op types (traits), such as ``COLLECTIVES`` or ``READS``.

Passes, lowering, runtime and cost model classify ops by these sets. A fact about op types is defined here only once;
code that needs a larger or smaller set says so with the reason: ``VIEWS | {"Cast"}  # because ...``. Facts about a
single op (its sharding rule, its cost formula, its kernel) are kept with the rules, formulas and kernels.
"""

from __future__ import annotations


def _split_names(names: str) -> frozenset[str]:
    return frozenset(names.split())


def _prefix_names(prefix: str, stems: str) -> frozenset[str]:
    return frozenset(prefix + stem for stem in stems.split())


# -- between ranks

ALL_REDUCE, HOROVOD_ALL_REDUCE = "WhaleAllReduce", "HorovodGroupedAllreduce"
# Each rank's tensors are summed (or reduced otherwise), and all ranks have the result: by Whale or by Horovod.
ALL_REDUCES = frozenset({ALL_REDUCE, HOROVOD_ALL_REDUCE})
# Tensors are reduced over ranks, wherever the result lies.
RANK_REDUCTIONS = ALL_REDUCES | {"WhaleReduceScatter"}
# Rows of tables go between those who have them and those who asked for them; how many, only the run knows.
ROW_EXCHANGES = _split_names("WhaleRouteIds WhaleReturnRows WhaleSendRows")
# All ranks of a group take part, each with its share.
COLLECTIVES = RANK_REDUCTIONS | ROW_EXCHANGES | _split_names("WhaleAllGather WhaleAllToAll WhaleBroadcast")
# One rank gives, one takes.
POINT_TO_POINT = _split_names("WhaleSend WhaleRecv")
# Tensors move between ranks.
EXCHANGES = COLLECTIVES | POINT_TO_POINT
# Exchange -> the op that carries it out in a device's own memory; only programs that are about to run have these ops.
ON_DEVICE = {
    f"Whale{kind}": f"WhaleDevice{kind}"
    for kind in ("AllReduce", "AllGather", "ReduceScatter", "AllToAll", "Broadcast", "Send", "Recv")
}
# Ranks wait for each other, and no tensor moves.
MEETINGS = _split_names("WhaleBarrier WhaleCheck")

# -- functions

LOOPS = _split_names("While StatelessWhile")
BRANCHES = _split_names("If StatelessIf Case StatelessCase")
# They run functions, whose graphs a plan lays out like the main graph.
HAS_BODIES = LOOPS | BRANCHES
# They run one function, once; WhaleCall runs the function of a micro-batch.
CALLS = _split_names("PartitionedCall StatefulPartitionedCall WhaleCall")
# They run a function for every element of a dataset: what a loop over a dataset becomes in a traced function.
DATASET_LOOPS = _split_names("ReduceDataset ScanDataset")
# They call Python, which may have a state.
PYTHON_FUNCTIONS = _split_names("PyFunc EagerPyFunc")
QUEUE_READS = _split_names("QueueDequeueV2 QueueDequeueManyV2 QueueDequeueUpToV2")
QUEUE_WRITES = _split_names("QueueEnqueueV2 QueueEnqueueManyV2 QueueCloseV2")
# They change tables and queues; every process has its own.
OBJECT_UPDATES = (
    QUEUE_READS | QUEUE_WRITES | _split_names("LookupTableInsertV2 LookupTableRemoveV2 LookupTableImportV2")
)
# They look at tables and queues, which stay as they are.
OBJECT_READS = _split_names("LookupTableFindV2 LookupTableSizeV2 LookupTableExportV2 QueueSizeV2 QueueIsClosedV2")
# A loop's iterator over a dataset, and what it has read.
ITERATOR_READS = _split_names("MakeIterator IteratorGetNext IteratorGetNextSync IteratorGetNextAsOptional")
ELEMENTS_READ = _split_names("OptionalHasValue OptionalGetValue")
# The ops that make up loops and branches in TensorFlow 1.
FRAMES = _split_names(
    "Enter Exit Switch Merge NextIteration LoopCond RefEnter RefExit RefSwitch RefMerge RefNextIteration"
)
# All turns of a loop, as the program of one operation.
FUSED_LOOP = "WhaleLoop"
# These decide which nodes run, and how often: their placements follow from their bodies or frames, not from a rule.
CONTROL_FLOW = HAS_BODIES | CALLS | FRAMES | _split_names("For ControlTrigger")

# -- operands handed on

# The one result is the one operand: its elements, its shape, its memory, and nothing else happens.
IDENTITIES = _split_names("Identity StopGradient PreventGradient Snapshot")
# The result is the first operand's elements, in its memory, in another shape.
RESHAPES = _split_names("Reshape ExpandDims Squeeze")
# The result is the first operand's memory, and nothing else happens.
VIEWS = IDENTITIES | RESHAPES
# Result i shares the memory of operand i, whatever else happens.
ALIASES = VIEWS | _split_names("IdentityN EnsureShape CheckNumerics CheckNumericsV2 WhaleHold")
# They read an operand's shape and not its values.
ASKS_SHAPE = _split_names("Shape ShapeN Size Rank")

# -- variables

# Rows or elements of a variable (operand 0) are read, by their numbers.
READS_ROWS = _split_names("ResourceGather ResourceGatherNd")
# A variable is looked at, and stays as it is.
READS = READS_ROWS | _split_names("ReadVariableOp _ReadVariablesOp VariableShape VarIsInitializedOp")
# Something is added to a variable (operand 0).
ADDS = _split_names("AssignAddVariableOp AssignSubVariableOp")
# A variable (operand 0) gets a value of its shape.
ASSIGNS = ADDS | {"AssignVariableOp"}
_OPTIMIZERS = (
    "Adadelta Adagrad AdagradDA AdagradV2 CenteredRMSProp Ftrl FtrlV2 Momentum ProximalAdagrad ProximalGradientDescent "
    "RMSProp"
)
_DENSE_OPTIMIZERS = f"{_OPTIMIZERS} AdaMax Adam AddSign GradientDescent PowerSign"
_SCATTERS = "Add Sub Mul Div Max Min Update NdAdd NdSub NdMax NdMin NdUpdate"
# An optimizer's whole update of a variable, and of its state (the operands that are handles).
APPLIES = _prefix_names("ResourceApply", f"{_DENSE_OPTIMIZERS} AdamWithAmsgrad KerasMomentum")
# The same for some rows, whose numbers are an operand.
APPLIES_ROWS = _prefix_names("ResourceSparseApply", f"{_OPTIMIZERS} KerasMomentum")
# Rows or elements of a variable (operand 0) are changed, by their numbers.
SCATTERS = _prefix_names("ResourceScatter", _SCATTERS)
# Scatters that change each row by itself, where each row number occurs once.
ROW_SCATTERS = _prefix_names("ResourceScatter", "Add Sub Update")
# They advance the state of a random generator, which is a variable (operand 0).
ADVANCES = _split_names(
    "RngSkip RngReadAndSkip StatefulRandomBinomial StatefulStandardNormal StatefulStandardNormalV2 "
    "StatefulTruncatedNormal StatefulUniform StatefulUniformFullInt StatefulUniformInt"
)
# Whale's own ops that update several variables (the first operands) at once.
FUSED_UPDATE, SCATTER_ROWS = "WhaleUpdate", "WhaleScatterRows"
FUSED_UPDATES = frozenset({FUSED_UPDATE, SCATTER_ROWS})
# A variable changes.
UPDATES = (
    ASSIGNS
    | APPLIES
    | APPLIES_ROWS
    | SCATTERS
    | ADVANCES
    | _split_names("ResourceStridedSliceAssign ResourceCountUpTo")
    | FUSED_UPDATES
)
# Reference variables of TensorFlow 1, and the ops that update them.
REF_VARIABLES = _split_names("Variable VariableV2 TemporaryVariable")
REF_UPDATES = (
    _split_names("Assign AssignAdd AssignSub StridedSliceAssign CountUpTo")
    | _prefix_names("Apply", _DENSE_OPTIMIZERS)
    | _prefix_names("SparseApply", _OPTIMIZERS)
    | _prefix_names("Scatter", _SCATTERS)
)

# -- lookups and products

# Rows of a table (operand 0) are read, by one number each, so the table may lie split: a variable, or a tensor.
ROW_LOOKUPS = _split_names("Gather GatherV2 ResourceGather")
# Rows or elements of a table (operand 0) are read; like matrix products, these ops are where a model uses a weight.
LOOKUPS = ROW_LOOKUPS | READS_ROWS | {"GatherNd"}
MATMULS = _split_names("MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3")
# Gradients of a convolution's filter: sums over rows of the batch.
FILTER_GRADIENTS = _split_names(
    "Conv2DBackpropFilter Conv2DBackpropFilterV2 Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter "
    "WhaleDepthwiseFilterGradient"
)
CONVOLUTIONS = FILTER_GRADIENTS | _split_names(
    "Conv Conv2D Conv2DBackpropInput Conv2DBackpropInputV2 Conv3D Conv3DBackpropInputV2 DepthwiseConv2dNative "
    "DepthwiseConv2dNativeBackpropInput"
)
# Products that an equation describes.
EINSUMS = _split_names("Einsum WhaleEinsum")
# Elements of operands are multiplied, and products summed over dimensions that the result lacks.
CONTRACTIONS = MATMULS | CONVOLUTIONS | EINSUMS

# -- random numbers

# They draw from a stream of the op's own; without seeds (`seed`, `seed2`), each run draws another.
DRAWS = _split_names(
    "Multinomial ParameterizedTruncatedNormal RandomCrop RandomGamma RandomPoisson RandomPoissonV2 RandomShuffle "
    "RandomStandardNormal RandomUniform RandomUniformInt SampleDistortedBoundingBox SampleDistortedBoundingBoxV2 "
    "TruncatedNormal"
)
# Stateful op -> the stateless op that draws the same numbers from a key and a counter, as TensorFlow's kernels share
# their code.
DRAWS_BY_COUNTER = {
    "RandomUniform": "StatelessRandomUniformV2",
    "RandomStandardNormal": "StatelessRandomNormalV2",
    "TruncatedNormal": "StatelessTruncatedNormalV2",
    "RandomUniformInt": "StatelessRandomUniformIntV2",
}
# Element i of their result is number i of the stream that a key and a counter name, so a shard can be drawn by itself.
STREAM_DRAWS = _split_names("StatelessRandomUniformV2 StatelessRandomNormalV2 StatelessTruncatedNormalV2")
# Their draws follow from their operands alone.
STATELESS_DRAWS = STREAM_DRAWS | _split_names(
    "RandomIndexShuffle StatelessMultinomial StatelessParameterizedTruncatedNormal StatelessRandomBinomial "
    "StatelessRandomGammaV2 StatelessRandomGammaV3 StatelessRandomNormal StatelessRandomPoisson StatelessRandomUniform "
    "StatelessRandomUniformFullInt StatelessRandomUniformFullIntV2 StatelessRandomUniformInt "
    "StatelessRandomUniformIntV2 StatelessSampleDistortedBoundingBox StatelessShuffle StatelessTruncatedNormal"
)
# Numbers that a seed, a key or a generator's state decides.
RANDOM = DRAWS | STATELESS_DRAWS | (ADVANCES - {"RngSkip", "RngReadAndSkip"})  # these two yield no numbers

# -- lists of tensors

# A tensor, or a reference to one, comes into a list (operand 0) or out of it.
LIST_PUTS = _split_names("TensorListPushBack TensorListSetItem")
LIST_TAKES = _split_names("TensorListGetItem TensorListPopBack")
# All tensors of a list become one.
LIST_STACKS = _split_names("TensorListStack TensorListGather")
# An operand or the result is a list of tensors.
LISTS = LIST_PUTS | LIST_TAKES | LIST_STACKS | _split_names(
    "EmptyTensorList TensorListConcat TensorListConcatLists TensorListConcatV2 TensorListElementShape "
    "TensorListFromTensor TensorListLength TensorListPushBackBatch TensorListReserve TensorListResize "
    "TensorListScatter TensorListScatterIntoExistingList TensorListScatterV2 TensorListSplit"
)  # fmt: skip

# -- what layers are made of

# The mean, variance and normalisation of a batch in one kernel; and the gradient of that.
BATCH_NORMS = _split_names("FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3")
BATCH_NORM_GRADIENTS = _split_names("FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3")
SOFTMAXES = _split_names("Softmax LogSoftmax")
# The loss (result 0) and the logits' gradient (result 1), of the whole vocabulary at once.
CROSS_ENTROPIES = _split_names(
    "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits WhaleSparseCrossEntropy"
)
# Dimensions (operand 1) are reduced away.
FOLDS = _split_names("Sum Prod Max Min")  # without elements these yield their identity; a mean without elements is NaN
REDUCTIONS = FOLDS | _split_names("Mean All Any")
# Rows are written, or added, to a tensor (operand 0) at positions (operand 1).
TENSOR_SCATTERS = _split_names(
    "TensorScatterAdd TensorScatterMax TensorScatterMin TensorScatterSub TensorScatterUpdate"
)
# Its kernel fails, or leaves results unwritten, where an operand has no elements.
NEEDS_ELEMENTS = TENSOR_SCATTERS | _split_names(
    "BandedTriangularSolve Bincount BlockLSTMGrad Conv Conv2D Conv2DBackpropFilter Conv2DBackpropFilterV2 "
    "Conv2DBackpropInput Conv2DBackpropInputV2 Conv3D Conv3DBackpropFilter Conv3DBackpropFilterV2 Conv3DBackpropInput "
    "Conv3DBackpropInputV2 DenseBincount DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter "
    "DepthwiseConv2dNativeBackpropInput GatherNd LSTMBlockCell MaxPoolWithArgmax MirrorPad MirrorPadGrad ResizeArea "
    "ResizeBicubic ResizeBilinear ResizeNearestNeighbor Reverse ScaleAndTranslate ScatterNd ScatterNdNonAliasingAdd "
    "SparseSegmentSumGrad UnravelIndex"
)
