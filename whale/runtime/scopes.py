"""What entering a scope does: nodes built under it carry its path, and so do variables created under it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from whale.errors import PlanError
from whale.passes.stages import stage_of
from whale.runtime.context import Context, current

SCOPE_ATTRIBUTE = "_whale_scope"


@contextmanager
def entered(kind: str, devices: tuple[int, ...] | None, settings: str = "") -> Iterator[None]:
    """Annotates what is built inside with a new scope of ``kind``; ``settings`` become part of its name.

    Raises:
      ClusterError: ``wh.init`` was not called.
      PlanError: the devices are not all ranks of the run.
    """
    context = current(f"the scope wh.{kind}")
    if devices is not None and sorted(devices) != list(range(context.size)):
        raise PlanError(
            f"wh.{kind} divides {'tensors' if kind == 'split' else 'the batch'} over all ranks of the run",
            given=f"devices={list(devices)}",
            expected=f"all of {list(range(context.size))}, or devices=None",
            action="leave devices out"
            + (", and give ranks without a share size 0 in replica.shares" if kind == "replica" else ""),
        )
    with _in_scope(context, kind, settings):
        yield


@contextmanager
def entered_stage(devices: tuple[int, ...] | None) -> Iterator[None]:
    """Annotates what is built inside with a new stage of a pipeline.

    Raises:
      ClusterError: ``wh.init`` was not called.
      PlanError: a stage inside a stage, or devices that are no ranks of the run.
    """
    context = current("the scope wh.stage")
    size = context.size if context.dry is None else context.dry.size
    if devices is not None and (
        not devices or not set(devices) <= set(range(size)) or len(set(devices)) < len(devices)
    ):
        raise PlanError(
            "a stage is on ranks that do not exist, or on one twice",
            given=f"devices={list(devices)}, {size} ranks",
            expected=f"different ranks below {size}",
            action="correct devices, or leave them out",
        )
    if stage_of("/".join(context.scopes[-1:])):
        raise PlanError(
            "a stage inside a stage",
            given=context.scopes[-1],
            expected="stages beside each other",
            action="leave the inner wh.stage out",
        )
    with _in_scope(context, "stage", "" if devices is None else f"(ranks={'+'.join(map(str, devices))})"):
        yield


@contextmanager
def _in_scope(context: Context, kind: str, settings: str) -> Iterator[None]:
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    # Numbered within a graph, so that tracing it again gives the same names.
    number = getattr(graph, "_whale_scopes", 0) if graph is not None else context.scope_count
    path = "/".join([*context.scopes[-1:], f"{kind}_{number}{settings}"])
    if graph is not None:
        graph._whale_scopes = number + 1
    else:
        context.scope_count = number + 1

    def creator(next_creator: Any, **kwargs: Any) -> Any:
        variable = next_creator(**kwargs)
        variable._whale_scope = path
        return variable

    context.split_scope_seen |= kind == "split"
    context.scopes.append(path)
    with ExitStack() as stack:
        stack.callback(context.scopes.pop)
        stack.enter_context(tf.variable_creator_scope(creator))
        if graph is not None:
            attribute = attr_value_pb2.AttrValue(s=path.encode())
            stack.enter_context(graph._attr_scope({SCOPE_ATTRIBUTE: attribute}))
        yield
