"""Views tensors as matrices, and replaces nodes by matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from whale.ir.emitter import Emitter
from whale.ir.program import COMPILED, PRODUCT, Node, Ref
from whale.ir.values import DType, TensorType, require_static_shape

_DTYPES = ("float32", "float64")


class Factor(NamedTuple):
    """An operand of a product: a tensor as matrix (all other dimensions by the last one), possibly transposed."""

    ref: Ref
    type: TensorType
    transposed: bool

    @property
    def matrix(self) -> tuple[int, int]:
        """Returns its sizes as a matrix, before transposition."""
        return find_matrix_sizes(self.type)

    @property
    def sides(self) -> tuple[int, int]:
        """Returns its sizes in the product."""
        return self.matrix[::-1] if self.transposed else self.matrix


def find_matrix_sizes(t: TensorType) -> tuple[int, int]:
    """Returns the sizes of a tensor viewed as matrix: all other dimensions by the last one."""
    shape = require_static_shape(t)
    return prod(shape[:-1]), shape[-1]


def may_multiply(node: Node, types: Sequence[TensorType]) -> bool:
    """Tells whether matrix products support operands and a result of these types, in place of ``node``."""
    if node.attrs.get(COMPILED) or node.marks.on_host:
        return False
    return all(t.dtype in _DTYPES and t.is_static and t.shape and t.elements for t in types)


@dataclass
class ProductNodes:
    """Collects the nodes of a graph in which matrix products replace some.

    Attributes:
      emitter: collects the nodes.
      matrices: tensor -> its reshape to a matrix, which several products may read.
    """

    emitter: Emitter = field(default_factory=lambda: Emitter(0, 1, "", "matrix"))
    matrices: dict[Ref, Ref] = field(default_factory=dict)

    def keep(self, node: Node) -> None:
        """Adds an unchanged node."""
        self.emitter.nodes[node.name] = node

    def add(self, node: Node, factors: Sequence[Factor]) -> None:
        """Adds a product with the control inputs of ``node``, and a reshape with the result's shape and name."""
        e, result = self.emitter, node.outputs[0]
        inputs = []
        for number, one in enumerate(factors):
            if len(one.type.shape or ()) == 2:
                inputs.append(one.ref)
                continue
            if one.ref not in self.matrices:
                name = e.name_part(node.name, f"of_{number}")
                self.matrices[one.ref] = e.reshape(name, one.ref, result.dtype, one.matrix)
            inputs.append(self.matrices[one.ref])
        sides = TensorType(result.dtype, (factors[0].sides[0], factors[1].sides[1]))
        transposed = dict(zip(("transpose_a", "transpose_b"), [one.transposed for one in factors]))
        attrs = {"T": DType(result.dtype), **transposed}
        name = node.name if sides == result else f"{node.name}/{PRODUCT}"
        self.keep(replace(node, name=name, op="MatMul", inputs=tuple(inputs), attrs=attrs, outputs=(sides,)))
        if name != node.name:
            e.reshape(node.name, Ref(name), result.dtype, require_static_shape(result))
