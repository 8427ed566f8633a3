"""Provides names of the first Whale that duplicate others, for its scripts.

Each is implemented by Whale's own interface: ``replicate`` by ``wh.stage`` or ``wh.replica``, ``auto_parallel`` by the
key ``mesh.auto_parallel`` or by ``wh.split`` around everything, ``set_default_strategy(wh.split())`` as
``wh.annotate({"*": wh.split()})``, ``cluster`` by the numbers of ranks.
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
    """A scope for one part of a model, as in the Whale paper: ``with wh.replicate(1):``; each opening is a new part.

    Parts of fewer devices than there are ranks are stages, in this order; a single one is the whole model, which is
    replicated. A part of all ranks has its rows divided over them.

    Args:
      device_count: devices of one replica of it.
      name: what a person calls it; nothing else.
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
    """Tells whether a part of the model with so many devices has ranks of its own."""
    from whale.runtime.context import require_current
    from whale.runtime.scopes import check_count

    size = require_current("the scope wh.replicate").planned_size
    check_count("replicate", count)
    return (count or 1) < size or size == 1


class auto_parallel(ContextDecorator):
    """Parallelises steps compiled from now on automatically: ``with wh.auto_parallel():`` (or the call alone).

    As the key ``mesh.auto_parallel``; scopes are kept.

    Args:
      modes: None: the strategy with the fastest predicted step. ``wh.replica``: the batch is divided, as by default;
        ``wh.split``: tensors of all layers are divided; ``wh.pipeline`` or ``wh.stage``, or a list with one of them: as
        None, with as many stages as ``pipeline.stages`` says.

    Raises:
      ClusterError: before ``wh.init``.
      PlanError: another mode.
    """

    def __init__(self, modes: Any = None) -> None:
        kinds = modes if isinstance(modes, (list, tuple)) else [] if modes is None else [modes]
        _spread([getattr(kind, "__name__", type(kind).__name__) for kind in kinds])

    def __enter__(self) -> auto_parallel:
        return self

    def __exit__(self, *exception: Any) -> None:
        """Keeps the mode until the end of the run, since steps are compiled when they are called."""


def _spread(modes: Sequence[str]) -> None:
    """Makes steps compiled from now on use these modes; without any, the fastest strategy.

    Raises:
      PlanError: there is no such mode.
    """
    from whale.runtime.context import require_current

    context = require_current("wh.auto_parallel()")
    if unknown := [mode for mode in modes if mode not in ("replica", "replicate", "split", "pipeline", "stage")]:
        raise PlanError(
            "there is no such mode of auto_parallel",
            given=unknown[0],
            expected="wh.replica, wh.split, wh.pipeline, or a list of them",
            action="correct modes, or leave it out",
        )
    if modes and set(modes) <= {"replica", "replicate"}:
        return
    if modes and set(modes) <= {"replica", "replicate", "split"}:
        context.scoping.split_everything = True
        context.scoping.dividing_scope_seen = True
        return
    context.config = context.config.but({"mesh.auto_parallel": True})


def set_default_strategy(strategy: Any) -> None:
    """Sets the strategy of code outside of all scopes: ``wh.replica()``, the default, or ``wh.split()``.

    It applies to steps compiled from then on.

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
            "code outside of scopes cannot have this strategy",
            given=f"wh.{type(strategy).__name__}" + (" with arguments" if arguments else ""),
            expected="wh.replica() or wh.split()",
            action="enter the other scope where the code is that it is for",
        )
    context.scoping.split_everything = isinstance(strategy, split)
    context.scoping.dividing_scope_seen |= context.scoping.split_everything


Slice = tuple[tuple[int, ...], ...]
_LAYOUTS = '"all", {"average": k}, {"row": n} or {"specific": [[ranks], ...]}'


@dataclass(frozen=True)
class Cluster:
    """The ranks of a run; as a context manager it returns itself.

    Attributes:
      slices: the values for ``devices=cluster.slices[i]`` of a scope: groups of ranks.
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
    """Cuts the ranks of the run into slices. Before ``wh.init`` they are those that it will have by its environment.

    Args:
      worker_hosts: a layout, where it stands first. Hosts, as scripts of the first Whale give them with ``ps_hosts``,
        ``job_name`` and ``rank``, give way to the ranks that were started.
      layout: ``"all"``: one slice of all ranks. ``{"average": k}``: k slices of as many ranks, in order.
        ``{"row": n}``: ranks in rows of n, and slice i is the i-th of each row, so each row is one replica of a
        pipeline whose stage i is on slice i: four ranks in rows of 2 are ``[[0], [2]]`` and ``[[1], [3]]``.
        ``{"specific": s}``: the slices s, each a list of ranks or of lists of ranks.

    Raises:
      ClusterError: the ranks cannot be cut so.
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
        "the ranks cannot be cut into slices as the layout says",
        given=f"layout={layout!r}, {size} ranks",
        expected=f"a number that divides {size}" if divides else _LAYOUTS,
        action="correct the layout, or start another number of ranks",
    )


def _size_to_be() -> int:
    """Returns the number of ranks that a run will have, before it begins."""
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
            "a slice of the cluster has ranks that do not exist, or one twice",
            given=f"{item}, {size} ranks",
            expected=f"different ranks below {size}",
            action="correct the slice",
        )
    return tuple(tuple(group) for group in groups)
