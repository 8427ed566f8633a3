"""Runs a captured program unchanged, on this process's TensorFlow: what a capture must not lose shows here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from whale.capture.captured import Captured
from whale.capture.encode import encode_graph_def, format_operand
from whale.capture.function import capture_function
from whale.capture.signature import flatten_arguments
from whale.capture.v1 import GraphCapture
from whale.ir.program import Program
from whale.passes.normalize.folding.fold import fold
from whale.passes.normalize.inline import inline

Pass = Callable[[Program], Program]
NORMALISED: tuple[Pass, ...] = (inline, fold)


def rebuilt(captured: Captured, passes: tuple[Pass, ...] = ()) -> Callable[..., list[tf.Tensor]]:
    """A function of the program's flat inputs that imports the program's GraphDef and runs it."""
    program = captured.program
    for step in passes:
        program = step(program)
    graph_def = encode_graph_def(program)
    handles = {v.node: v.handle for v in captured.variables if v.node in program.by_name}

    @tf.function(autograph=False)
    def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
        graph = tf.compat.v1.get_default_graph()
        given = dict(zip(captured.inputs, tensors))
        given.update({name: graph.capture(tensor) for name, tensor in (*captured.captures, *handles.items())})
        results = tf.graph_util.import_graph_def(
            graph_def,
            input_map={f"{name}:0": value for name, value in given.items()},
            return_elements=[f"{format_operand(r)}:0" if r.index == 0 else format_operand(r) for r in program.outputs]
            + list(program.effects),
            name="",
        )
        count = len(program.outputs)
        with tf.control_dependencies(results[count:]):
            return [tf.identity(t) for t in results[:count]]

    return run


def through_program(passes: tuple[Pass, ...] = (), seen: list[Captured] | None = None) -> Callable[[Any], Any]:
    """In place of tf.function: captures at the first call, then runs the rebuilt program."""

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        runs: dict[Any, Any] = {}

        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = flatten_arguments(fn, args, kwargs)
            if arguments.key not in runs:
                captured = capture_function(fn, args, kwargs)
                if seen is not None:
                    seen.append(captured)
                runs[arguments.key] = captured, rebuilt(captured, passes)
            captured, run = runs[arguments.key]
            return captured.pack_outputs(run(*map(tf.convert_to_tensor, arguments.tensors)))

        return call

    return wrap


class ProgramSession:
    """In place of a v1 session: runs rebuilt programs in one real session over the same variables."""

    def __init__(self, graph: tf.Graph, passes: tuple[Pass, ...] = (), seen: list[Captured] | None = None) -> None:
        self.graph, self.passes, self.seen = graph, passes, seen
        self.capture = GraphCapture(graph)
        self.target = tf.Graph()
        self.session = tf.compat.v1.Session(graph=self.target)
        self.built: dict[Any, Any] = {}

    def run(self, fetches: Any, feed_dict: Any = None) -> Any:
        feeds = {t: np.asarray(v) for t, v in (feed_dict or {}).items()}
        leaves = [self.graph.as_graph_element(f, allow_operation=True) for f in tf.nest.flatten(fetches)]
        key = (tuple(f.name for f in leaves), tuple((t.name, v.shape) for t, v in feeds.items()))
        if key not in self.built:
            captured = self.capture.capture(leaves, {t: v.shape for t, v in feeds.items()})
            if self.seen is not None:
                self.seen.append(captured)
            self.built[key] = captured, self._import(captured)
        captured, (inputs, outputs, effects) = self.built[key]
        values = {t.name: v for t, v in feeds.items()}
        found = iter(
            self.session.run([outputs, effects], {i: values[n] for i, n in zip(inputs, captured.fed, strict=True)})[0]
        )
        results = [next(found) if isinstance(leaf, tf.Tensor) else None for leaf in leaves]
        return tf.nest.pack_sequence_as(fetches, results)

    def _import(self, captured: Captured) -> tuple[list[Any], list[Any], list[Any]]:
        program = captured.program
        for step in self.passes:
            program = step(program)
        scope = f"program_{len(self.built)}"
        with self.target.as_default():
            tf.graph_util.import_graph_def(named_variables(program), name=scope)

        def tensor(ref: Any) -> Any:
            return self.target.get_tensor_by_name(f"{scope}/{ref.node}:{ref.index}")

        return (
            [self.target.get_tensor_by_name(f"{scope}/{name}:0") for name in captured.inputs],
            [tensor(ref) for ref in program.outputs],
            [self.target.get_operation_by_name(f"{scope}/{name}") for name in program.effects],
        )

    def close(self) -> None:
        self.session.close()


def named_variables(program: Program) -> Any:
    """The program's GraphDef with variables that keep their identity under another prefix."""
    graph_def = encode_graph_def(program)
    names = {v.node: v.name for v in program.variables}
    for node in graph_def.node:
        if node.name in names:
            node.attr["shared_name"].s = names[node.name].encode()
    return graph_def
