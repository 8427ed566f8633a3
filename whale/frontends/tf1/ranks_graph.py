"""Builds the graph in which a session executes the programs of this process's ranks.

In this graph, variables and other resources have shared names, by which all runs of the session find them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client import session

import whale_ops
from whale.config import Config
from whale.ir.program import Node, Program
from whale.runtime.compile.function_calls import EXECUTOR
from whale.runtime.compile.offload import compute_device
from whale.runtime.compile.tensorflow_functions import lower_to_graph, with_streams
from whale.runtime.context import make_unique_name
from whale.runtime.input.traces import new_streams

# (what is fed, (options, metadata) of Session.run) -> what is fetched
Run = Callable[[Mapping[tf.Tensor, np.ndarray], tuple[Any, Any]], list[Any]]


class RanksGraph:
    """Holds the graph with the ranks' programs, and the plain TensorFlow session that runs it.

    Args:
      config: the tf.compat.v1.ConfigProto of the user's session.
      ranks: number of this process's ranks.
      offload: the run's configuration if ``memory.offload`` is set; None otherwise.

    Raises:
      ConfigError: ``memory.offload`` is set, but this session has no accelerator.
    """

    def __init__(self, config: Any, ranks: int, offload: Config | None = None) -> None:
        self.graph = tf.Graph()
        self.session = PlainSession(graph=self.graph, config=_use_callers_thread(config) if ranks == 1 else config)
        device = "" if offload is None else compute_device(offload, self.session.list_devices())
        # TensorFlow places operations on an accelerator by itself.
        self._computes = device if "CPU" in device else ""
        self._streams = new_streams()
        self._kept: dict[Hashable, tf.Tensor] = {}  # what later runs read of earlier ones, because it has a state

    def close(self) -> None:
        """Closes the session and frees the variables."""
        self.session.close()

    def device(self, op: tf.Operation) -> str:
        """Returns the device for an operation: its own, else that of the variable that it uses, else a default; may be
        "".

        The default is a CPU device beside the host's, if ``memory.offload`` uses one in place of an accelerator;
        otherwise it is "", and TensorFlow places operations on an accelerator by itself.
        """
        handles = [t.op.device for t in op.inputs if t.dtype == tf.resource]
        return str(op.device or next(iter(handles), self._computes))

    def run_of(
        self,
        ranks: Sequence[Program],
        name: str,
        arguments: Sequence[str],
        fed: Sequence[str],
        alone: bool = False,
        on_host: Collection[str] = (),
    ) -> Run:
        """Adds the programs of this process's ranks to the graph, and returns a function that runs them together.

        Args:
          ranks: one program per rank of this process.
          name: prefix for the nodes' names; it is made unique.
          arguments: names of the programs' inputs.
          fed: for each input, the name of the tensor of the user's graph that is fed.
          alone: True if not all ranks make this run, so that it must not advance random streams that the ranks share.
          on_host: names of variables that are kept in host memory beside an accelerator.
        """
        tag = make_unique_name(name)
        inputs: list[Any] = []
        results: list[Any] = []
        effects: list[Any] = []
        for position, program in enumerate(ranks):
            program = _rename_resources(program, position, on_host)
            if not alone:
                program = with_streams(program, f"{self._streams}/{position}")
            names = [f"{r.node}:{r.index}" for r in program.outputs]
            elements = [*names, *program.effects, *(f"{n}:0" for n in arguments)]
            prefix = f"{tag}_rank{position}"
            # A OneShotIterator is shared by its node's name: later runs read that of the first run.
            with_state = {f"{n.name}:0": n.name for n in program.nodes if n.op == "OneShotIterator"}
            known = {t: self._kept[position, k] for t, k in with_state.items() if (position, k) in self._kept}
            with self.graph.as_default(), self.graph.device(self.device):
                found = tf.graph_util.import_graph_def(
                    lower_to_graph(program, prefix), known, return_elements=elements, name=prefix
                )
            found = [known.get(name, element) for name, element in zip(elements, found)]
            for t, k in with_state.items():
                self._kept.setdefault((position, k), self.graph.get_tensor_by_name(f"{prefix}/{t}"))
            if position == 0:
                results = found[: len(names)]
            effects += [
                e if isinstance(e, tf.Operation) else e.op
                for e in found[len(names) : len(names) + len(program.effects)]
            ]
            effects += [t.op for t in found[: len(names)] if position > 0]
            inputs.append(found[len(names) + len(program.effects) :])
        feed_list = [t for of_rank in inputs for t in of_rank]
        call = self.session.make_callable([results, effects], feed_list)

        def run(feeds: Mapping[tf.Tensor, np.ndarray], settings: tuple[Any, Any]) -> list[Any]:
            # A feed that the fetches do not need is not an input.
            by_name = {t.name: v for t, v in feeds.items()}
            values = [by_name[name] for name in fed] * len(inputs)
            if settings == (None, None):
                return call(*values)[0]
            given = {t.ref(): v for t, v in zip(feed_list, values)}
            return self.session._do_run(None, effects, results, given, *settings)

        return run


def _use_callers_thread(config: Any) -> Any:
    """Returns a session's configuration with which operations run on the thread that calls ``run``, as those of
    ``wh.function`` do (see ``make_function_call``); unchanged if the machine has a GPU, or it names another executor.
    """
    found = config_pb2.ConfigProto()
    if config is not None:
        found.CopyFrom(config)
    if (
        found.experimental.executor_type
        or tf.config.list_physical_devices("GPU")
        or found.device_count.get("CPU", 1) > 1
    ):
        return config
    whale_ops.load_ops()
    found.experimental.executor_type = EXECUTOR
    return found


class PlainSession(session.Session):  # type: ignore[misc]
    """A TensorFlow session that runs only in this process.

    ``tf.compat.v1.Session`` cannot be used for this, since Whale replaces it during a run.
    """


def find_name(handle: Node) -> str:
    """Returns the name of a variable in the session: the handle's shared name, else its node's name."""
    return str(handle.attrs.get("shared_name") or handle.name)


def make_rank_prefix(position: int) -> str:
    """Returns the prefix for names of resources of the process's rank number ``position``; "" for the first one."""
    return f"whale_rank{position}/" if position else ""


def _rename_resources(program: Program, position: int, on_host: Collection[str]) -> Program:
    """Gives the resources of a program (variables, tables, queues, iterators) the names that they have in the session.

    Those of the process's first rank have the user's names, those of further in-process ranks a prefix. A resource
    without a shared name gets the name of its node, as in TensorFlow.

    Args:
      position: number of the rank within this process.
      on_host: names of variables that are kept in host memory beside an accelerator.
    """
    prefix = make_rank_prefix(position)

    def rename_node(node: Node) -> Node:
        shared = node.attrs.get("shared_name") if node.stateful and node.op != "OneShotIterator" else None
        if shared is None:
            return node
        if node.op == "VarHandleOp" and find_name(node) in on_host:
            node = node.with_marks(on_host=True)
        return replace(node, attrs={**node.attrs, "shared_name": prefix + (shared or node.name)})

    return program.replace_nodes(tuple(map(rename_node, program.nodes)))
