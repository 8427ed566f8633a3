"""Defines sharding rules of lists of tensors.

The placement of a list is that of its elements: dimension d of ``S(d)`` is a dimension of an element.
"""

from __future__ import annotations

import numpy as np

from whale.ir.layout import Shard, local_shape
from whale.ir.values import Shape, find_numpy_dtype
from whale.sharding_rules.base import UNCHANGED, Local, OpView, Strategy
from whale.sharding_rules.notation import REPLICATED
from whale.sharding_rules.registry import rule


def _set_element_shape_unknown(op: OpView, strategy: Strategy, coordinate: int) -> tuple[np.ndarray | None, ...]:
    """Returns the element shape of a sharded list as unknown (-1), since it differs between ranks.

    The output is used only as the shape of elements for other list ops, which accept unknown sizes.
    """
    if not isinstance(strategy.inputs[0], Shard):
        return (None,)
    kind = op.outputs[0]
    rank = kind.shape[0] if kind.shape else None
    return (np.full(() if rank is None else (rank,), -1, find_numpy_dtype(kind.dtype)),)


def _set_element_shape_attribute(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    """Sets the attribute with the element shape of a TensorListConcat to the local shape."""
    placement, shape = strategy.inputs[0], op.attr("element_shape")
    if not isinstance(placement, Shard) or not isinstance(shape, Shape) or shape.dims is None:
        return UNCHANGED
    # The attribute leaves out the dimension that is concatenated.
    dims = list(shape.dims)
    dims[placement.dim - 1] = placement.local_size(coordinate)
    return Local(attrs={"element_shape": Shape(tuple(dims))})


# Rules of optional values (variants that may hold tensors). An optional with one tensor has that tensor's placement;
# one with several tensors is replicated.
def from_value(op: OpView) -> str:
    """Writes the sharding rule of OptionalFromValue: shardable if it takes one tensor."""
    return "e* -> e*" if len(op.inputs) == 1 and op.inputs[0].dtype != "variant" else REPLICATED


def get_value(op: OpView) -> str:
    """Writes the sharding rule of OptionalGetValue: shardable if it yields one tensor."""
    return "e* -> e*" if len(op.outputs) == 1 and op.outputs[0].dtype != "variant" else REPLICATED


def _set_local_shapes(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    """Sets the attribute with the shape of an optional's tensor to the local shape."""
    placement, shapes = strategy.outputs[0], op.attr("output_shapes")
    if not isinstance(placement, Shard) or not shapes:
        return UNCHANGED
    return Local(attrs={"output_shapes": (Shape(local_shape(shapes[0].dims, placement, coordinate)),)})


RULES = (
    rule("EmptyTensorList TensorListReserve", "[elements], . -> e*", produces_any=True, any_partial=True),
    rule("TensorListFromTensor", "n^ e*, [elements] -> e*", copy="0"),
    rule("TensorListStack", "e*, [elements] -> n^ e*", copy="0"),
    rule("TensorListGetItem", "e*, ., [elements] -> e*", copy="0"),
    rule("TensorListSetItem", "e*, ., e* -> e*", copy="0&2"),
    rule("TensorListPushBack", "e*, e* -> e*", copy="0&1"),
    rule("TensorListPopBack", "e*, [elements] -> e*, e*", copy="0"),
    rule("TensorListResize", "e*, . -> e*", copy="0"),
    rule("TensorListConcatLists", "e*, e* -> e*", copy="0&1"),
    rule("TensorListGather", "e*, ., [elements] -> n^ e*", copy="0"),
    rule("TensorListScatter", "n^ e*, ., [elements] -> e*", copy="0"),
    rule("TensorListScatterV2", "n^ e*, ., [elements], . -> e*", copy="0"),
    rule("TensorListScatterIntoExistingList", "e*, n^ e*, . -> e*", copy="0&1"),
    rule("TensorListConcatV2", "k^ e*, [elements], . -> n^ e*, =.", copy="0"),
    rule("TensorListConcat", "k^ e* -> n^ e*, =.", copy="0", local=_set_element_shape_attribute),
    rule("TensorListSplit", "n^ e*, [elements], . -> k^ e*", copy="0"),
    rule("TensorListLength", "? -> ."),
    rule("TensorListElementShape", "? -> .", known=_set_element_shape_unknown),
    rule("OptionalFromValue", from_value, copy="0"),
    rule("OptionalGetValue", get_value, copy="0", local=_set_local_shapes),
    rule("OptionalNone", "-> e*", produces_any=True, any_partial=True),
    rule("OptionalHasValue", "? -> ."),
)
