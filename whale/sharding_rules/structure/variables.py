"""Defines sharding rules of variables, and of other ops that yield values without operands.

Variables are read and updated element by element, however they are sharded; a handle has the placement of its value.
Constants and inputs are replicated; iterators and stacks are on the first rank only.
"""

from __future__ import annotations

from whale.ir.layout import Shard, local_shape
from whale.ir.ops import FUSED_UPDATE
from whale.ir.values import Shape
from whale.sharding_rules.base import UNCHANGED, Local, OpView, Strategy, Window
from whale.sharding_rules.embedding import Rows
from whale.sharding_rules.notation import FIRST_RANK, REPLICATED
from whale.sharding_rules.registry import rule

_OPTIMIZERS = ("AdaMax Adadelta Adagrad AdagradDA AdagradV2 Adam AddSign CenteredRMSProp Ftrl FtrlV2 GradientDescent "
               "Momentum PowerSign ProximalAdagrad ProximalGradientDescent RMSProp").split()  # fmt: skip
_SPARSE = ("Adadelta Adagrad AdagradDA AdagradV2 CenteredRMSProp Ftrl FtrlV2 Momentum ProximalAdagrad "
           "ProximalGradientDescent RMSProp").split()  # fmt: skip
_SCATTERS = "Add Sub Mul Div Max Min Update NdAdd NdSub NdMax NdMin NdUpdate".split()
_SOURCES = (
    rule("Const HostConst Placeholder PlaceholderV2 NoOp Restore RestoreSlice RestoreV2 Assert", REPLICATED),
    rule(
        "OneShotIterator IteratorGetNext IteratorGetNextSync IteratorGetNextAsOptional IteratorToStringHandle "
        "MakeIterator ReduceDataset DatasetToSingleElement TensorDataset RepeatDataset",
        FIRST_RANK,
    ),
    rule("StackV2 StackPushV2 StackPopV2", FIRST_RANK),
    rule(
        "TensorArrayV3 TensorArrayGradV3 TensorArrayReadV3 TensorArrayWriteV3 TensorArrayGatherV3 TensorArrayScatterV3",
        FIRST_RANK,
    ),
    rule(
        "ScalarSummary HistogramSummary ImageSummary AudioSummary AudioSummaryV2 TensorSummary TensorSummaryV2 "
        "MergeSummary StringFormat",
        FIRST_RANK,
    ),
    rule("SaveV2 PrintV2", FIRST_RANK),
)


def update(op: OpView) -> str:
    """Writes the sharding rule of an optimizer's update: operands that are no scalars have the variable's elements."""
    return ", ".join("." if t.dtype != "resource" and t.shape == () else "p*" for t in op.inputs) + " ->"


def fused_update(op: OpView) -> str:
    """Writes the sharding rule of Whale's fused update: operands of the variables' shape can be sharded."""
    (shape,) = op.attr("shapes")
    return ", ".join("p*" if t.dtype == "resource" or t.shape == shape.dims else "." for t in op.inputs) + " ->"


def _update_own_part(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    (shape,) = op.attr("shapes")
    return Local(attrs={"shapes": (Shape(local_shape(shape.dims, strategy.inputs[0], coordinate)),)})


def sparse_update(op: OpView) -> str:
    """Writes the sharding rule of an update of some rows: columns can be sharded, rows cannot.

    The row numbers are the last integer operand, and the gradient's rows are the operand before it.
    """
    numbers = max((i for i, t in enumerate(op.inputs) if t.shape and t.dtype in ("int32", "int64")), default=None)
    if numbers is None or len(op.inputs[numbers].shape or ()) != 1:
        return ", ".join("." for _ in op.inputs) + " ->"
    words = {numbers: "i^", numbers - 1: "i^ q*"}
    named = ["." if t.dtype != "resource" and t.shape == () else "v^ q*" for t in op.inputs]
    return ", ".join(words.get(n, word) for n, word in enumerate(named)) + " ->"


def scatter(op: OpView) -> str:
    """Writes the sharding rule of a scatter to a variable: rows can be sharded if it adds (zeros elsewhere)."""
    if op.inputs[1].shape is None or op.inputs[2].shape is None or op.inputs[2].shape == ():
        return ", ".join("." for _ in op.inputs) + " ->"
    sums = op.node.op in ("ResourceScatterAdd", "ResourceScatterSub")
    rows = "v" if sums and op.inputs[1].is_static and op.inputs[2].is_static else "v^"
    return f"{rows} q*, i*^, i*^ q* ->"


def _zero_remote_rows(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    cut = strategy.inputs[0]
    if not isinstance(cut, Shard) or cut.dim != 0 or isinstance(strategy.inputs[1], Shard):
        return UNCHANGED  # ids are sharded as well only if one rank has the whole table and all ids
    return Local(window=Window(1, cut.offset(coordinate), cut.local_size(coordinate), masked=2, runs=cut.blocks))


def _name_ops(prefix: str, stems: list[str]) -> str:
    return " ".join(prefix + s for s in stems)


_VARIABLES = (
    rule("ReadVariableOp", "p* -> p*"),
    rule("VarIsInitializedOp", "? -> ."),
    rule("AssignVariableOp AssignAddVariableOp AssignSubVariableOp", "p*, p* ->"),
    rule(
        "VarHandleOp "
        "VariableShape DestroyResourceOp ResourceCountUpTo ResourceStridedSliceAssign DisableCopyOnRead "
        "IsVariableInitialized CountUpTo _VarHandlesOp _ReadVariablesOp",
        REPLICATED,
    ),
    rule(
        "Variable VariableV2 TemporaryVariable DestroyTemporaryVariable Assign AssignAdd AssignSub StridedSliceAssign",
        REPLICATED,
    ),
    rule(_name_ops("ResourceApply", [*_OPTIMIZERS, "AdamWithAmsgrad", "KerasMomentum"]), update),
    rule(FUSED_UPDATE, fused_update, local=_update_own_part),
    rule(_name_ops("Apply", _OPTIMIZERS), REPLICATED),
    rule(_name_ops("ResourceSparseApply", [*_SPARSE, "KerasMomentum"]), sparse_update),
    rule(_name_ops("SparseApply", _SPARSE), REPLICATED),
    rule(
        "ResourceScatterAdd ResourceScatterSub", scatter, local=_zero_remote_rows, routes=Rows(ids=1, table=0, values=2)
    ),
    rule(_name_ops("ResourceScatter", _SCATTERS[2:7]), scatter, local=_zero_remote_rows),
    rule(_name_ops("ResourceScatter", _SCATTERS[7:]), REPLICATED),
    rule(_name_ops("Scatter", _SCATTERS), REPLICATED),
)


RULES = (*_VARIABLES, *_SOURCES)
