"""Defines the scopes by which a user says how parts of a model are distributed: replica, split, stage, pipeline,
recompute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any


class replica(ContextDecorator):
    """Data parallelism: ``with wh.replica():`` (or ``@wh.replica()``) divides the batch over the devices.

    Every device has all variables of the code inside, and computes its share of the batch; gradients are summed. The
    shares are as equal as possible, or those of ``batch.shares``.

    Args:
        devices: ranks (or TensorFlow's names of devices: "/job:worker/task:1") over which the rows of the code inside
            are divided; None: all. Other ranks hold its variables too, but compute no rows of it. A number is a
            ``device_count``.
        device_count: number of devices that share the rows of one replica of the model; the rows of a batch are divided
            over all replicas and their devices anyway.
        name: a name for people to read; it has no effect.

    Raises:
        ClusterError: entered before ``wh.init``.
        PlanError: entered with devices that are no ranks of the run, or a number that does not divide them.
    """

    def __init__(
        self,
        devices: Iterable[Any] | str | int | None = None,
        device_count: int | None = None,
        name: str | None = None,
    ) -> None:
        self.devices, self.device_count = _devices(devices, device_count)
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> replica:
        from whale.runtime.scopes import check_count, enter_scope

        check_count("replica", self.device_count)
        scope = enter_scope("replica", self.devices)
        scope.__enter__()
        self._entered.append(scope)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)


class split(ContextDecorator):
    """Tensor parallelism: ``with wh.split():`` (or ``@wh.split()``) divides the tensors of the code inside over the
    devices.

    Every device holds a part of each weight and computes with that part. How products, activations and updates are
    divided is chosen so that least is communicated. Outside, the batch is divided as under ``wh.replica``. Enter the
    scope where layers are called (a loss over many classes belongs inside as well).

    Args:
        devices: ranks that hold the parts; None: all. Other scopes may be on the same ranks, on others, or on some of
            them.
        dim: dimension of their result along which products that read a weight are split: -1 divides the outputs of a
            dense layer. None: chosen by what is communicated.
        axis: the axis of the mesh over which tensors are divided, or several; None: "tensor". Over the other axes the
            rows of the code inside are divided.
        sequence: sequence parallelism: activations between products (normalisations, residual sums, dropout) are
            divided along this dimension, which is 1 for [batch, sequence, features] and 0 for [sequence, batch,
            features]. None: they are whole on every rank. It moves as many bytes and needs less memory.
        context: context parallelism: this dimension of activations, 1 or 0 as for ``sequence``, is divided in every
            layer, products included, over the axis "context" unless ``axis`` names another; weights are whole on every
            rank. Attention exchanges parts of the sequence for heads, or passes keys and values round a ring.
        device_count: number of neighbouring ranks that divide tensors together, as ``wh.Mesh(tensor=...)`` sets for the
            run; a number for ``devices`` means the same.
        name: a name for people to read; it has no effect.

    Raises:
        ClusterError: entered before ``wh.init``.
        PlanError: entered with devices that are no ranks of the run, an ``axis`` that is no name, or an invalid
            ``sequence`` or ``context``. Later, when the program is planned: nothing inside can be split, or not in this
            way.
    """

    def __init__(
        self,
        devices: Iterable[Any] | int | None = None,
        dim: int | None = None,
        sequence: int | None = None,
        axis: str | Iterable[str] | None = None,
        device_count: int | None = None,
        name: str | None = None,
        context: int | None = None,
    ) -> None:
        self.devices, self.device_count = _devices(devices, device_count)
        self.axis = None if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
        self.dim = dim
        self.sequence = sequence
        self.context = context
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> split:
        from whale.runtime.scopes import enter_scope, set_split_ranks

        set_split_ranks(self.device_count)
        scope = enter_scope("split", self.devices, self.dim, self.sequence, self.axis, self.context)
        scope.__enter__()
        self._entered.append(scope)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)


class stage(ContextDecorator):
    """Pipeline parallelism: ``with wh.stage():`` (or ``@wh.stage()``) makes the code inside a stage with ranks of its
    own.

    Forward pass, backward pass and update of the code inside run on those ranks, which hold its variables; tensors that
    it reads from other stages are sent. Stages form a graph that follows from these reads, so there may be skip
    connections, shared variables and towers. With R times as many ranks as stages, rank r * stages + s runs stage s of
    replica r, and the batch is divided over the replicas; if the ranks are not a multiple of the stages, the first
    stages have one rank more. With fewer ranks than stages, stage s is on rank s modulo the number of ranks.

    Args:
        devices: ranks of the stage; None: as above. Give them for all stages or for none. In ``wh.annotate`` also the
            number of the stage, in the order of the forward pass.
        device_count: ranks of one replica of the stage; only 1, the same as None, is supported.
        name: a name for people to read; it has no effect.

    Raises:
        ClusterError: entered before ``wh.init``.
        PlanError: a stage inside a stage, devices that are no ranks of the run, or a number outside of ``wh.annotate``.
    """

    def __init__(
        self, devices: Iterable[Any] | int | None = None, device_count: int | None = None, name: str | None = None
    ) -> None:
        self.device_count = device_count
        self.number = devices if isinstance(devices, int) else None
        self.devices = None if devices is None or isinstance(devices, int) else _flat(devices)
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> stage:
        from whale.runtime.scopes import enter_stage, refuse_number, refuse_unnamed_stage

        refuse_unnamed_stage(self.device_count)
        if self.number is not None:
            refuse_number(self.number)
        scope = enter_stage(self.devices)
        scope.__enter__()
        self._entered.append(scope)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)


class pipeline(ContextDecorator):
    """Computes the batch in micro-batches: ``with wh.pipeline(num_micro_batch=4):`` (or ``@wh.pipeline(...)``).

    Around ``wh.stage`` it makes the stages work at the same time, each on another micro-batch; without stages,
    gradients are accumulated. The number applies to the whole step of which a part is inside, as
    ``pipeline.micro_batches`` does for all steps; the result is that of one device either way. Enter it inside the
    step, or where layers are created.

    Args:
        num_micro_batch: number of parts into which each rank divides its rows; at least 1. None:
            ``pipeline.micro_batches``.
        strategy: order of micro-batches: a value of the key ``pipeline.schedule``, or PreferBackward for 1f1b and
            PreferForward for gpipe; None: as configured.
        num_stages: number of stages inside; it has no effect.

    Raises:
        ClusterError: entered before ``wh.init``.
        PlanError: ``num_micro_batch`` is no positive integer; entered inside a stage, a split, or a pipeline with
            another number; the configuration sets another number or order. Later, when the program is planned: it has
            scopes with different numbers.
    """

    def __init__(
        self, num_micro_batch: int | None = None, strategy: str | None = None, num_stages: int | None = None
    ) -> None:
        self.num_micro_batch, self.strategy = num_micro_batch, strategy
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> pipeline:
        from whale.runtime.scopes import check_schedule, enter_pipeline, read_micro_batches

        check_schedule(self.strategy)
        number = read_micro_batches() if self.num_micro_batch is None else self.num_micro_batch
        scope = enter_pipeline(number)
        scope.__enter__()
        self._entered.append(scope)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)


def checkpoint(tensor: Any) -> Any:
    """Marks an activation to keep for the backward pass, if ``memory.recompute="marked"``.

    All activations between two marked tensors are recomputed when the backward pass reads them. In a session's graph
    ``tf.compat.v1.add_to_collection("checkpoints", tensor)`` does the same.

    Args:
        tensor: a tensor of the forward pass.

    Returns:
        The tensor, marked; the model has to use it in place of the argument. Outside of a graph nothing is marked.
    """
    from whale.runtime.scopes import mark_held

    return mark_held(tensor)


class recompute(ContextDecorator):
    """Recomputes the activations of the code inside, ``with wh.recompute():``, in the backward pass instead of keeping
    them.

    Takes effect if ``memory.recompute="marked"``. All other activations are kept as usual, so this suits code that
    needs much memory and little time, such as attention scores. Random ops, loops, branches and ops with side effects
    are not recomputed. Outside of a graph nothing is marked.

    Raises:
        PlanError: later, when the program is planned: it also marks tensors with ``wh.checkpoint``.
    """

    def __init__(self) -> None:
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> recompute:
        from whale.runtime.scopes import mark_recomputed

        scope = mark_recomputed()
        scope.__enter__()
        self._entered.append(scope)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)


def annotate(patterns: Mapping[str, Any]) -> None:
    """Puts layers and variables into scopes by their names; call it before the steps that use them are traced.

    A pattern is a glob over the path of a layer or a variable (``*`` any text, ``/`` included, ``?`` one character,
    ``[0-5]`` one of several). It has to begin and end where parts of the path do: ``"decoder/layers_[0-5]"`` matches
    everything inside of these layers. Paths are those of TensorFlow's name scopes and of variables, as Keras and
    tf.Module name them. If several patterns match a name, the first one of each kind of scope counts. Code inside of
    ``with wh.split()`` and other scopes stays in the scope that it is in.

    Args:
        patterns: pattern -> ``wh.stage(number)``, ``wh.split(...)``, ``wh.replica(...)``, or a tuple of these. Stages
            with the same number are one stage. The first training step has to contain a match for every pattern.

    Raises:
        ClusterError: called before ``wh.init``.
        PlanError: a value that is no scope, or devices that are no ranks. Later, when the first training step is
            compiled: a pattern matches nothing.
    """
    from whale.errors import PlanError
    from whale.runtime import annotate as named
    from whale.runtime.scopes import NamedScope

    found: dict[str, list[NamedScope]] = {}
    for text, scopes in patterns.items():
        found[text] = []
        for scope in scopes if isinstance(scopes, (tuple, list)) else (scopes,):
            if not isinstance(scope, (replica, split, stage)) or not text:
                raise PlanError(
                    "the value of an annotation is not a scope",
                    given=f"{text!r}: {scope!r}",
                    expected="a glob, and wh.stage(number), wh.split(...), wh.replica(...) or a tuple of them",
                    action="correct this value of wh.annotate",
                )
            settings = {
                name: getattr(scope, name, None) for name in ("devices", "dim", "sequence", "context", "axis", "number")
            }
            found[text].append(NamedScope(type(scope).__name__, **settings))
    named.annotate(found)


def _devices(
    devices: Iterable[Any] | str | int | None, device_count: int | None
) -> tuple[tuple[int | str, ...] | None, int | None]:
    """Returns (devices, device count); a number given as `devices` is the device count."""
    if isinstance(devices, int):
        return None, devices
    return (None if devices is None else _flat(devices)), device_count


def _flat(devices: Iterable[Any] | str) -> tuple[int | str, ...]:
    """Flattens nested lists of devices, such as a slice of a cluster, to ranks or device names in order."""
    items = [devices] if isinstance(devices, str) else devices
    return tuple(rank for item in items for rank in ([item] if isinstance(item, (int, str)) else _flat(item)))
