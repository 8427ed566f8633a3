"""Runs a captured program unchanged, on this process's TensorFlow: what a capture must not lose shows here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from whale.capture.captured import Captured
from whale.capture.encode import operand_text, to_graph_def
from whale.capture.function import capture_function
from whale.capture.signature import take_apart
from whale.ir.program import Program
from whale.passes.fold import fold
from whale.passes.inline import inline

Pass = Callable[[Program], Program]
NORMALISED: tuple[Pass, ...] = (inline, fold)


def rebuilt(captured: Captured, passes: tuple[Pass, ...] = ()) -> Callable[..., list[tf.Tensor]]:
    """A function of the program's flat inputs that imports the program's GraphDef and runs it."""
    program = captured.program
    for step in passes:
        program = step(program)
    graph_def = to_graph_def(program)
    handles = {v.node: v.handle for v in captured.variables if v.node in program.by_name}

    @tf.function(autograph=False)
    def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
        graph = tf.compat.v1.get_default_graph()
        given = dict(zip(captured.inputs, tensors))
        given.update({name: graph.capture(tensor) for name, tensor in (*captured.captures, *handles.items())})
        results = tf.graph_util.import_graph_def(
            graph_def,
            input_map={f"{name}:0": value for name, value in given.items()},
            return_elements=[f"{operand_text(r)}:0" if r.index == 0 else operand_text(r) for r in program.outputs]
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
            arguments = take_apart(fn, args, kwargs)
            if arguments.key not in runs:
                captured = capture_function(fn, args, kwargs)
                if seen is not None:
                    seen.append(captured)
                runs[arguments.key] = captured, rebuilt(captured, passes)
            captured, run = runs[arguments.key]
            return captured.pack_outputs(run(*map(tf.convert_to_tensor, arguments.tensors)))

        return call

    return wrap
