"""Implements ``wh.Strategy``: tf.distribute's interface for a program of one device, which all ranks run together."""

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
    """A stand-in for ``tf.distribute.MirroredStrategy`` and ``MultiWorkerMirroredStrategy`` in a script.

    There is one replica: the program sees global batches and global values, as on one device, and the ranks compute it
    together. What ``run`` is given is a step as by ``wh.function``; a ``tf.function`` around it is the step itself.
    Batches of distributed datasets are global ones, of which each rank reads its rows. Begins the run, unless
    ``wh.init`` was called before.

    Args:
      devices: only None; ranks are processes that a launcher starts.
      cluster_resolver: only None; ``TF_CONFIG``, where it is set, is compared with the ranks that there are.
      cross_device_ops, communication_options: taken for tf.distribute's sake; they change nothing here.
      config: a ``wh.Config`` or a mapping, as for ``wh.init``.

    Raises:
      ClusterError: the ranks cannot be connected, or ``TF_CONFIG`` names others.
      ConfigError: ``TF_CONFIG`` cannot be read, or a setting is wrong.
      ProgramError: devices or a resolver are given, or ``hvd.init`` was called before.
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
                "a Whale strategy always uses all ranks",
                given=f"devices={devices!r}" if devices is not None else "a cluster_resolver",
                expected="wh.Strategy(); a process for each device",
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
                expected="one program of all ranks, or a program of each rank",
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
        """Returns 1: a step is the global one, and so are its batch and its loss."""
        return 1

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Opens the scope for models and variables, in which TensorFlow sees no strategy: all ranks run one program."""
        _require_context("strategy.scope()")
        yield self

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None, options: Any = None) -> Any:
        """Computes ``fn(*args, **kwargs)`` on all ranks together, and returns what one device would.

        Args:
          fn: the step; tensors that change from call to call are arguments.
          options: taken for tf.distribute's sake.

        Raises:
          ProgramError: in a graph that Whale does not see.
        """
        kwargs = kwargs or {}
        if steps.is_inside_step():
            return fn(*args, **kwargs)
        _require_context("strategy.run()")
        return self._steps.find_step(fn)(*args, **kwargs)

    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        """Returns ``value``, which is already reduced over all replicas; with ``axis`` its sum or mean along it.

        Raises:
          ProgramError: another reduction than SUM or MEAN.
        """
        name = str(getattr(reduce_op, "name", reduce_op)).upper()
        if name not in _REDUCTIONS:
            raise ProgramError(
                "values of replicas are reduced by their sum or mean",
                given=f"reduce_op={reduce_op!r}",
                expected="tf.distribute.ReduceOp.SUM or MEAN",
                action="use one of these",
            )
        if axis is None:
            return value
        return tf.nest.map_structure(lambda tensor: _REDUCTIONS[name](tensor, axis=axis), value)

    def gather(self, value: Any, axis: int) -> Any:
        """Returns ``value``, which is already whole on every rank."""
        return tf.nest.map_structure(tf.convert_to_tensor, value)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns a tuple with the value of the single replica."""
        return (value,)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> DistributedDataset:
        """Returns a dataset of global batches, of which each rank reads its rows; see ``wh.shard``."""
        return DistributedDataset(dataset, _require_context("strategy.experimental_distribute_dataset()"))

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[tf.distribute.InputContext], Any], options: Any = None
    ) -> DistributedDataset:
        """Calls ``dataset_fn`` for one pipeline of one replica, and returns its dataset, of which each rank reads its
        rows.
        """
        context = _require_context("strategy.distribute_datasets_from_function()")
        one = tf.distribute.InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1)
        return DistributedDataset(dataset_fn(one), context)

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def experimental_distribute_values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        """Returns the value of ``value_fn`` for the single replica."""
        return value_fn(tf.distribute.experimental.ValueContext(0, 1))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f"strategy.{name}")


class Extended:
    """The parts of ``strategy.extended`` that scripts use."""

    experimental_require_static_shapes = True
    should_checkpoint = should_save_summary = True

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Returns the one device of the program."""
        return ("/device:GPU:0" if tf.config.list_logical_devices("GPU") else "/device:CPU:0",)

    parameter_devices = worker_devices

    def _in_multi_worker_mode(self) -> bool:
        return require_current("strategy.extended").has_other_processes

    def call_for_each_replica(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Runs a function as ``run`` does."""
        return self._strategy.run(fn, args, kwargs)

    def reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any = None) -> Any:
        """Returns ``value``, which is already reduced over all replicas."""
        return self._strategy.reduce(reduce_op, value)

    def batch_reduce_to(self, reduce_op: Any, pairs: Sequence[tuple[Any, Any]], options: Any = None) -> list[Any]:
        """Reduces each value as ``reduce_to`` does; its destination is ignored."""
        return [self._strategy.reduce(reduce_op, value) for value, _ in pairs]

    def update(
        self, var: Any, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None, group: bool = True
    ) -> Any:
        """Calls ``fn`` with the variable, which all replicas share."""
        return fn(var, *args, **(kwargs or {}))

    def colocate_vars_with(self, colocate_with_variable: Any) -> Any:
        """Returns an empty scope: colocation is not needed."""
        return contextlib.nullcontext()

    def variable_created_in_scope(self, variable: Any) -> bool:
        """Returns True: all variables are the program's."""
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f"strategy.extended.{name}")


def _require_context(what: str) -> Context:
    return require_current(what)


def _refuse(what: str) -> NoReturn:
    raise ProgramError(
        "wh.Strategy does not support this",
        given=what,
        expected="scope, run, reduce, gather, experimental_local_results, experimental_distribute_dataset, "
        "distribute_datasets_from_function, cluster_resolver, extended",
        action="write the program for one device: wh.function, wh.shard",
    )


class DistributedDataset(ShardedDataset):
    """A dataset sharded by ``wh.shard``, for loops in scripts for strategies.

    Raises:
      ProgramError: it is not a tf.data.Dataset.
    """

    def __init__(self, dataset: Any, context: Context) -> None:
        if not isinstance(dataset, tf.data.Dataset):
            raise ProgramError(
                "a strategy distributes datasets of tf.data",
                given=type(dataset).__name__,
                expected="a tf.data.Dataset of global batches",
                action="make one with tf.data.Dataset.from_generator or from_tensor_slices, and batch it",
            )
        super().__init__(dataset, context, "row")

    def __iter__(self) -> Any:
        refuse_taking("iter() of a distributed dataset")
        return DistributedIterator(super().__iter__(), self.element_spec)


class DistributedIterator:
    """The batches of one pass; a tf.function that takes them itself runs in Python, and its steps as they are."""

    def __init__(self, batches: Iterator[Any], element_spec: Any) -> None:
        self._batches = batches
        self.element_spec = element_spec

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        refuse_taking("next() of a distributed dataset's iterator")
        return next(self._batches)

    def get_next(self) -> Any:
        """Returns the next batch; raises tf.errors.OutOfRangeError at the end."""
        try:
            return next(self)
        except StopIteration:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence") from None

    def get_next_as_optional(self) -> Any:
        """Raises an error: use get_next and StopIteration instead of an optional."""
        raise ProgramError(
            "batches are taken in Python",
            given="get_next_as_optional()",
            expected="next() until StopIteration, or a `for` loop",
            action="loop over the distributed dataset",
        )


class Resolver:
    """The resolver of a strategy, which tells of the workers.

    Attributes:
      task_type: "worker", or "chief" where ``TF_CONFIG`` has one and this rank is it.
      task_id: its number among those of its type.
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
        """Returns the workers."""
        return tf.train.ClusterSpec(self._cluster)

    def master(self, *_: Any, **__: Any) -> str:
        """Returns "": no server listens."""
        return ""
