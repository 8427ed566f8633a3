"""Defines the scopes that a user puts around model code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any


class replica(ContextDecorator):
    """``with wh.replica():`` (or ``@wh.replica()``): the batch is divided over the devices.

    Every device has all variables of the code inside, and computes its share of the batch; gradients are summed. The
    shares are as equal as possible, or those of ``batch.shares``.

    Args:
      devices: ranks (or TensorFlow's names of devices: "/job:worker/task:1") among which
        the rows of the code inside are divided; None means all.
        The others have no rows of it, but its variables as well. A number is a ``device_count``.
      device_count: devices that share the rows of one replica of the model; the rows of a batch are divided over all
        replicas and their devices anyway.
      name: what a person calls it; nothing else.

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
    """``with wh.split():`` (or ``@wh.split()``): the tensors of the code inside are divided over the devices.

    Every device holds a part of each weight and computes with that part; how products, activations and updates are
    divided is chosen so that least is communicated. Outside, the batch is divided as under ``wh.replica``. Enter the
    scope where layers are called (losses over many classes belong inside as well).

    Args:
      devices: ranks that hold the parts; None means all. Other scopes may be on the same
        ranks, on others, or on some of them.
      dim: the dimension of their result along which products that read a weight are split: -1 divides the outputs of a
        dense layer. None leaves it to what is communicated.
      axis: the axis of the mesh over which tensors are divided, or several; None: "tensor". Over the other axes the
        rows of the code inside are divided.
      sequence: sequence parallelism: what lies between products (normalisations, residual sums, dropout) is divided
        along this dimension of activations [batch, sequence, features], 1, or [sequence, batch, features], 0. None: it
        is whole on every rank. It moves as many bytes and holds less.
      context: context parallelism: this dimension of activations, 1 or 0 as for ``sequence``, is divided on every
        layer, products included, over the axis "context" unless ``axis`` names another; weights are whole on every
        rank. Attention gives parts of the sequence for heads, or passes keys and values round.
      device_count: so many ranks in a row divide tensors together, as ``wh.Mesh(tensor=...)`` says for the run; a
        number for ``devices`` is one.
      name: what a person calls it; nothing else.

    Raises:
      ClusterError: entered before ``wh.init``.
      PlanError: entered with devices that are no ranks of the run, an ``axis`` that is no name, another ``sequence``
        or ``context``. Later, when the program is planned: nothing inside can be split, or not as these say.
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
    """``with wh.stage():`` (or ``@wh.stage()``): a part of the model that has ranks of its own.

    Its forward, backward and update run on those ranks, which hold its variables; what it reads of other stages is
    sent. Stages form a graph: what is read where decides, so there may be skip connections, shared variables and
    towers. With R times as many ranks as stages, rank r * stages + s runs stage s of replica r, and the batch is
    divided over the replicas; with other numbers the first stages have one rank more. With fewer ranks than stages,
    stage s is on rank s modulo the number of ranks.

    Args:
      devices: its ranks; None: as above. To be given for all stages or for none. In
        ``wh.annotate`` also the number of the stage, in the order of the data.
      device_count: ranks of one replica of it: 1, as without ``devices``.
      name: what a person calls it; nothing else.

    Raises:
      ClusterError: entered before ``wh.init``.
      PlanError: a stage inside a stage, devices that are no ranks of the run, or a number.
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
    """``with wh.pipeline(num_micro_batch=4):`` (or ``@wh.pipeline(...)``): the batch is computed in micro-batches.

    Around ``wh.stage`` it makes the stages work at once, each on another micro-batch; without stages, gradients are
    accumulated. The number holds for the whole step of which a part is inside, as ``pipeline.micro_batches`` does for
    all steps; the result is that of one device either way. Enter it inside the step, or where layers are created.

    Args:
      num_micro_batch: into how many parts each rank cuts its rows; at least 1. None: as many as are configured.
      strategy: the order of micro-batches: that of the key ``pipeline.schedule``, or the names PreferBackward and
        PreferForward for 1f1b and gpipe; None: as configured.
      num_stages: how many there will be inside; nothing follows from it.

    Raises:
      ClusterError: entered before ``wh.init``.
      PlanError: ``num_micro_batch`` is no positive integer; entered inside a stage, a split, or a pipeline with another
        number; the configuration sets another number or order. Later, when the program is planned: it has scopes with
        different numbers.
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
    """Marks an activation that is held until the backward pass, with ``memory.recompute="marked"``.

    What lies between two marked tensors is computed again when the backward pass reads it. In a session's graph
    ``tf.compat.v1.add_to_collection("checkpoints", tensor)`` does the same.

    Args:
      tensor: a tensor of the forward pass.

    Returns:
      ``tensor``, which the model has to go on with; outside of a graph nothing is marked.
    """
    from whale.runtime.scopes import mark_held

    return mark_held(tensor)


class recompute(ContextDecorator):
    """``with wh.recompute():`` what is built inside is computed again when the backward pass reads it, and not held.

    With ``memory.recompute="marked"``. Everything else of the forward pass is held as usual, so this suits
    what takes much memory and little time, as the scores of an attention. Random ops, loops, branches and ops with
    effects are held all the same. Outside of a graph nothing is marked.

    Raises:
      PlanError: later, when the program is planned: it marks tensors with ``wh.checkpoint`` as well.
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
    """Puts layers and variables into scopes by their names; before the steps that have them are traced.

    A pattern is a glob over the path of a layer or a variable (``*`` any text, ``/`` included, ``?`` one character,
    ``[0-5]`` one of several), and begins and ends where parts of the path do: ``"decoder/layers_[0-5]"`` is all that is
    inside of these layers. Paths are those of TensorFlow's name scopes and of variables, as Keras and tf.Module have
    them. Of several patterns that match a name, the first of each kind of scope counts. Code inside of
    ``with wh.split()`` and the like stays in the scope that it is in.

    Args:
      patterns: pattern -> ``wh.stage(number)``, ``wh.split(...)``, ``wh.replica(...)``, or a tuple of these. Stages of
        one number are one stage. The first training step has to have something for every pattern.

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
                    action="correct it",
                )
            settings = {
                name: getattr(scope, name, None) for name in ("devices", "dim", "sequence", "context", "axis", "number")
            }
            found[text].append(NamedScope(type(scope).__name__, **settings))
    named.annotate(found)


def _devices(
    devices: Iterable[Any] | str | int | None, device_count: int | None
) -> tuple[tuple[int | str, ...] | None, int | None]:
    """Returns (devices, how many): a number alone says how many."""
    if isinstance(devices, int):
        return None, devices
    return (None if devices is None else _flat(devices)), device_count


def _flat(devices: Iterable[Any] | str) -> tuple[int | str, ...]:
    """Returns ranks in order, or names of devices; a slice of a cluster is a list of groups of them."""
    items = [devices] if isinstance(devices, str) else devices
    return tuple(rank for item in items for rank in ([item] if isinstance(item, (int, str)) else _flat(item)))
