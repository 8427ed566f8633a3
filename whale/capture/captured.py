"""Defines the result of a capture: the program, and its links to the user's objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from whale.ir.program import Program


@dataclass(frozen=True, slots=True)
class CapturedVariable:
    """A variable of the program.

    Attributes:
      node: the program's node that yields its handle.
      name: unique within the program.
      variable: the tf.Variable; None in a v1 graph that does not list it in a collection.
      handle: its resource handle (eager, or a tensor of the v1 graph).
    """

    node: str
    name: str
    variable: Any
    handle: tf.Tensor


@dataclass(frozen=True)
class Traced:
    """The links between a program and the user's objects.

    Attributes:
      inputs: Placeholder nodes that take the caller's tensors, in flat order.
      captures: other tensors that are passed at each call (tables, iterators, variants, constants too large for a
        graph), as (Placeholder node, tensor).
      variables: in the order of the program's.
      function: the traced ConcreteFunction; None for a v1 graph.
      structured_outputs: the return value of the user's function, with the trace's tensors as leaves.
      fed: of a v1 graph: names of the fed tensors that ``inputs`` take.
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
    """A captured program.

    Attributes:
      program: its inputs are ``inputs`` and then the nodes of ``captures``.
      read_s: seconds that reading the trace into the program took.
    """

    program: Program = field(kw_only=True)
    read_s: float = field(default=0.0, kw_only=True)
