"""Defers a session's assignments of initial values, and of values from checkpoints, until a run uses the variable.

A run that only initialises or restores variables does not show how they will be sharded. Its assignments are recorded,
and done by the first run that uses the variable. If that run's plan shards the variable, each rank computes or reads
only its own part.

Decision: 0047.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import tensorflow as tf

from whale.capture.captured import Captured
from whale.frontends.tf1.ranks_graph import find_name
from whale.ir.marks import Marks
from whale.ir.program import Node, Program, Ref, prune
from whale.runtime.checkpoint.reading import read_region
from whale.runtime.variables.initializer_recording import RecordedInitializer, record_tensor
from whale.runtime.variables.partial_initializers import LITTLE_BYTES, DeferredInitial


@dataclass(frozen=True)
class RestoredValue:
    """Describes a variable's value in a checkpoint.

    Attributes:
      prefix: the string tensor that names the checkpoint's files.
      key: name of the value in the checkpoint.
      shape: shape of the variable.
      dtype: dtype of the variable.
    """

    prefix: tf.Tensor
    key: str
    shape: tuple[int, ...]
    dtype: tf.DType

    @property
    def digest(self) -> str:
        """Returns text by which ranks compare the value: its key in the checkpoint."""
        return self.key

    def make_initial(self, path: str) -> DeferredInitial:
        """Returns a deferred initial value that is read from the checkpoint with prefix ``path``, part by part if
        sharded.
        """
        reader = partial(read_region, path, self.key, self.shape, self.dtype)
        return DeferredInitial(self.shape, self.dtype.name, {}, (), 0, reader)


@dataclass(frozen=True)
class DeferredAssignments:
    """Holds the assignments of a run that are deferred.

    Attributes:
      found: name of the assignment's node -> (name of the variable, the value to assign).
    """

    found: Mapping[str, tuple[str, RecordedInitializer | RestoredValue]]

    def remove_from(self, program: Program) -> Program:
        """Returns ``program`` without the deferred assignments, and without nodes that only they need."""
        nodes = tuple(self._replace_node(node) for node in program.nodes)
        return prune(program.replace_nodes(nodes)) if self.found else program

    def _replace_node(self, node: Node) -> Node:
        if node.name not in self.found:
            return node
        marks = Marks(initial=self.found[node.name][1].digest)  # part of the fingerprint that ranks compare
        return Node(node.name, "NoOp", (), node.controls, {}, (), node.scope, False, marks)

    def find_checkpoints(self, feeds: Mapping[tf.Tensor, np.ndarray]) -> dict[tf.Tensor, str] | None:
        """Returns the checkpoints' paths by the tensors that name them; None if a path is only known when the graph
        runs.

        Raises:
          tf.errors.OpError: there is no such checkpoint, or it lacks a variable or has another shape for it.
        """
        found: dict[tf.Tensor, str] = {}
        wanted = [what for _, what in self.found.values() if isinstance(what, RestoredValue)]
        for prefix in dict.fromkeys(what.prefix for what in wanted):
            path = _find_path(prefix, feeds)
            if path is None:
                return None
            found[prefix] = path
        shapes = {path: _read_shapes(path) for path in found.values()}
        for what in wanted:
            shape = shapes[found[what.prefix]].get(what.key)
            if shape is None:
                raise tf.errors.NotFoundError(
                    None, None, f"Key {what.key} not found in checkpoint {found[what.prefix]}"
                )
            if shape != list(what.shape):
                where = f"{what.key} has shape {shape} in the checkpoint {found[what.prefix]}"
                raise tf.errors.InvalidArgumentError(None, None, f"{where}, and {list(what.shape)} in the graph")
        return found


def _read_shapes(path: str) -> dict[str, list[int]]:
    """Returns the shapes of the values in a checkpoint, by key; raises tf.errors.NotFoundError if there is no
    checkpoint.
    """
    try:
        found: dict[str, list[int]] = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    except ValueError as error:  # what TensorFlow's Python says of a path without files
        raise tf.errors.NotFoundError(None, None, str(error)) from error
    return found


def find_deferred(captured: Captured, graph: tf.Graph) -> DeferredAssignments:
    """Returns those assignments of a captured run that can be deferred.

    The run must do nothing else with the variable, and the value must depend on neither feeds nor other variables.
    """
    program, fed = captured.program, frozenset(captured.fed)
    found: dict[str, tuple[str, RecordedInitializer | RestoredValue]] = {}
    for variable in program.variables:
        handle = program.by_name[variable.node]
        users = [n for n, _ in program.consumers.get(Ref(variable.node), ()) if n.op != "VarIsInitializedOp"]
        shape = variable.type.shape
        if len(users) != 1 or users[0].op != "AssignVariableOp" or shape is None or None in shape:
            continue
        value = graph.get_operation_by_name(users[0].name).inputs[1]
        if value.dtype.name != variable.type.dtype or not value.shape.is_compatible_with(shape):
            continue
        what: RecordedInitializer | RestoredValue | None = _read_restored(
            value, fed, tuple(n for n in shape if n is not None)
        )
        if what is None and variable.type.bytes > LITTLE_BYTES and value.shape == tf.TensorShape(shape):
            what = record_tensor(value, fed)
        if what is not None:
            found[users[0].name] = find_name(handle), what
    return DeferredAssignments(found)


def _read_restored(value: tf.Tensor, fed: Collection[str], shape: tuple[int, ...]) -> RestoredValue | None:
    while value.name not in fed and value.op.type == "Identity":
        value = value.op.inputs[0]
    if value.name in fed or value.op.type != "RestoreV2":
        return None
    keys, specs = (tf.get_static_value(t) for t in value.op.inputs[1:])
    if keys is None or specs is None or specs[value.value_index]:
        return None
    return RestoredValue(value.op.inputs[0], keys[value.value_index].decode(), shape, value.dtype)


def _find_path(prefix: tf.Tensor, feeds: Mapping[tf.Tensor, np.ndarray]) -> str | None:
    while prefix not in feeds and prefix.op.type in ("Identity", "PlaceholderWithDefault"):
        prefix = prefix.op.inputs[0]
    value = feeds[prefix] if prefix in feeds else tf.get_static_value(prefix)
    if value is None or np.shape(value):
        return None
    item = np.asarray(value).item()
    return item.decode() if isinstance(item, bytes) else str(item)
