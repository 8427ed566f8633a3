"""Rules of optional values, variants that may hold tensors: with one tensor they are placed like it; with several,
replicated.
"""

from __future__ import annotations

from whale.ir.layout import Split, local_shape
from whale.ir.values import Shape
from whale.sharding_rules.base import UNCHANGED, Local, OpView, Strategy
from whale.sharding_rules.notation import REPLICATED
from whale.sharding_rules.registry import rule


def from_value(op: OpView) -> str:
    """whether it holds one tensor"""
    return "e* -> e*" if len(op.inputs) == 1 and op.inputs[0].dtype != "variant" else REPLICATED


def get_value(op: OpView) -> str:
    """whether it holds one tensor"""
    return "e* -> e*" if len(op.outputs) == 1 and op.outputs[0].dtype != "variant" else REPLICATED


def _set_local_shapes(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    """Sets the shape of what is held, an attribute, to the local one."""
    placement, shapes = strategy.outputs[0], op.attr("output_shapes")
    if not isinstance(placement, Split) or not shapes:
        return UNCHANGED
    return Local(attrs={"output_shapes": (Shape(local_shape(shapes[0].dims, placement, coordinate)),)})


RULES = (
    rule("OptionalFromValue", from_value, copy="0"),
    rule("OptionalGetValue", get_value, copy="0", local=_set_local_shapes),
    rule("OptionalNone", "-> e*", produces_any=True, any_partial=True),
    rule("OptionalHasValue", "? -> ."),
)
