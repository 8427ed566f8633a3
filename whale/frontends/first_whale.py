"""Provides names of the first version of Whale, for its scripts, where Whale has another name for the same thing.

``replicate`` is implemented by ``wh.stage`` or ``wh.replica``; ``auto_parallel`` by the key ``mesh.auto_parallel``, or
by ``wh.split`` around everything; ``set_default_strategy(wh.split())`` acts as ``wh.annotate({"*": wh.split()})``; and
``cluster`` cuts the ranks of the run into slices.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ContextDecorator
from dataclasses import dataclass
from typing import Any

from whale.annotations import replica, split, stage
from whale.config import Config
from whale.errors import ClusterError, PlanError
from whale.started import process_place


class replicate(replica):
    """Marks one part of a model, as in the Whale paper: ``with wh.replicate(1):``; each ``with`` is a new part.

    A part with fewer devices than there are ranks becomes a pipeline stage; stages follow each other in the order of
    the script. If there is only one such part it is the whole model, which is replicated over all ranks. A part with as
    many devices as there are ranks is data-parallel: each of them computes a share of the rows.

    Args:
      device_count: number of devices that compute one replica of the part, sharing its rows; None: 1.
      name: a label for people; it has no effect.
    """

    def __init__(self, device_count: int | None = None, name: str | None = None) -> None:
        super().__init__(None, device_count or 1, name)
        self._stages: list[AbstractContextManager[Any] | None] = []

    def __enter__(self) -> replicate:
        apart = stage(device_count=self.device_count) if _is_a_stage(self.device_count) else None
        if apart is None:
            super().__enter__()
        else:
            apart.__enter__()
        self._stages.append(apart)
        return self

    def __exit__(self, *exception: Any) -> None:
        apart = self._stages.pop()
        if apart is None:
            super().__exit__(*exception)
        else:
            apart.__exit__(*exception)


def _is_a_stage(count: int | None) -> bool:
    """Returns True if a part of the model with ``count`` devices gets ranks of its own, as a stage."""
    from whale.runtime.context import require_current
    from whale.runtime.scopes import check_count

    size = require_current("the scope wh.replicate").planned_size
    check_count("replicate", count)
    return (count or 1) < size or size == 1


class auto_parallel(ContextDecorator):
    """Lets Whale choose the strategy of steps that are compiled from now on: ``with wh.auto_parallel():`` or the call
    alone.

    Sets the key ``mesh.auto_parallel``. Scopes in the script stay valid.

    Args:
      modes: None: the strategy with the fastest predicted step. ``wh.replica``: data parallelism, as by default.
        ``wh.split``: tensor parallelism for all layers. ``wh.pipeline`` or ``wh.stage``, also in a list with others: as
        None, with ``pipeline.stages`` stages.

    Raises:
      ClusterError: called before ``wh.init``.
      PlanError: another mode.
    """

    def __init__(self, modes: Any = None) -> None:
        kinds = modes if isinstance(modes, (list, tuple)) else [] if modes is None else [modes]
        _spread([getattr(kind, "__name__", type(kind).__name__) for kind in kinds])

    def __enter__(self) -> auto_parallel:
        return self

    def __exit__(self, *exception: Any) -> None:
        """Does nothing: the mode stays set, since steps are compiled later, at their first call."""


def _spread(modes: Sequence[str]) -> None:
    """Sets the modes of ``auto_parallel`` for steps that are compiled from now on.

    Args:
      modes: names of modes; empty: the strategy with the fastest predicted step.

    Raises:
      PlanError: there is no such mode.
    """
    from whale.runtime.context import require_current

    context = require_current("wh.auto_parallel()")
    if unknown := [mode for mode in modes if mode not in ("replica", "replicate", "split", "pipeline", "stage")]:
        raise PlanError(
            "wh.auto_parallel does not know this mode",
            given=f"modes={unknown[0]}",
            expected="wh.replica, wh.split, wh.pipeline, wh.stage, or a list of these",
            action="pass one of these as modes, or leave modes out to let Whale choose",
        )
    if modes and set(modes) <= {"replica", "replicate"}:
        return
    if modes and set(modes) <= {"replica", "replicate", "split"}:
        context.scoping.split_everything = True
        context.scoping.dividing_scope_seen = True
        return
    context.config = context.config.but({"mesh.auto_parallel": True})


def set_default_strategy(strategy: Any) -> None:
    """Sets the strategy of code outside of all scopes: ``wh.replica()`` (the default) or ``wh.split()``.

    Applies to steps that are compiled after the call.

    Raises:
      ClusterError: called before ``wh.init``.
      PlanError: another strategy, or one with arguments.
    """
    from whale.runtime.context import require_current

    context = require_current("wh.set_default_strategy()")
    arguments = any(
        getattr(strategy, name, None) is not None for name in ("devices", "dim", "sequence", "context", "axis")
    )
    if not isinstance(strategy, (replica, split)) or arguments:
        raise PlanError(
            "wh.set_default_strategy does not accept this strategy",
            given=f"wh.{type(strategy).__name__}" + (" with arguments" if arguments else ""),
            expected="wh.replica() or wh.split(), without arguments",
            action="put the code that needs another strategy into a `with` block of that strategy",
        )
    context.scoping.split_everything = isinstance(strategy, split)
    context.scoping.dividing_scope_seen |= context.scoping.split_everything


Slice = tuple[tuple[int, ...], ...]
_LAYOUTS = '"all", {"average": k}, {"row": n} or {"specific": [[ranks], ...]}'


@dataclass(frozen=True)
class Cluster:
    """Holds the ranks of a run, cut into slices; ``with cluster:`` does nothing.

    Attributes:
      slices: for each slice its groups of ranks, to be passed to a scope as ``devices=cluster.slices[i]``.
    """

    slices: tuple[Slice, ...]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exception: object) -> None:
        """Does nothing."""


def cluster(
    worker_hosts: str | Mapping[str, Any] | Collection[str] | None = None,
    ps_hosts: str | None = None,
    job_name: str = "worker",
    rank: int = 0,
    layout: str | Mapping[str, Any] | Collection[str] | None = None,
) -> Cluster:
    """Cuts the ranks of the run into slices.

    Before ``wh.init`` the number of ranks is read from the environment that the launcher has set.

    Args:
      worker_hosts: a layout may be given here, as the first argument. Host names, and the other arguments ``ps_hosts``,
        ``job_name`` and ``rank``, are ignored: the ranks that were started form the cluster.
      layout: ``"all"``: one slice of all ranks. ``{"average": k}``: k slices of equal size, in order. ``{"row": n}``:
        the ranks in rows of n; slice i has the i-th rank of each row. Then each row is one replica of a pipeline whose
        stage i is on slice i. Four ranks in rows of 2 give ``[[0], [2]]`` and ``[[1], [3]]``. ``{"specific": s}``: the
        slices s, each a list of ranks or of lists of ranks. None: ``"all"``.

    Raises:
      ClusterError: the ranks cannot be cut in this way.
    """
    from whale.runtime.context import find_running

    if layout is None:
        hosts = isinstance(worker_hosts, str) and worker_hosts != "all"
        layout = "all" if worker_hosts is None or hosts else worker_hosts
    context = find_running()
    size = _size_to_be() if context is None else context.planned_size
    if isinstance(layout, Mapping):
        kind, value = next(iter(layout.items()), ("", None))
    else:  # {"all"} as well
        kind, value = layout if isinstance(layout, str) else next(iter(layout), ""), None
    if kind == "all":
        return Cluster(((tuple(range(size)),),))
    if kind == "specific" and isinstance(value, Sequence):
        return Cluster(tuple(_slice(item, size) for item in value))
    if kind in ("average", "row") and isinstance(value, int) and value > 0 and size % value == 0:
        if kind == "average":
            each = size // value
            return Cluster(tuple((tuple(range(i * each, (i + 1) * each)),) for i in range(value)))
        return Cluster(tuple(tuple((r,) for r in range(i, size, value)) for i in range(value)))
    divides = kind in ("average", "row")
    raise ClusterError(
        "wh.cluster cannot cut the ranks into slices as the layout says",
        given=f"layout={layout!r}, {size} ranks",
        expected=f"a number that divides {size}" if divides else _LAYOUTS,
        action="pass such a layout to wh.cluster, or start another number of ranks (`whale run -np N`)",
    )


def _size_to_be() -> int:
    """Returns the number of ranks that the run will have, before ``wh.init``."""
    from whale.runtime.context import process

    if process.dry is not None:
        return process.dry.size
    config = Config()
    return int(config["communication.in_process_ranks"]) or process_place().size


def _slice(item: Any, size: int) -> Slice:
    groups = [item] if all(isinstance(r, int) for r in item) else list(item)
    ranks = [r for group in groups for r in group]
    if not ranks or not {*ranks} <= {*range(size)} or len({*ranks}) < len(ranks):
        raise ClusterError(
            "a slice of wh.cluster is empty, has ranks that do not exist, or has a rank twice",
            given=f"the slice {item} in a run of {size} ranks",
            expected=f"different ranks from 0 to {size - 1}",
            action="list other ranks in this slice of the argument layout",
        )
    return tuple(tuple(group) for group in groups)
