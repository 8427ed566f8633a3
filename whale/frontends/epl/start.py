"""Implements ``epl.init`` and the rules by which a session runs the graphs of an EPL script."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops

from whale.errors import ConfigError, ProgramError
from whale.frontends import start as whale_start
from whale.frontends.epl import building
from whale.frontends.epl.building import is_active
from whale.frontends.epl.cluster import Cluster
from whale.frontends.epl.config import Config
from whale.frontends.epl.env import Env
from whale.frontends.epl.graph import Graph, merge_outputs, unfreeze_graph
from whale.frontends.epl.strategies import PREFIX
from whale.ir.program import Program
from whale.log import log
from whale.runtime.context import BatchReaders, require_current
from whale.runtime.start import begin_again

_READ_OPS = {"TFRecordDataset", "TFRecordDatasetV2", "TextLineDataset", "FixedLengthRecordDataset"} | {
    "FixedLengthRecordDatasetV2"}  # fmt: skip

_READS = ("IteratorGetNext", "IteratorGetNextSync")

VERSION = "0.6.0"  # of the library whose names these are


class WrongStartError(ProgramError, RuntimeError):
    """Raised by ``epl.init`` if eager execution is on. It is also a RuntimeError, which EPL raises and scripts may
    catch.
    """


def switch_to_resources() -> None:
    """Turns on resource variables and control flow v2, since Whale cannot distribute their predecessors."""
    tf.compat.v1.enable_resource_variables()
    tf.compat.v1.enable_control_flow_v2()


def init(config: Config | None = None) -> None:
    """Starts EPL on Whale; every rank calls it before it builds the model.

    A second call forgets the task graphs, collections and configuration of the first one; ranks stay connected.

    Args:
      config: the settings; None: the defaults.

    Raises:
      ConfigError: ``config`` is not an ``epl.Config``, or a setting cannot be honoured.
      ProgramError: eager execution is on.
    """
    if config is not None and not isinstance(config, Config):
        raise ConfigError(
            "the argument of epl.init() is not a configuration",
            given=repr(config),
            expected="an epl.Config",
            action="pass epl.Config({...})",
        )
    if tf.executing_eagerly():
        raise WrongStartError(
            "scripts of the Easy Parallel Library build graphs, and eager execution is on",
            given="epl.init() with eager execution",
            expected="epl.init() with eager execution off, so that the script builds a TensorFlow 1 graph",
            action="call tf.compat.v1.disable_eager_execution() at the start, or write the step as a wh.function",
        )
    config = config or Config()
    env = Env.get()
    env.reset()
    env.config = config
    switch_to_resources()
    if not begin_again(config.to_whale()):
        whale_start.init(config.to_whale())
    building.patch_gradients()
    patch_iterators()
    context = require_current("epl.init()")
    context.planning.meaning = _EplSemantics()
    if context.seeds is not None:
        context.seeds.leave_draws_to_ranks()
    # Task graphs may become stages or splits, which is known only after all of them are built: assume that they do.
    context.scoping.dividing_scope_seen = True
    env.is_ready = True
    env.cluster = Cluster(layout="all" if config.cluster.colocate_split_and_replicate else "auto")
    _tell(config)


def set_default_strategy(strategy: Any) -> None:
    """Starts a new task graph for all code that is built from here on outside of ``epl.replicate`` and ``epl.split``.

    Args:
      strategy: ``epl.replicate(...)``.

    Raises:
      PlanError: another strategy, or ``auto.auto_parallel`` is set.
    """
    require_current("epl.set_default_strategy()")
    Graph.get(may_create=True).set_default_strategy(strategy)


def _tell(config: Config) -> None:
    context = require_current("epl.init()")
    ignored = {
        "gradient_checkpoint.check_gradients": config.gradient_checkpoint.check_gradients,
        "gradient_checkpoint.end_taskgraph": config.gradient_checkpoint.end_taskgraph != -1,
    }
    for name, is_set in ignored.items():
        if is_set and context.rank == 0:
            log.warning(f"the setting {name} of epl.Config has no effect in Whale")


class _EplSemantics:
    """Tells a session how EPL means a graph: which ranks read batches, which scope a node belongs to, and that fetches
    are merged.

    Implements ``whale.runtime.context.GraphSemantics``; the sessions call it while an EPL script runs.
    """

    def find_batch_readers(self, graph: tf.Graph) -> BatchReaders:
        return Env.get().find_graph(graph).layout.batches

    def apply_scopes(self, program: Program, graph: tf.Graph) -> Program:
        mine = Env.get().find_graph(graph)
        paths = mine.layout.paths
        after = _find_after_gradients(program, mine.differentiated)
        if "(ranks=" in "".join(paths.values()):
            # A run that touches only some of the stages, e.g. one that initialises variables, has no stages: all ranks
            # do all of it.
            marks = {n.scope for n in program.nodes if n.op not in ("VarHandleOp", "Const")}
            if not {f"{PREFIX}{k}" for k in paths} <= {mark.rpartition("/")[2] for mark in marks}:
                paths = {}

        def make_path(mark: str, name: str = "") -> str:
            if not mark.startswith(PREFIX):
                return mark
            return "" if name in after else paths.get(int(mark.removeprefix(PREFIX)), "")

        def apply_to_graph(one: Program, top: bool) -> Program:
            nodes = tuple(
                n if not n.scope else replace(n, scope=make_path(n.scope, n.name if top else "")) for n in one.nodes
            )
            variables = tuple(replace(v, scope=make_path(v.scope)) for v in one.variables)
            functions = {name: apply_to_graph(f, False) for name, f in one.functions.items()}
            return replace(one, nodes=nodes, variables=variables, functions=functions)

        return apply_to_graph(program, True)

    def find_fetched(self, graph: tf.Graph, fetch: Any) -> Any:
        mine = Env.get().find_graph(graph)
        self._divide_files(mine, graph)
        merge_outputs(mine, graph)
        return mine.merged.get(fetch.name, fetch)

    def _divide_files(self, mine: Graph, graph: tf.Graph) -> None:
        """Makes each replica read its own files, if the setting ``io.slicing`` is on; done once per graph, before the
        first run.

        Args:
          mine: the epl.Graph of ``graph``.
          graph: the TensorFlow graph with the datasets.
        """
        io = Env.get().config.io
        readers = mine.layout.batches.readers
        if not io.slicing or mine.sliced or len(readers) < 2:
            return
        mine.sliced = True
        replica = sum(reader <= require_current("io.slicing").rank for reader in readers) - 1
        with unfreeze_graph(graph):
            slice_files(graph, replica, len(readers), io.drop_last_files, io.unbalanced_io_slicing)


def _find_after_gradients(program: Program, differentiated: set[str]) -> set[str]:
    """Returns the names of nodes that depend on gradients, such as clipping and updates, which belong to no task graph.

    Args:
      differentiated: names of the nodes that output gradients.
    """
    found: set[str] = set()
    for node in program.nodes:
        if node.name not in differentiated and any(r.node in found or r.node in differentiated for r in node.inputs):
            found.add(node.name)
    return found


def patch_iterators() -> None:
    """Makes dimension 0 of what iterators yield unknown in EPL scripts' graphs, whatever datasets or ``set_shape``
    declare.

    Scripts declare a replica's batch size, but the graph computes with the rows of all replicas. Patches once per
    process.
    """
    if hasattr(iterator_ops, "_whale_epl"):
        return
    iterator_ops._whale_epl = True
    begin = iterator_ops.Iterator.__init__

    @functools.wraps(begin)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        if is_active():
            self._element_spec = tf.nest.map_structure(_open_shape, self._element_spec)
            flat = [s.shape for s in tf.nest.flatten(self._element_spec) if isinstance(s, tf.TensorSpec)]
            if len(flat) == len(self._flat_tensor_shapes):
                self._flat_tensor_shapes = flat

    iterator_ops.Iterator.__init__ = __init__
    told = tf.Tensor.set_shape

    @functools.wraps(told)
    def set_shape(self: Any, shape: Any) -> None:
        if is_active() and not hasattr(self, "numpy") and self.op.type in _READS:
            shape = tf.TensorShape(shape)
            shape = tf.TensorShape([None, *shape[1:]]) if shape.rank else shape
        told(self, shape)

    tf.Tensor.set_shape = set_shape


def _open_shape(spec: Any) -> Any:
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        return spec
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype, spec.name)


_MAPS = {"FlatMapDataset", "InterleaveDataset", "ParallelInterleaveDataset"} | {
    f"ParallelInterleaveDatasetV{n}" for n in (2, 3, 4)}  # fmt: skip


def slice_files(graph: tf.Graph, replica: int, replicas: int, drop_last: bool, unbalanced: bool) -> int:
    """Makes each dataset of ``graph`` that lists files read every ``replicas``-th file, beginning with file
    ``replica``.

    Args:
      drop_last: True to leave out the last files if the number of files is not a multiple of ``replicas``.
      unbalanced: True to allow some replicas one file more than others.

    Returns:
      The number of file lists that were divided.

    Raises:
      ProgramError: the number of files is no multiple of ``replicas``, or not known, and the options do not allow this.
    """
    found = [op for op in graph.get_operations() if op.type == "TensorSliceDataset" and _is_naming_files(op)]
    for op in found:
        uses = [(use, i) for use in op.outputs[0].consumers() for i, t in enumerate(use.inputs) if t is op.outputs[0]]
        count = op.inputs[0].shape.as_list()[0]
        if not unbalanced and (count is None or count % replicas) and not (drop_last and count is not None):
            raise ProgramError(
                "files cannot be divided evenly among the replicas",
                op=op.name,
                given=f"{'an unknown number of' if count is None else count} files for {replicas} replicas",
                expected=f"a multiple of {replicas} files",
                action="set io.unbalanced_io_slicing; or set io.drop_last_files, for which the number of files has to "
                "be known when the graph is built",
            )
        kept = {"output_types": [tf.string], "output_shapes": [tf.TensorShape([])]}
        files: Any = op.outputs[0]
        if drop_last and count is not None and count % replicas:
            even = tf.constant(count - count % replicas, tf.int64)
            files = tf.raw_ops.TakeDataset(input_dataset=files, count=even, **kept)
        mine = tf.raw_ops.ShardDataset(
            input_dataset=files,
            num_shards=tf.constant(replicas, tf.int64),
            index=tf.constant(replica, tf.int64),
            **kept,
        )
        for use, place in uses:
            use._update_input(place, mine)
    return len(found)


def _is_naming_files(op: tf.Operation) -> bool:
    """Returns True if a TensorSliceDataset yields file names, which an interleave or flat_map after it opens."""
    if len(op.inputs) != 1 or op.inputs[0].dtype != tf.string or op.inputs[0].shape.rank != 1:
        return False
    functions = {f.signature.name: f for f in op.graph.as_graph_def().library.function}
    pending = [op]
    while pending:
        one = pending.pop()
        if one.type in _MAPS:
            return _is_opening_files(one.get_attr("f").name, functions)
        pending += [use for t in one.outputs for use in t.consumers() if use.type.endswith("Dataset")]
    return False


def _is_opening_files(name: str, functions: Mapping[str, Any]) -> bool:
    """Returns True if function ``name``, or one that it refers to, contains a dataset op that opens files."""
    nodes = functions[name].node_def
    inner = {a.func.name for n in nodes for a in n.attr.values() if a.func.name in functions}
    return any(n.op in _READ_OPS for n in nodes) or any(_is_opening_files(other, functions) for other in inner)
