"""``wh.Session``: a TF1 session whose runs are spread over the ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from whale.capture.v1 import GraphCapture
from whale.errors import ProgramError
from whale.ir.plan import Plan
from whale.ir.program import Program
from whale.lowering.functions import lower_to_graph
from whale.runtime.compile import Compiled, compile_program
from whale.runtime.context import current
from whale.runtime.faults import raise_comm_error

_Run = Callable[[Sequence[Any]], list[Any]]
_tags = itertools.count()


class Session(tf.compat.v1.Session):
    """Runs parts of a graph on all ranks; takes the place of tf.compat.v1.Session, as a context manager too.

    Every rank makes the same runs. What is fed is global (the whole batch), and so is what is fetched. The first run of
    a set of fetches and shapes compiles it. Variables live in this session's ranks: initialise or restore them through
    it.

    Args:
      target: must be "": Whale starts the processes, TensorFlow's servers take no part.
      graph: the graph to run; default the current one. Its variables must be resource variables.
      config: a tf.compat.v1.ConfigProto.

    Raises:
      ClusterError: made before ``wh.init``.
      ProgramError: ``target`` names a server.
    """

    def __init__(self, target: str = "", graph: tf.Graph | None = None, config: Any = None):
        self._whale = current("wh.Session")
        if target:
            raise ProgramError(
                "wh.Session runs in this process",
                given=f"target={target!r}",
                expected='target=""',
                action="start the script with `whale run -np N` and leave the target out",
            )
        super().__init__("", graph, config)
        self._ranks_graph = tf.Graph()
        self._inner = tf.compat.v1.Session(graph=self._ranks_graph, config=config)
        self._runs: dict[Hashable, _Run] = {}
        self._plans: dict[Hashable, Compiled] = {}
        self._captures = GraphCapture(self.graph)
        self._capture_only = False

    def plan(self, fetches: Any, feed_dict: Any = None) -> Plan:
        """The plan of a run (compiled now if it is new; collective between processes). Nothing is run."""
        self._capture_only = True
        try:
            self.run(fetches, feed_dict)
        except _PlanOnly as found:
            return found.plan
        finally:
            self._capture_only = False
        raise ProgramError(
            "nothing is computed by this run",
            given=repr(fetches),
            expected="fetches that are not fed",
            action="fetch a tensor or operation of the step",
        )

    def close(self) -> None:
        """Frees the session's variables and graphs."""
        self._inner.close()
        super().close()

    def make_callable(self, fetches: Any, feed_list: Any = None, accept_options: bool = False) -> Any:
        """A callable that runs ``fetches``, fed in the order of ``feed_list``; same results as ``run``."""
        feeds = list(feed_list or ())

        def call(*values: Any, options: Any = None, run_metadata: Any = None) -> Any:
            if len(values) != len(feeds):
                raise ValueError(f"{len(values)} values for {len(feeds)} feeds: pass one value for each of {feeds}")
            return self.run(fetches, dict(zip(feeds, values)), options, run_metadata)

        return call

    def _do_run(
        self, handle: Any, target_list: Any, fetch_list: Any, feed_dict: Any, options: Any, run_metadata: Any
    ) -> Any:
        """TensorFlow's session has taken fetches and feeds apart and converted values; here is where they run."""
        if handle is not None:
            raise ProgramError(
                "a partial run cannot be spread over ranks",
                given="partial_run",
                expected="run",
                action="run the step as a whole with Session.run",
            )
        feeds = [(ref.deref(), np.asarray(value)) for ref, value in feed_dict.items()]
        key = (
            tuple(t.name for t in fetch_list),
            tuple(op.name for op in target_list),
            tuple((t.name, value.shape) for t, value in feeds),
        )
        if key not in self._plans:
            self._plans[key] = self._compile(key, fetch_list, target_list, feeds)
        if self._capture_only:
            raise _PlanOnly(self._plans[key].plan)
        try:
            return self._runs[key]([value for _, value in feeds])
        except tf.errors.OpError as error:
            raise_comm_error(error, self._whale)
            raise

    def _compile(
        self, key: Hashable, fetches: Sequence[Any], targets: Sequence[Any], feeds: Sequence[tuple[Any, Any]]
    ) -> Compiled:
        context = self._whale
        captured = self._captures.capture([*fetches, *targets], {t: value.shape for t, value in feeds})
        compiled = compile_program(captured.program, context)
        if context.size > 1:
            import whale_ops

            whale_ops.ops()
        tag = f"whale_{compiled.number}_{next(_tags)}"
        inputs: list[Any] = []
        results: list[Any] = []
        effects: list[Any] = []
        for position, program in enumerate(compiled.ranks):
            program = _own_variables(program, position)
            names = [f"{r.node}:{r.index}" for r in program.outputs]
            elements = [*names, *program.effects, *(f"{n}:0" for n in captured.inputs)]
            prefix = f"{tag}_rank{position}"
            with self._ranks_graph.as_default():
                found = tf.graph_util.import_graph_def(
                    lower_to_graph(program, prefix), return_elements=elements, name=prefix
                )
            if position == 0:
                results = found[: len(names)]
            effects += [
                e if isinstance(e, tf.Operation) else e.op
                for e in found[len(names) : len(names) + len(program.effects)]
            ]
            effects += [t.op for t in found[: len(names)] if position > 0]
            inputs.append(found[len(names) + len(program.effects) :])
        feed_list = [t for of_rank in inputs for t in of_rank]
        run = self._inner.make_callable([results, effects], feed_list)
        place = {t.name: i for i, (t, _) in enumerate(feeds)}
        used = [place[name] for name in captured.fed]  # a feed that the fetches do not need is not an input
        copies = len(inputs)
        self._runs[key] = lambda values: run(*([values[i] for i in used] * copies))[0]
        return compiled


class _PlanOnly(BaseException):
    """Leaves Session.run once the plan is known."""

    def __init__(self, plan: Plan):
        self.plan = plan


def _own_variables(program: Program, position: int) -> Program:
    """Variables are found by name in the session: the user's names for the first rank, others for in-process ranks."""
    prefix = f"whale_rank{position}/" if position else ""
    nodes = tuple(
        replace(n, attrs={**n.attrs, "shared_name": prefix + (n.attrs.get("shared_name") or n.name)})
        if n.op == "VarHandleOp"
        else n
        for n in program.nodes
    )
    return program.with_nodes(nodes)
