"""Cuts the ranks of a run into slices, for the ``devices`` of scopes: ``wh.cluster``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whale.config import Config
from whale.errors import ClusterError
from whale.runtime.run.context import find_running, process
from whale.started import process_place

Slice = tuple[tuple[int, ...], ...]
_LAYOUTS = '"all", {"average": k}, {"row": n} or {"specific": [[ranks], ...]}'


@dataclass(frozen=True)
class Cluster:
    """The ranks of a run; as a context manager it is itself.

    Attributes:
      slices: what ``devices=cluster.slices[i]`` gives to a scope: groups of ranks.
    """

    slices: tuple[Slice, ...]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exception: object) -> None:
        """Does nothing: nothing ends with it."""


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
    if layout is None:
        hosts = isinstance(worker_hosts, str) and worker_hosts != "all"
        layout = "all" if worker_hosts is None or hosts else worker_hosts
    context = find_running()
    size = _find_planned_size() if context is None else context.planned_size
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
        "the ranks cannot be cut into slices so",
        given=f"layout={layout!r}, {size} ranks",
        expected=f"a number that divides {size}" if divides else _LAYOUTS,
        action="correct the layout, or start another number of ranks",
    )


def _find_planned_size() -> int:
    """Returns the number of ranks of a run that has not begun."""
    if process.dry is not None:
        return process.dry.size
    config = Config()
    return int(config["cluster.ranks"]) if config["communication.transport"] == "in-process" else process_place().size


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
