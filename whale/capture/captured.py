"""Defines what a capture returns: the program, and which variables and tensors of the user its nodes stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from whale.ir.program import Program


@dataclass(frozen=True, slots=True)
class CapturedVariable:
    """Represents a variable of a captured program.

    Attributes:
      node: name of the program's node that outputs the variable's handle.
      name: name of the variable, unique within the program.
      variable: the tf.Variable; None if a v1 graph does not list the variable in a collection.
      handle: the resource handle: an eager tensor, or a tensor of the v1 graph.
    """

    node: str
    name: str
    variable: Any
    handle: tf.Tensor


@dataclass(frozen=True)
class Traced:
    """Links a program's nodes to the user's variables, tensors and return value.

    Attributes:
      inputs: names of the Placeholder nodes that take the caller's tensors, in flat order.
      captures: other tensors that have to be passed at each call (tables, iterators, variants, constants too large for
        a GraphDef), as (name of the Placeholder node, tensor).
      variables: the program's variables, in its order.
      function: the traced ConcreteFunction; None for a v1 graph.
      structured_outputs: what the user's function returned in the trace, with tensors of the trace as leaves.
      fed: for a v1 graph, the names of the fed tensors, in the order of ``inputs``; otherwise empty.
    """

    inputs: tuple[str, ...]
    captures: tuple[tuple[str, tf.Tensor], ...]
    variables: tuple[CapturedVariable, ...]
    function: Any = None
    structured_outputs: Any = None
    fed: tuple[str, ...] = ()

    def pack_outputs(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Packs ``tensors`` (in the order of ``program.outputs``) into the structure that the user's function
        returned.
        """
        leaves = tf.nest.flatten(self.structured_outputs, expand_composites=True)
        values = iter(tensors)
        filled = [next(values) if isinstance(leaf, tf.Tensor) else leaf for leaf in leaves]
        return tf.nest.pack_sequence_as(self.structured_outputs, filled, expand_composites=True)


@dataclass(frozen=True)
class Captured(Traced):
    """Holds a captured program with its links to the user's objects.

    Attributes:
      program: the program; its inputs are the nodes of ``inputs``, then those of ``captures``.
      read_s: seconds that the conversion of the trace to the program took.
    """

    program: Program = field(kw_only=True)
    read_s: float = field(default=0.0, kw_only=True)
