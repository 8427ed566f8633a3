"""Implements ``wh.Strategy``, which has the interface of tf.distribute but runs one program of global values on all
ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from whale.config import Config
from whale.errors import ProgramError
from whale.frontends import start
from whale.frontends.tf_distribute import steps
from whale.frontends.tf_distribute.steps import refuse_taking
from whale.runtime.context import Context, find_running, require_current
from whale.runtime.input.data import ShardedDataset
from whale.runtime.tf_config import check_tf_config, read_tf_config

_REDUCTIONS = {"SUM": tf.reduce_sum, "MEAN": tf.reduce_mean}


class Strategy:
    """Replaces ``tf.distribute.MirroredStrategy`` and ``MultiWorkerMirroredStrategy`` in a script.

    There is one replica: the program sees global batches and values, as on one device, and the ranks compute it
    together. A function that is passed to ``run`` becomes a ``wh.function`` step; if a ``tf.function`` calls ``run``,
    this becomes the step. Batches of distributed datasets are global, and each rank reads its rows of them. Calls
    ``wh.init`` if the script has not done so.

    Args:
      devices: must be None; ranks are processes that a launcher starts.
      cross_device_ops: ignored, only accepted because tf.distribute has it.
      cluster_resolver: must be None. If ``TF_CONFIG`` is set, it must agree with the ranks that were started.
      communication_options: ignored, only accepted because tf.distribute has it.
      config: a ``wh.Config`` or a mapping, as for ``wh.init``.

    Raises:
      ClusterError: the ranks cannot be connected, or ``TF_CONFIG`` names others.
      ConfigError: ``TF_CONFIG`` cannot be read, or a setting is wrong.
      ProgramError: ``devices`` or ``cluster_resolver`` is given, or ``hvd.init`` was called before.
    """

    def __init__(
        self,
        devices: Any = None,
        cross_device_ops: Any = None,
        cluster_resolver: Any = None,
        communication_options: Any = None,
        *,
        config: Config | Mapping[str, Any] | None = None,
    ) -> None:
        if devices is not None or cluster_resolver is not None:
            raise ProgramError(
                "wh.Strategy always uses all ranks, and accepts neither devices nor a cluster_resolver",
                given=f"devices={devices!r}" if devices is not None else "a cluster_resolver",
                expected="wh.Strategy(), in one process per device",
                action="start as many processes as there are devices: `whale run -np 4 script.py`",
            )
        said = read_tf_config()
        if find_running() is None:
            start.init(config)
        context = require_current("wh.Strategy()")
        if context.planning.own_programs is not None:
            raise ProgramError(
                "wh.Strategy() and hvd.init() cannot be used in one process",
                given="wh.Strategy() after hvd.init()",
                expected="wh.Strategy() for one program of all ranks, or hvd.init() for a program of each rank",
                action="remove one of the two",
            )
        if context.planning.dry is None:
            check_tf_config(said, context.rank, context.size, context.place.launcher)
        steps.install()
        context.saves_apart = True
        self._steps = steps.CompiledSteps()
        self.cluster_resolver = Resolver(said, context.rank, context.size)
        self.extended = Extended(self)

    @property
    def num_replicas_in_sync(self) -> int:
        """Returns 1, since a step computes with the global batch."""
        return 1

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Opens a context for the creation of models and variables; it does nothing, since variables need no strategy
        here.
        """
        _require_context("strategy.scope()")
        yield self

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None, options: Any = None) -> Any:
        """Computes ``fn(*args, **kwargs)`` on all ranks together, and returns what one device would.

        Args:
          fn: the step. Tensors that change from call to call must be arguments.
          args, kwargs: its arguments, with global values.
          options: ignored, only accepted because tf.distribute has it.

        Raises:
          ProgramError: called while a graph is built that is neither a ``wh.function`` nor a tf.function called from
            Python.
        """
        kwargs = kwargs or {}
        if steps.is_inside_step():
            return fn(*args, **kwargs)
        _require_context("strategy.run()")
        return self._steps.find_step(fn)(*args, **kwargs)

    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        """Returns ``value`` if ``axis`` is None, since it is global already; otherwise its sum or mean along ``axis``.

        Raises:
          ProgramError: a reduction other than SUM or MEAN.
        """
        name = str(getattr(reduce_op, "name", reduce_op)).upper()
        if name not in _REDUCTIONS:
            raise ProgramError(
                "strategy.reduce does not know this reduction",
                given=f"reduce_op={reduce_op!r}",
                expected="tf.distribute.ReduceOp.SUM or tf.distribute.ReduceOp.MEAN",
                action="pass one of these as reduce_op",
            )
        if axis is None:
            return value
        return tf.nest.map_structure(lambda tensor: _REDUCTIONS[name](tensor, axis=axis), value)

    def gather(self, value: Any, axis: int) -> Any:
        """Returns ``value`` unchanged, since every rank has the global value."""
        return tf.nest.map_structure(tf.convert_to_tensor, value)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns ``(value,)``: the value of the only replica."""
        return (value,)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> DistributedDataset:
        """Returns a dataset of global batches, of which each rank reads its own rows; see ``wh.shard``."""
        return DistributedDataset(dataset, _require_context("strategy.experimental_distribute_dataset()"))

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[tf.distribute.InputContext], Any], options: Any = None
    ) -> DistributedDataset:
        """Calls ``dataset_fn`` once, for one replica, and returns its dataset, of which each rank reads its own
        rows.
        """
        context = _require_context("strategy.distribute_datasets_from_function()")
        one = tf.distribute.InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1)
        return DistributedDataset(dataset_fn(one), context)

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def experimental_distribute_values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        """Returns the result of ``value_fn`` for the only replica."""
        return value_fn(tf.distribute.experimental.ValueContext(0, 1))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f"strategy.{name}")


class Extended:
    """Implements the parts of ``strategy.extended`` that scripts use."""

    experimental_require_static_shapes = True
    should_checkpoint = should_save_summary = True

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Returns the one device that the program is written for: "/device:GPU:0" or "/device:CPU:0"."""
        return ("/device:GPU:0" if tf.config.list_logical_devices("GPU") else "/device:CPU:0",)

    parameter_devices = worker_devices

    def _in_multi_worker_mode(self) -> bool:
        return require_current("strategy.extended").has_other_processes

    def call_for_each_replica(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Calls ``strategy.run``."""
        return self._strategy.run(fn, args, kwargs)

    def reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any = None) -> Any:
        """Returns ``value``, which is global already."""
        return self._strategy.reduce(reduce_op, value)

    def batch_reduce_to(self, reduce_op: Any, pairs: Sequence[tuple[Any, Any]], options: Any = None) -> list[Any]:
        """Returns the value of each (value, destination) pair; values are global already, and destinations are
        ignored.
        """
        return [self._strategy.reduce(reduce_op, value) for value, _ in pairs]

    def update(
        self, var: Any, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None, group: bool = True
    ) -> Any:
        """Calls ``fn(var, *args, **kwargs)``: there is one variable, which all ranks share."""
        return fn(var, *args, **(kwargs or {}))

    def colocate_vars_with(self, colocate_with_variable: Any) -> Any:
        """Returns a context that does nothing: variables need no colocation."""
        return contextlib.nullcontext()

    def variable_created_in_scope(self, variable: Any) -> bool:
        """Returns True: all variables belong to the one program."""
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f"strategy.extended.{name}")


def _require_context(what: str) -> Context:
    return require_current(what)


def _refuse(what: str) -> NoReturn:
    raise ProgramError(
        f"wh.Strategy does not support {what}",
        given=what,
        expected="scope, run, reduce, gather, experimental_local_results, experimental_distribute_dataset, "
        "distribute_datasets_from_function, cluster_resolver, extended",
        action="leave it out, or write the program for one device with wh.function and wh.shard",
    )


class DistributedDataset(ShardedDataset):
    """Represents a dataset of global batches, of which each rank reads its own rows.

    Raises:
      ProgramError: ``dataset`` is not a tf.data.Dataset, or is iterated over in a traced function.
    """

    def __init__(self, dataset: Any, context: Context) -> None:
        if not isinstance(dataset, tf.data.Dataset):
            raise ProgramError(
                "wh.Strategy can only distribute a tf.data.Dataset",
                given=f"an object of type {type(dataset).__name__}",
                expected="a tf.data.Dataset of global batches",
                action="create one with tf.data.Dataset.from_generator or from_tensor_slices, and batch it",
            )
        super().__init__(dataset, context, "row")

    def __iter__(self) -> Any:
        refuse_taking("iter() of a distributed dataset")
        return DistributedIterator(super().__iter__(), self.element_spec)


class DistributedIterator:
    """Yields the global batches of one pass over a DistributedDataset.

    A tf.function that calls ``next`` on it is run in Python from then on; see ``whale.frontends.tf_distribute.steps``.
    """

    def __init__(self, batches: Iterator[Any], element_spec: Any) -> None:
        self._batches = batches
        self.element_spec = element_spec

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        refuse_taking("next() of a distributed dataset's iterator")
        return next(self._batches)

    def get_next(self) -> Any:
        """Returns the next batch; raises tf.errors.OutOfRangeError after the last one."""
        try:
            return next(self)
        except StopIteration:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence") from None

    def get_next_as_optional(self) -> Any:
        """Raises a ProgramError: batches are taken in Python, where optionals are not supported."""
        raise ProgramError(
            "the iterator of a distributed dataset has no get_next_as_optional()",
            given="get_next_as_optional()",
            expected="next() until StopIteration, or a `for` loop",
            action="loop over the distributed dataset",
        )


class Resolver:
    """Stands for ``strategy.cluster_resolver``: tells a script about the workers.

    Attributes:
      task_type: "chief" if ``TF_CONFIG`` has chiefs and this rank is one of them, else "worker".
      task_id: number of this rank among the ranks of its type.
    """

    rpc_layer = "mpi"
    environment = ""

    def __init__(self, said: Mapping[str, Any], rank: int, size: int) -> None:
        cluster = dict(said.get("cluster") or {}) or {"worker": [f"rank{number}:0" for number in range(size)]}
        chiefs = len(cluster.get("chief", ()))
        self._cluster = cluster
        self.task_type = "chief" if rank < chiefs else "worker"
        self.task_id = rank if rank < chiefs else rank - chiefs

    def cluster_spec(self) -> tf.train.ClusterSpec:
        """Returns the workers as ``TF_CONFIG`` names them; otherwise one made-up name per rank."""
        return tf.train.ClusterSpec(self._cluster)

    def master(self, *_: Any, **__: Any) -> str:
        """Returns "": there is no TensorFlow server."""
        return ""
