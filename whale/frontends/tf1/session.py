"""Defines ``wh.Session``, a TensorFlow 1 session whose runs are distributed over the ranks.

With float16, a loss scale is fed to each run and adapted after overflows (``ScaledLosses``).

Decision: 0070.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client.session import BaseSession
from tensorflow.python.training import monitored_session

from whale.capture.attrs import LOSS_SCALE
from whale.capture.captured import Captured
from whale.capture.loss_scaling import LossScaleFeed
from whale.capture.v1 import BEGINS, SAVES, GraphCapture, Source, is_loose, retype
from whale.distributed.faults import raise_comm_error
from whale.distributed.trace import open_span
from whale.errors import PlanError, ProgramError
from whale.frontends.tf1.activation import force_sessions
from whale.frontends.tf1.batches import (
    find_batch_readers,
    join_fed_parts,
    join_parts,
    read_parts,
    refuse_fixed_rows,
    replace_fed_rows,
    wrap_with_feed_check,
)
from whale.frontends.tf1.deferred_initializers import DeferredAssignments
from whale.frontends.tf1.one_rank import SingleRankRuns, run_key
from whale.frontends.tf1.ranks_graph import RanksGraph, Run
from whale.frontends.tf1.reads import read_first, read_last
from whale.frontends.tf1.saving import CheckpointRuns
from whale.frontends.tf1.variables import Layout, SessionVariables
from whale.ir.ops import QUEUE_WRITES
from whale.ir.plan import Plan
from whale.ir.program import Program, remove_work
from whale.passes.normalize.inline import inline, specialise
from whale.passes.normalize.unpack_optionals import unpack_optionals
from whale.runtime.annotate import put_in_default_scope, put_in_named_scopes
from whale.runtime.compile.compile import Compiled, compile_program
from whale.runtime.compile.tensorflow_functions import load_ops
from whale.runtime.context import BatchReaders, Context, require_current
from whale.runtime.elastic.elastic_run import refuse_session
from whale.runtime.input.local_batches import describe_brought, exchange, rows_of_values
from whale.runtime.loss_scale import find_loss_scale_feed


class DistributedSession(BaseSession):  # type: ignore[misc]
    """Runs parts of a graph on all ranks; the base class of ``wh.Session`` and ``wh.InteractiveSession``.

    Every rank makes the same runs. Fed values are global (the whole batch), and so are fetched ones. The first run with
    some fetches and shapes compiles a program. Variables live in this session, so they have to be initialised or
    restored through it.

    Operations that bring data into the graph (iterators, dequeues, Python functions of feeds and constants) run on rank
    0, before the rest of the run; their values are then the batch that is divided. Queue runners fill every rank's
    queues, but only rank 0's are read. With ``batch.mode="local"`` every rank feeds or reads a batch of its own, and
    the global batch is their concatenation in order of ranks.

    Args:
      target: must be "": the launcher starts the processes, and no TensorFlow server takes part.
      graph: the graph to run; None: the default graph. Its variables must be resource variables.
      config: a tf.compat.v1.ConfigProto.

    Raises:
      ClusterError: created before ``wh.init``.
      ProgramError: ``target`` names a server.
      ConfigError: ``memory.offload`` is set, but there is no accelerator.
    """

    def __init__(self, target: str = "", graph: tf.Graph | None = None, config: Any = None):
        self._whale = require_current("wh.Session")
        if target:
            raise ProgramError(
                "wh.Session runs in this process, and cannot connect to a TensorFlow server",
                given=f"target={target!r}",
                expected='target=""',
                action="start the script with `whale run -np N` and leave the target out",
            )
        refuse_session(self._whale)
        super().__init__("", graph, config)
        self._fed = threading.local()  # ``rows``: name of a tensor fed by parts -> rows per rank, of this thread's run
        self._acts_between = False
        offloads = self._whale.planning.dry is None and bool(self._whale.config["memory.offload"])
        self._ranks_graph = RanksGraph(config, len(self._whale.ranks), self._whale.config if offloads else None)
        self._runs: dict[Hashable, Run] = {}
        self._plans: dict[Hashable, Compiled] = {}
        self._saving: dict[Hashable, list[tf.Operation]] = {}  # operations of a run that write checkpoints
        self._lock = threading.Lock()  # queue runners run beside the main thread
        self._captures = GraphCapture(self.graph, bool(self._whale.config["memory.recompute"]))
        self._scaled = ScaledLosses(find_loss_scale_feed(self._whale), self._captures)
        self._capture_only = False
        graph = self._ranks_graph
        self._variables = SessionVariables(self._whale, graph)
        self._one_rank = SingleRankRuns(self._whale, self._captures, self._variables, graph, self._lock)
        self._sources = Sources(self._whale, self._captures, self._one_rank, self._lock)
        self._saves = CheckpointRuns(
            self._one_rank, self._variables, self._run_on_all, partial(self._find_operations, ops=SAVES)
        )
        self._waiting: dict[
            Hashable, DeferredAssignments
        ] = {}  # assignments of a run that are made by the run that uses them
        self._layouts: dict[Hashable, dict[str, Layout]] = {}

    def plan(self, fetches: Any, feed_dict: Any = None) -> Plan:
        """Returns the plan of a run without executing it; compiles it if it is new. Collective between processes.

        Raises:
          ProgramError: all fetches are fed, so that there is nothing to plan.
        """
        self._capture_only = True
        try:
            self.run(fetches, feed_dict)
        except _PlanOnly as found:
            return found.plan
        finally:
            self._capture_only = False
        raise ProgramError(
            "wh.Session.plan got fetches for which nothing is computed",
            given=repr(fetches),
            expected="fetches that are not fed",
            action="fetch a tensor or operation of the training step",
        )

    def close(self) -> None:
        """Frees the session's variables and graphs."""
        self._ranks_graph.close()
        super().close()

    def make_callable(self, fetches: Any, feed_list: Any = None, accept_options: bool = False) -> Any:
        """Returns a function that runs ``fetches``, with one argument for each tensor of ``feed_list``."""
        feeds = list(feed_list or ())

        def call(*values: Any, options: Any = None, run_metadata: Any = None) -> Any:
            if len(values) != len(feeds):
                raise ValueError(f"{len(values)} values for {len(feeds)} feeds: pass one value for each of {feeds}")
            return self.run(fetches, dict(zip(feeds, values)), options, run_metadata)

        return call

    def _make_callable_from_options(self, callable_options: Any) -> Any:
        """Returns the callable that graph-mode Keras runs; its fetches, feeds and targets come in a CallableOptions
        proto.
        """
        asked = config_pb2.CallableOptions()
        asked.ParseFromString(callable_options.SerializeToString())
        if asked.tensor_connection:
            raise ProgramError(
                "a callable that feeds one tensor from another cannot be distributed",
                given="CallableOptions.tensor_connection",
                expected="feeds with values only",
                action="feed values, or connect the tensors when the graph is built",
            )
        element = self.graph.as_graph_element
        fetches, feeds = [element(n) for n in asked.fetch], [element(n).ref() for n in asked.feed]
        targets = [element(n) for n in asked.target]

        def call(*values: Any, run_metadata: Any = None) -> Any:
            return self._do_run(None, targets, fetches, dict(zip(feeds, values, strict=True)), None, run_metadata)

        return call

    def run(self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Any:
        """Makes a run as ``tf.compat.v1.Session.run`` does; batches of ``wh.shard`` may be fed, of which each rank
        feeds its rows.
        """
        feeds, self._fed.rows = replace_fed_rows(feed_dict, self._whale)
        try:
            return super().run(fetches, feeds, options, run_metadata)
        finally:
            self._fed.rows = {}

    def _do_run(
        self, handle: Any, target_list: Any, fetch_list: Any, feed_dict: Any, options: Any, run_metadata: Any
    ) -> Any:
        """Makes a run with fetches and feeds that TensorFlow's ``Session.run`` has flattened and converted."""
        values = self._run_parts(handle, target_list, fetch_list, feed_dict, options, run_metadata)
        if (
            self._whale.hooks.between_runs
            and not self._acts_between
            and not _is_only_filling_queues(target_list, fetch_list)
        ):
            self._acts_between = True  # hooks between runs make runs themselves
            try:
                for act in list(self._whale.hooks.between_runs):
                    act()
            finally:
                self._acts_between = False
        return values

    def _run_parts(
        self, handle: Any, target_list: Any, fetch_list: Any, feed_dict: Any, options: Any, run_metadata: Any
    ) -> Any:
        if handle is not None:
            raise ProgramError(
                "a partial run cannot be distributed",
                given="Session.partial_run",
                expected="Session.run",
                action="run the step as a whole with Session.run",
            )
        feeds: Mapping[tf.Tensor, np.ndarray] = {ref.deref(): np.asarray(value) for ref, value in feed_dict.items()}
        settings = options, run_metadata
        if self._whale.planning.meaning is not None:
            fetch_list = [self._whale.planning.meaning.find_fetched(self.graph, t) for t in fetch_list]
        if _is_only_filling_queues(target_list, fetch_list):
            # Queues are read on the first rank. The threads that fill them run on every rank, in no common order.
            return self._one_rank.run([], target_list, feeds, settings)
        if saves := self._find_operations([*fetch_list, *target_list], feeds, SAVES):
            return self._saves.run(saves, fetch_list, target_list, feeds, settings)
        return self._run_on_all(fetch_list, target_list, feeds, settings)

    def _run_on_all(
        self,
        fetch_list: Sequence[Any],
        target_list: Sequence[Any],
        feeds: Mapping[tf.Tensor, np.ndarray],
        settings: tuple[Any, Any],
    ) -> list[Any]:
        """Makes a run on all ranks: first the operations that bring in its data, then the rest.

        Args:
          fetch_list: tensors to fetch.
          target_list: operations to run.
          feeds: values of fed tensors.
          settings: (RunOptions, RunMetadata) of Session.run.

        Returns:
          The values of ``fetch_list``.
        """
        options = settings[0]
        batches = find_batch_readers(self._whale, self.graph)
        feeds = join_fed_parts(feeds, batches, self._whale)
        begun = self._begin_datasets([*fetch_list, *target_list], feeds, options)
        given, done = self._sources.bring_in([*fetch_list, *target_list], feeds, options, self._capture_only, batches)
        done |= begun
        fetches = [t for t in fetch_list if t not in given]
        targets = [op for op in target_list if op.name not in done]
        values = iter(self._run_distributed(fetches, targets, given, done, settings))
        return [given[t] if t in given else next(values) for t in fetch_list]

    def _find_operations(
        self, wanted: Sequence[Any], feeds: Mapping[tf.Tensor, np.ndarray], ops: Any
    ) -> list[tf.Operation]:
        """Returns the operations of op types ``ops`` that would run for the fetches and targets ``wanted``."""
        key = ops, tuple(w.name for w in wanted), frozenset(t.name for t in feeds)
        if key not in self._saving:
            with self._lock:
                self._saving[key] = self._captures.find_operations(wanted, feeds, ops)
        return self._saving[key]

    def _begin_datasets(self, wanted: Sequence[Any], feeds: Mapping[tf.Tensor, np.ndarray], options: Any) -> set[str]:
        """Initialises this rank's iterators if each rank reads its own data (``batch.mode="local"``), as far as
        ``wanted`` asks for it.

        Args:
          wanted: fetches and targets of the run.
          feeds: values of fed tensors.
          options: the RunOptions of Session.run.

        Returns:
          Names of the initialisers that ran; the run on all ranks leaves them out.
        """
        if not self._whale.has_local_batch:
            return set()
        if begins := self._find_operations(wanted, feeds, BEGINS):
            self._one_rank.run([], begins, feeds, (options, None))
        return {op.name for op in begins}

    def _run_distributed(
        self,
        fetches: Sequence[Any],
        targets: Sequence[Any],
        feeds: Mapping[tf.Tensor, np.ndarray],
        done: Collection[str],
        settings: tuple[Any, Any],
    ) -> list[Any]:
        """Makes a run on all ranks, and compiles it first if it is new.

        Args:
          fetches: tensors to fetch.
          targets: operations to run.
          feeds: values of fed tensors, those that were brought in included.
          done: names of operations that have run already.
          settings: (RunOptions, RunMetadata) of Session.run.
        """
        if not fetches and not targets:
            return []
        feeds, answers = self._scaled.extend_run([*fetches, *targets], feeds)
        fetches = [*fetches, *answers]
        local = self._find_fed_rows(feeds)
        key: Hashable = (run_key(fetches, targets, feeds), tuple(local.items()))
        with self._lock:
            captured = None
            if key not in self._waiting:
                captured = self._capture(fetches, targets, feeds, local, done)
                self._waiting[key] = self._variables.find_deferred_assignments(captured, self.graph)
            waiting = self._waiting[key]
            paths = waiting.find_checkpoints(feeds)
            if paths is None:
                key, waiting, paths = (key, "at once"), DeferredAssignments({}), {}
            if key not in self._runs:
                with open_span(self._whale.trace, "compile run", "compile"):
                    captured = captured or self._capture(fetches, targets, feeds, local, done)
                    name = ", ".join(w.name for w in (*fetches, *targets))
                    self._plans[key] = self._compile(key, name, captured, local, waiting)
        if self._capture_only:
            raise _PlanOnly(self._plans[key].plan)
        try:
            self._settle(key)
            results = self._runs[key](feeds, settings)
            self._variables.wait(waiting, paths)
            self._scaled.update_scale(results[len(fetches) - len(answers) :])
            return results[: len(fetches) - len(answers)]
        except tf.errors.OpError as error:
            raise_comm_error(error, self._whale)
            raise

    def _settle(self, key: Hashable) -> None:
        """Moves variables to the layouts that a compiled run needs, and drops runs that were compiled for other layouts
        of them.

        Args:
          key: key of the run among those that the session has compiled.
        """
        moved = self._variables.move_to_layouts(self._layouts[key])
        for other, layouts in list(self._layouts.items()) if moved else ():
            if any(name in layouts and layouts[name] != self._layouts[key][name] for name in moved):
                del self._layouts[other], self._runs[other], self._plans[other]
        if self._variables.on_host.intersection(moved):
            self._one_rank.forget()

    def _find_fed_rows(self, feeds: Mapping[tf.Tensor, np.ndarray]) -> dict[str, tuple[int, ...]]:
        """Returns the number of rows per rank, for fed tensors of which each rank feeds its own part.

        Collective if ``batch.mode`` is "local".
        """
        context = self._whale
        batches, rows = find_batch_readers(context, self.graph), getattr(self._fed, "rows", {})
        if rows or not context.has_local_batch or not feeds or (batches is not None and batches.whole):
            return {t.name: rows[t.name] for t in feeds if t.name in rows}
        names = [t.name for t in feeds]
        marked = [name for name in names if name.partition(":")[0] in context.config["batch.inputs"]]
        found = rows_of_values(exchange(describe_brought(list(feeds.values())), context), names, marked)
        return {name: sizes for name, sizes in zip(names, found) if sizes is not None}

    def _capture(
        self,
        fetches: Sequence[Any],
        targets: Sequence[Any],
        feeds: Mapping[tf.Tensor, np.ndarray],
        local: Mapping[str, tuple[int, ...]],
        done: Collection[str],
    ) -> Captured:
        shapes = {t: (sum(local[t.name]), *v.shape[1:]) if t.name in local else v.shape for t, v in feeds.items()}
        if self._whale.has_local_batch:
            refuse_fixed_rows(shapes)
        captured = self._captures.capture([*fetches, *targets], shapes, done)
        program = read_first(read_last(captured.program))
        if self._whale.has_local_batch:
            program = remove_work(program, {n for n in done if self.graph.get_operation_by_name(n).type in BEGINS})
        if self._whale.planning.meaning is not None:
            program = self._whale.planning.meaning.apply_scopes(program, self.graph)
        captured = put_in_named_scopes(replace(captured, program=program), self._whale)
        return replace(captured, program=put_in_default_scope(captured.program, self._whale))

    def _compile(
        self,
        key: Hashable,
        name: str,
        captured: Captured,
        local: Mapping[str, tuple[int, ...]],
        waiting: DeferredAssignments,
    ) -> Compiled:
        program = waiting.remove_from(captured.program)
        self._scaled.refuse(program)
        known = self._variables.find_known_tiles(program)
        if is_loose(program):
            program = retype(unpack_optionals(specialise(inline(program))))
        parts = {name: local[fed] for name, fed in zip(captured.inputs, captured.fed) if fed in local}
        compiled = compile_program(program, self._whale, parts, known, movable=True)
        load_ops(compiled.ranks)
        self._layouts[key] = self._variables.find_wanted_layouts(compiled)
        on_host = {name for name, (_, _, there) in self._layouts[key].items() if there}
        run = self._ranks_graph.run_of(
            compiled.ranks, f"whale_{compiled.number}", captured.inputs, captured.fed, on_host=on_host
        )
        if find_batch_readers(self._whale, self.graph) is None:
            run = wrap_with_feed_check(run, self._whale, name, compiled.number, set(captured.fed) - set(local))
        self._runs[key] = self._whale.watch_calls(run, name, compiled.number, lambda: compiled.plan)
        return compiled


def _is_only_filling_queues(targets: Sequence[tf.Operation], fetches: Sequence[Any]) -> bool:
    """Returns True if a run only enqueues, as the runs of queue runners do."""
    return bool(targets) and not fetches and all(op.type in QUEUE_WRITES for op in targets)


class Session(DistributedSession, tf.compat.v1.Session):  # type: ignore[misc]
    """Replaces tf.compat.v1.Session; see ``DistributedSession``."""


class InteractiveSession(DistributedSession, tf.compat.v1.InteractiveSession):  # type: ignore[misc]
    """Replaces tf.compat.v1.InteractiveSession, which is the default session from its creation on."""


class _PlanOnly(BaseException):
    """Raised to leave ``Session.run`` once the plan is known, for ``plan``."""

    def __init__(self, plan: Plan):
        self.plan = plan


# Runs what brings data into a session's runs (iterators, dequeues, Python functions) on the first rank, ahead of the
# rest.
class Sources:
    """Finds and runs the operations that bring data into a session's runs, such as iterators and dequeues.

    Args:
      context: the run.
      captures: captures parts of the user's graph.
      one_rank: runs parts of the graph on one rank.
      lock: held while the graph is searched.
    """

    def __init__(
        self, context: Context, captures: GraphCapture, one_rank: SingleRankRuns, lock: threading.Lock
    ) -> None:
        self._context, self._captures, self._one_rank, self._lock = context, captures, one_rank, lock
        self._sources: dict[Hashable, list[Source]] = {}
        self._seen: dict[str, Sequence[int]] = {}  # shapes of what they brought in last

    def bring_in(
        self,
        wanted: Sequence[Any],
        feeds: Mapping[tf.Tensor, np.ndarray],
        options: Any,
        plan_only: bool,
        batches: BatchReaders | None = None,
    ) -> tuple[dict[tf.Tensor, np.ndarray], set[str]]:
        """Runs the operations that bring in data for a run.

        Args:
          wanted: fetches and targets of the run.
          feeds: values that the user feeds.
          options: the RunOptions of Session.run.
          plan_only: True to run nothing, and return zeros of the expected shapes.
          batches: the ranks that read; None: rank 0 reads, and sends the values to all ranks.

        Returns:
          (all feeds: the user's and the values that were brought in; names of the operations that ran).
        """
        given, done = dict(feeds), set[str]()
        while True:
            key = (tuple(w.name for w in wanted), tuple(t.name for t in given))
            if key not in self._sources:
                with self._lock:
                    self._sources[key] = self._captures.find_sources(wanted, given)
            if not self._sources[key]:
                # Values that were brought in go first: the size of the first input is taken as the batch size.
                return {t: given[t] for t in sorted(given, key=lambda t: t in feeds)}, done
            for source in self._sources[key]:
                outputs = list(source.operation.outputs)
                if plan_only:
                    values = [
                        np.zeros(shape, t.dtype.as_numpy_dtype) for t, shape in self._find_expected_shapes(outputs)
                    ]
                    if batches is not None:
                        times = batches.turns * (len(batches.readers) if batches.whole else 1)
                        values = join_parts([values] * times, [t.name for t in outputs])
                else:
                    needed = {t: v for t, v in given.items() if t.name in source.fed}
                    if batches is None:
                        values = self._one_rank.run_on_first_rank(outputs, needed, options)
                    else:
                        read = partial(self._one_rank.run, outputs, [], needed, (options, None))
                        values = read_parts(read, [t.name for t in outputs], batches, self._context)
                    self._seen.update({t.name: v.shape for t, v in zip(outputs, values)})
                given.update(zip(outputs, values))
                done.add(source.operation.name)

    def _find_expected_shapes(self, outputs: Sequence[tf.Tensor]) -> list[tuple[tf.Tensor, Sequence[int]]]:
        """Returns (output, shape) for each output of a source; the shape is static, or else that of the last run.

        Raises:
          ProgramError: the shape is not static, and there was no run so far.
        """
        found: list[tuple[tf.Tensor, Sequence[int]]] = []
        for t in outputs:
            shape = t.shape.as_list() if t.shape.is_fully_defined() else self._seen.get(t.name)
            if shape is None:
                raise ProgramError(
                    "wh.Session.plan does not know the batch size, since no run has read a batch so far",
                    op=t.name,
                    given=f"shape {t.shape}",
                    expected="a static shape, or an earlier run",
                    action="run the step once before wh.Session.plan, or batch with drop_remainder=True",
                )
            found.append((t, shape))
        return found


class ScaledLosses:
    """Feeds the loss scale to the runs of one session's graph, and adapts it.

    Args:
      scale: the run's loss scale; None: losses are not scaled.
      captures: captures parts of the session's graph.
    """

    def __init__(self, scale: LossScaleFeed | None, captures: GraphCapture) -> None:
        self._scale, self._captures = scale, captures
        self._known: dict[Hashable, list[tf.Operation]] = {}

    def extend_run(
        self, wanted: Sequence[Any], feeds: Mapping[tf.Tensor, np.ndarray]
    ) -> tuple[Mapping[tf.Tensor, np.ndarray], list[tf.Tensor]]:
        """Adds what a run with scaled losses needs: a feed for the loss scale, and fetches of the flags "all gradients
        are finite".

        Returns:
          (all feeds, the additional fetches); if the run computes no gradients, ``feeds`` and [].
        """
        if self._scale is None:
            return feeds, []
        key = tuple(w.name for w in wanted), frozenset(t.name for t in feeds)
        if key not in self._known:
            found = self._captures.find_operations(wanted, feeds, ("PlaceholderWithDefault",))
            self._known[key] = [op for op in found if LOSS_SCALE in op.node_def.attr]
        scales = self._known[key]
        fed = {op.outputs[0]: np.float32(self._scale.scale) for op in scales}
        return {**feeds, **fed}, [LossScaleFeed.answer(op) for op in scales]

    def update_scale(self, answers: Sequence[Any]) -> None:
        """Adapts the scale after a run.

        Args:
          answers: the fetched flags "all gradients are finite"; empty: the run computed no gradients.
        """
        if self._scale is not None and answers:
            self._scale.update(all(answers))

    def refuse(self, program: Program) -> None:
        """Raises a PlanError if a program applies gradients of losses that were not scaled, although losses have
        to be.
        """
        if self._scale is None or any(node.marks.unscaled for node in program.nodes):
            return
        update = next((n for n in program.nodes if n.op.startswith(("ResourceApply", "ResourceSparseApply"))), None)
        if update is not None:
            raise PlanError(
                "an update applies gradients of a loss without loss scaling, which underflow in float16",
                op=update.name,
                given="gradients that were built before wh.init, or in a MetaGraph of a run without loss scaling",
                expected='gradients that are built after wh.init with precision.compute_dtype="float16"',
                action='call wh.init() before the graph is built, or set precision.compute_dtype="bfloat16"',
            )


def MonitoredTrainingSession(*args: Any, **kwargs: Any) -> Any:
    """Creates a MonitoredSession whose runs are distributed; every rank has to create one.

    All ranks have the same hooks, and the hooks make the same runs everywhere. Hooks that act every few seconds follow
    rank 0's clock. After ``wh.init`` TensorFlow's own function does the same.

    Args:
      args, kwargs: as for tf.compat.v1.train.MonitoredTrainingSession; ``is_chief`` counts as True on every rank.

    Returns:
      A tf.compat.v1.train.MonitoredSession.

    Raises:
      ClusterError: called before ``wh.init``.
      ProgramError: ``master`` names a server.
    """
    require_current("MonitoredTrainingSession")
    with force_sessions():
        return monitored_session.MonitoredTrainingSession(*args, **kwargs)
