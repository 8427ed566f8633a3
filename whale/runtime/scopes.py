"""Enters scopes (``wh.replica``, ``wh.split``, ``wh.stage``, ``wh.pipeline``): nodes and variables created inside carry
the scope's path, such as ``stage_0/split_1(dim=-1)``.

Scripts for the first Whale give numbers of devices and of micro-batches, where a run now has ranks and a configuration.
These numbers are translated, or refused where they differ from the run's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from whale.capture.attrs import AGAIN, CHECKPOINT, SCOPE_ATTR, mark_attributes
from whale.errors import PlanError
from whale.ir.mesh import CONTEXT, TENSOR
from whale.passes.analysis.scopes import micro_batches_in, ranks_of_scope, split_scope
from whale.passes.analysis.stages import stage_of
from whale.runtime.context import Context, require_current

_DEVICE = re.compile(
    r"(?:/job:\w+)?(?:/replica:\d+)?(?:/task:(?P<task>\d+))?(?:/(?:device:)?(?:cpu|gpu|CPU|GPU):(?P<device>\d+))?"
)
_SCHEDULES = {"preferbackward": "1f1b", "preferbackwardoptimizer": "1f1b", "preferforward": "gpipe"}


@contextmanager
def enter_scope(
    kind: str,
    devices: tuple[int | str, ...] | None,
    dim: int | None = None,
    sequence: int | None = None,
    axis: tuple[str, ...] | None = None,
    context: int | None = None,
) -> Iterator[None]:
    """Enters a new replica or split, for nodes built inside; its settings and ranks become part of its path.

    Args:
      kind: "replica" or "split".
      devices: ranks, as numbers or TensorFlow device names; None: all ranks.
      dim: of a split, the dimension of weights to shard; None: chosen by what is communicated.
      sequence: sequence parallelism: shards what lies between matrix products along this dimension of activations, 0 or
        1; None: it is whole on every rank.
      axis: mesh axes to split over; None: the axis "tensor", or "context" if ``context`` is given.
      context: context parallelism: shards this dimension of activations, 0 or 1, on every layer; None: it does not.

    Raises:
      ClusterError: ``wh.init`` was not called.
      PlanError: devices that are not ranks of the run; ``sequence`` or ``context`` is neither 0 nor 1, or is combined
        with an option that it excludes; ``axis`` is not a valid name.
    """
    run = require_current(f"the scope wh.{kind}")
    with _enter_path(run, kind, _format_settings(NamedScope(kind, devices, dim, sequence, axis, context=context), run)):
        yield


def _format_settings(scope: NamedScope, context: Context) -> str:
    """Returns the settings of a replica or split as part of its path, such as ``(axis=tensor,dim=-1,ranks=0+1)``; "" if
    there are none.
    """
    size, devices = context.planned_size, _check_devices(scope.kind, scope.devices, context)
    axis = (CONTEXT,) if scope.axis is None and scope.context is not None else scope.axis
    settings = [f"axis={'+'.join(_check_axes(axis))}"] if axis is not None else []
    settings += [f"dim={scope.dim}"] if scope.dim is not None else []
    if scope.context is not None and (scope.dim is not None or scope.sequence is not None):
        raise PlanError(
            "a split with context= divides the sequence on every layer and cannot divide anything else",
            given=f"context={scope.context!r}, dim={scope.dim!r}, sequence={scope.sequence!r}",
            expected="context alone",
            action="leave dim= and sequence= out; to split weights too, enter another wh.split inside, with another "
            "axis=",
        )
    for name, at in (("sequence", scope.sequence), ("context", scope.context)):
        if at is None:
            continue
        if at not in (0, 1) or isinstance(at, bool):
            raise PlanError(
                "a split names a dimension that cannot be the sequence",
                given=f"{name}={at!r}",
                expected="1 for activations [batch, sequence, features], 0 for [sequence, batch, features]",
                action=f"correct {name}, or leave it out",
            )
        settings.append(f"{name}={at}")
    inside_of = ranks_of_scope("/".join(context.scoping.scopes[-1:]))
    if devices is not None and (len(devices) < size or inside_of is not None):
        settings.append(_format_ranks(sorted(devices)))
    return f"({','.join(settings)})" if settings else ""


def _check_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns ``axes`` unchanged; raises PlanError if one is not a valid name of a mesh axis."""
    for axis in axes:
        if not isinstance(axis, str) or not axis.isidentifier() or axis == "stage":
            raise PlanError(
                "a split names an invalid mesh axis",
                given=f"axis={axis!r}",
                expected="a name as in mesh=data=2,tensor=4; stages are made by wh.stage",
                action="correct axis, or leave it out for the axis tensor",
            )
    return axes


@dataclass(frozen=True)
class NamedScope:
    """Represents a scope with its arguments, before it has a path.

    Attributes:
      kind: "replica", "split" or "stage".
      number: of a stage in ``wh.annotate``; None: numbered by its annotation.
      devices, dim, sequence, axis, context: as in ``enter_scope``.
    """

    kind: str
    devices: tuple[int | str, ...] | None = None
    dim: int | None = None
    sequence: int | None = None
    axis: tuple[str, ...] | None = None
    number: int | None = None
    context: int | None = None


def format_scope_part(scope: NamedScope, number: int, context: Context) -> str:
    """Returns the part of a path for a scope of ``wh.annotate``, such as ``split_3(dim=-1)``.

    Args:
      number: of the annotation; a numbered stage uses its own number instead.

    Raises:
      PlanError: devices that are not ranks of the run; an invalid ``sequence``, ``context`` or ``axis``.
    """
    if scope.kind != "stage":
        return f"{scope.kind}_{number}{_format_settings(scope, context)}"
    devices = _check_devices("stage", scope.devices, context)
    ranks = "" if devices is None else f"({_format_ranks(devices)})"
    return f"stage_{number if scope.number is None else scope.number}{ranks}"


@contextmanager
def enter_stage(devices: tuple[int | str, ...] | None) -> Iterator[None]:
    """Enters a new stage of a pipeline, for nodes built inside.

    Args:
      devices: ranks of the stage, as numbers or TensorFlow device names; None: chosen by the plan.

    Raises:
      ClusterError: ``wh.init`` was not called.
      PlanError: a stage inside a stage, or devices that are not ranks of the run.
    """
    context = require_current("the scope wh.stage")
    ranks = _check_devices("stage", devices, context)
    if stage_of("/".join(context.scoping.scopes[-1:])):
        raise PlanError(
            "wh.stage is entered inside another wh.stage",
            given=f"the entered scopes {context.scoping.scopes[-1]}",
            expected="stages one after the other",
            action="leave the inner wh.stage out",
        )
    with _enter_path(context, "stage", "" if ranks is None else f"({_format_ranks(ranks)})"):
        yield


def refuse_number(number: int) -> None:
    """Raises PlanError for ``with wh.stage(1):``; numbers of stages are for ``wh.annotate`` only."""
    raise PlanError(
        "a numbered stage can only be used in wh.annotate",
        given=f"with wh.stage({number})",
        expected="wh.stage(), which is a stage of its own each time, or its ranks: wh.stage([0, 1])",
        action="leave the number out, or write its ranks as a list",
    )


def _format_ranks(devices: Iterable[int]) -> str:
    return f"ranks={'+'.join(map(str, devices))}"


def _check_devices(kind: str, devices: tuple[int | str, ...] | None, context: Context) -> tuple[int, ...] | None:
    """Returns ``devices`` as rank numbers; None for None, or after a loss of ranks, when the remaining ranks are
    assigned anew.

    Raises:
      PlanError: some are not ranks of the run, one is given twice, or the list is empty.
    """
    if devices is None or context.lost_count:
        return None
    size = context.planned_size
    ranks = _number_devices(kind, devices, context)
    if not ranks or not set(ranks) <= set(range(size)) or len(set(ranks)) < len(ranks):
        raise PlanError(
            f"wh.{kind} names ranks that do not exist, a rank twice, or no rank",
            given=f"devices={list(devices)}, {size} ranks",
            expected=f"different ranks below {size}",
            action=f"give ranks from 0 to {size - 1}, each once, or leave devices out",
        )
    return ranks


def _number_devices(kind: str, devices: tuple[int | str, ...], context: Context) -> tuple[int, ...]:
    """Returns the rank for each rank number or TensorFlow device name.

    On several hosts ``task`` counts hosts with as many ranks as this one; on one host each task, or each device, is a
    rank.

    Raises:
      PlanError: a name is not of a known form, or tasks and devices are mixed on one host.
    """
    named = [d for d in devices if isinstance(d, str)]
    found = [_DEVICE.fullmatch(name) for name in named]
    places = [(int(m["task"] or 0), int(m["device"] or 0)) for m in found if m is not None]
    hosts = context.local_ranks < context.planned_size
    if len(places) < len(named) or not (
        hosts or len({task for task, _ in places}) <= 1 or not any(d for _, d in places)
    ):
        raise PlanError(
            f"wh.{kind} names devices that belong to no known rank",
            given=f"devices={list(devices)}",
            expected='names like "/job:worker/task:1" or "/device:GPU:1"; on one host tasks or devices, not both',
            action="name ranks by their numbers, such as devices=[0, 1]",
        )
    each = context.local_ranks if hosts else 1
    ranks = iter([task * each + device for task, device in places])
    return tuple(next(ranks) if isinstance(d, str) else d for d in devices)


@contextmanager
def enter_pipeline(num_micro_batch: int) -> Iterator[None]:
    """Enters a new pipeline, which cuts the batch into micro-batches, for nodes built inside.

    Args:
      num_micro_batch: number of micro-batches, at least 1.

    Raises:
      ClusterError: ``wh.init`` was not called.
      PlanError: ``num_micro_batch`` is not a positive integer or differs from the run's; or the pipeline is inside a
        stage or split.
    """
    context = require_current("the scope wh.pipeline")
    if not isinstance(num_micro_batch, int) or isinstance(num_micro_batch, bool) or num_micro_batch < 1:
        raise PlanError(
            "a batch cannot be cut into that many micro-batches",
            given=f"num_micro_batch={num_micro_batch!r}",
            expected="an integer of at least 1",
            action="give num_micro_batch a number of at least 1, such as wh.pipeline(num_micro_batch=4)",
        )
    path = "".join(context.scoping.scopes[-1:])
    if stage_of(path) or any(map(split_scope, path.split("/"))):
        raise PlanError(
            "wh.pipeline is entered inside a stage or a split",
            given=f"the entered scopes {path}",
            expected="replica, pipeline, stage and split inside each other in this order",
            action="enter wh.pipeline outside of these scopes",
        )
    settings = f"(micro_batches={num_micro_batch})"
    find_micro_batches(context, [*context.scoping.scopes[-1:], f"pipeline_0{settings}"])
    with _enter_path(context, "pipeline", settings):
        yield


def find_micro_batches(context: Context, paths: Iterable[str]) -> int:
    """Returns the number of micro-batches for a program whose scopes have these ``paths``.

    Raises:
      PlanError: the scopes ask for different numbers, or for another one than the configuration sets.
    """
    key = "pipeline.micro_batches"
    asked = {n: f"wh.pipeline(num_micro_batch={n})" for n in micro_batches_in(paths)}
    origin = context.config.origin(key)
    if origin != "default" or not asked:
        asked.setdefault(context.config[key], f"{key}={context.config[key]} ({origin})")
    if len(asked) > 1:
        raise PlanError(
            "a step cannot be computed in different numbers of micro-batches",
            given=", ".join(asked.values()),
            expected="one number for the whole step",
            action=f"give every wh.pipeline of the step the same number, and leave {key} out or set it to that",
        )
    return next(iter(asked))


@contextmanager
def _enter_path(context: Context, kind: str, settings: str) -> Iterator[None]:
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    # Numbered within a graph, so that tracing it again gives the same names, and after the scopes in which layers were
    # created.
    number = (
        getattr(graph, "_whale_scopes", context.scoping.scope_count)
        if graph is not None
        else context.scoping.scope_count
    )
    path = "/".join([*context.scoping.scopes[-1:], f"{kind}_{number}{settings}"])
    if graph is not None:
        graph._whale_scopes = number + 1
    else:
        context.scoping.scope_count = number + 1

    def create_in_scope(next_creator: Any, **kwargs: Any) -> Any:
        variable = next_creator(**kwargs)
        setattr(variable, SCOPE_ATTR, path)
        return variable

    context.scoping.dividing_scope_seen |= kind in ("split", "stage")
    context.scoping.stages_seen |= kind == "stage"
    context.scoping.scopes.append(path)
    with ExitStack() as stack:
        stack.callback(context.scoping.scopes.pop)
        stack.enter_context(tf.variable_creator_scope(create_in_scope))
        if graph is not None:
            attribute = attr_value_pb2.AttrValue(s=path.encode())
            stack.enter_context(graph._attr_scope({SCOPE_ATTR: attribute}))
        yield


def mark_held(tensor: Any) -> Any:
    """Returns a copy of the tensor (``tf.identity``) that is marked to be kept until the backward pass instead of
    recomputed; returns the tensor itself if no graph is being built.
    """
    if tf.executing_eagerly():
        return tensor
    with tf.compat.v1.get_default_graph()._attr_scope(mark_attributes(CHECKPOINT)):
        return tf.identity(tensor, "checkpoint")


@contextmanager
def enter_mark(mark: str) -> Iterator[None]:
    """Adds an attribute named ``mark`` (one of ``whale.capture.attrs``) to operations that are built inside, which the
    capture of programs reads; does nothing if no graph is being built.
    """
    with ExitStack() as stack:
        if not tf.executing_eagerly():
            stack.enter_context(tf.compat.v1.get_default_graph()._attr_scope(mark_attributes(mark)))
        yield


def mark_recomputed() -> AbstractContextManager[None]:
    """Marks operations built inside to be recomputed in the backward pass."""
    return enter_mark(AGAIN)


def join_path(context: Context, path: str) -> str:
    """Returns the scope path for operations of an object that was created under the scope ``path``, such as a Keras
    layer, and is called inside of the scopes that are entered now.

    The result is ``path`` itself if it already begins with the present path, and the present path if both are stages.
    """
    outer = "".join(context.scoping.scopes[-1:])
    if not outer or outer == path or path.startswith(f"{outer}/"):
        return path
    return outer if stage_of(outer) and stage_of(path) else f"{outer}/{path}"


@contextmanager
def enter_path(path: str) -> Iterator[None]:
    """Puts operations built inside into the scope ``path`` in the current graph; works without ``wh.init``."""
    with tf.compat.v1.get_default_graph()._attr_scope({SCOPE_ATTR: attr_value_pb2.AttrValue(s=path.encode())}):
        yield


def check_count(kind: str, count: int | None) -> None:
    """Raises PlanError if ``count``, the number of devices of a replica or split, does not divide the number of ranks;
    None is allowed.
    """
    size = require_current(f"the scope wh.{kind}").planned_size
    if count is not None and (count < 1 or (size > 1 and size % count)):
        raise PlanError(
            f"the ranks cannot be divided among parts of wh.{kind}",
            given=f"device_count={count}, {size} ranks",
            expected=f"a number that divides {size}",
            action=f"give device_count a divisor of {size}, or start another number of ranks (whale run -np)",
        )


def set_split_ranks(count: int | None) -> None:
    """Makes each group of ``count`` consecutive ranks shard tensors together, for all splits of the run; None changes
    nothing.

    Raises:
      PlanError: ``count`` does not divide the ranks, or the run already has another number.
    """
    context = require_current("the scope wh.split")
    if count is None or context.planned_size == 1:
        return
    check_count("split", count)
    config = context.config
    known = context.mesh.get(TENSOR) or (context.planned_size if context.scoping.dividing_scope_seen else 0)
    if (config["mesh"] or known) and known != count:
        raise PlanError(
            "all tensors of a run are divided over the same number of ranks",
            given=f"device_count={count}, and {config['mesh'] or f'{known} ranks'} before",
            expected="one number for all splits",
            action="give every wh.split the same device_count, or name axes with the key mesh",
        )
    context.scoping.split_ranks = count


def refuse_unnamed_stage(count: int | None) -> None:
    """Raises PlanError for a stage that gives a number of ranks above 1 instead of naming them."""
    if count not in (None, 1):
        raise PlanError(
            "a wh.stage of several ranks has to name the ranks",
            given=f"device_count={count}",
            expected="the list of its ranks, or device_count=1",
            action="write the ranks: wh.stage(devices=[0, 1])",
        )


def read_micro_batches() -> int:
    """Returns the configured number of micro-batches (``pipeline.micro_batches``)."""
    return int(require_current("the scope wh.pipeline").config["pipeline.micro_batches"])


def check_schedule(strategy: str | None) -> None:
    """Raises PlanError if a pipeline asks for another schedule than the run has; None asks for none.

    Args:
      strategy: a schedule, or its name in the first Whale: PreferBackward for "1f1b", PreferForward for "gpipe".
    """
    config = require_current("the scope wh.pipeline").config
    if strategy is None or _SCHEDULES.get(strategy.lower(), strategy) == config["pipeline.schedule"]:
        return
    raise PlanError(
        "a pipeline cannot have another schedule than the run",
        given=f"strategy={strategy!r}, pipeline.schedule={config['pipeline.schedule']!r}",
        expected="the run's schedule",
        action="leave strategy out, or set the key pipeline.schedule to it",
    )
