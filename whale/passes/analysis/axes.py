"""Finds the mesh axes over which a program's ranks are divided, and shows the program as one axis sees it.

An axis shards tensors under the ``wh.split`` scopes that name it, and rows of the batch everywhere else. A split scope
that names no axis means the axis ``tensor``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod

from whale.errors import PlanError
from whale.ir.layout import B, Placement
from whale.ir.mesh import DATA, TENSOR, Axis, Tiles, find_coordinates, format_axes
from whale.ir.plan import BatchInput
from whale.ir.program import Program
from whale.passes.analysis.batch import batch_inputs
from whale.passes.analysis.scopes import (
    as_replica,
    axes_of_part,
    drop_axis,
    list_paths,
    ranks_of_scope,
    with_innermost,
    with_paths,
    with_ranks,
)
from whale.passes.analysis.stages import stage_groups_of
from whale.passes.settings import PlanSettings

ALL = "ranks"  # name of the only axis, if no axis has more than one coordinate


def list_named_axes(paths: Iterable[str]) -> tuple[str, ...]:
    """Lists the axes over which the ``wh.split`` scopes in these paths shard tensors, in the order in which the scopes
    were entered.
    """
    found: dict[str, None] = {}
    for path in sorted(set(paths)):
        for part in path.split("/"):
            found.update(dict.fromkeys(axes_of_part(part) or ()))
    return tuple(found)


def axes_of(program: Program, settings: PlanSettings) -> tuple[Axis, ...]:
    """Returns the mesh axes over which a normalised program is planned, outermost first.

    Axes of size 1 are dropped, and neighbours that only shard rows are merged, so that often one axis remains.

    Raises:
      PlanError: the ranks do not fill the mesh.
    """
    used = set(list_named_axes(list_paths(program)))
    used |= {axis or TENSOR for tiles in settings.split.tiles.values() for axis in tiles.axes}
    axes = _complete_axes(settings.mesh, used, settings.size)  # without stages, rows are sharded over an axis ``stage``
    return _merge_axes(axes, used)


def fill_mesh(mesh: Mapping[str, int], size: int) -> dict[str, int]:
    """Returns the sizes of the axes of a mesh of ``size`` ranks, outermost first; {} if they cannot fill it, or it has
    no axis ``data``.

    Ranks that ``mesh`` leaves over form the axis ``data``, which comes first.
    """
    left = size // (prod(mesh.values()) or 1)
    sizes = {DATA: left, **mesh} if mesh and left > 1 and DATA not in mesh else dict(mesh)
    return sizes if DATA in sizes and prod(sizes.values()) == size else {}


def data_coordinates(mesh: Mapping[str, int], size: int, order: Sequence[int] = ()) -> tuple[int, ...]:
    """Returns the coordinate of each of ``size`` ranks on the axis ``data``; () if the mesh does not have that axis.

    Args:
      mesh: sizes of axes, outermost first; ranks that they leave over are on ``data``, the first axis.
      order: the rank at each position of the mesh; (): position and rank are the same number.
    """
    sizes = fill_mesh(mesh, size)
    if not sizes:
        return ()
    at, extents = list(sizes).index(DATA), list(sizes.values())
    positions = {rank: position for position, rank in enumerate(order or range(size))}
    return tuple(find_coordinates(positions[rank], extents)[at] for rank in range(size))


def batch_of(program: Program, settings: PlanSettings) -> tuple[BatchInput, ...]:
    """Returns the batch inputs with the rows of every rank, as the settings ask (see ``batch_inputs``); ranks are in
    the order of the mesh.
    """
    asked, order = settings.batch, settings.rank_order
    coordinates = data_coordinates({a.name: a.size for a in settings.mesh}, settings.size) if asked.shares else ()
    if not order:
        return batch_inputs(program, settings.size, asked.shares, asked.marked, asked.local, coordinates)
    local = {name: tuple(sizes[rank] for rank in order) for name, sizes in asked.local.items()}
    shares = tuple(asked.shares[rank] for rank in order) if len(asked.shares) == len(order) else asked.shares
    return batch_inputs(program, settings.size, shares, asked.marked, local, coordinates)


def _complete_axes(given: tuple[Axis, ...], used: Iterable[str], size: int) -> tuple[Axis, ...]:
    """Returns ``given`` with one more axis for the ranks that these axes leave over, if there are any.

    This is an axis that a ``wh.split`` scope names and ``given`` lacks, as the last one; else ``data``, as the first
    one.

    Args:
      given: the axes whose sizes the user has fixed, outermost first.
      used: names of the axes that split scopes use.
      size: number of ranks.

    Raises:
      PlanError: ranks remain but no axis is missing, or the sizes do not divide the number of ranks.
    """
    filled = prod(a.size for a in given)
    if size % filled:
        raise PlanError(
            "the ranks do not fill the mesh",
            given=f"mesh {format_axes(given)}, {size} ranks",
            expected=f"a multiple of {filled} ranks",
            action="change the key `mesh` or the number of ranks",
        )
    if filled == size:
        return given
    names = [a.name for a in given]
    missing = sorted(name for name in used if name not in (*names, DATA))  # ``data`` is added as the first axis
    if missing:
        return (*given, Axis(missing[0], size // filled))
    if DATA not in names:
        return (Axis(DATA, size // filled), *given)
    raise PlanError(
        "the mesh does not use all ranks",
        given=f"mesh {format_axes(given)}, {size} ranks",
        expected=f"{filled} ranks, or sizes whose product is {size}",
        action="change the key `mesh` or the number of ranks",
    )


def _merge_axes(axes: tuple[Axis, ...], used: Iterable[str]) -> tuple[Axis, ...]:
    """Drops axes of size 1, and merges neighbouring axes that no split scope uses, since both shard rows.

    Args:
      used: names of the axes that split scopes use.
    """
    used = set(used)
    found: list[Axis] = []
    for axis in axes:
        if axis.size == 1:
            continue
        if found and axis.name not in used and found[-1].name not in used:
            found[-1] = Axis(f"{found[-1].name}_{axis.name}", found[-1].size * axis.size)
        else:
            found.append(axis)
    if len(found) > 1:
        return tuple(found)
    return (Axis(found[0].name if found else ALL, prod(a.size for a in axes)),)


def select_known_along(tiles: Mapping[str, Tiles], axis: str, alone: bool = False) -> dict[str, Placement]:
    """Returns the placements along one mesh axis of the variables that the run already holds sharded, by handle node.

    Args:
      tiles: handle node -> how the run holds the variable, over all its axes.
      axis: name of the axis that is planned.
      alone: whether the program has only this axis. A variable that is cut along a single axis is then taken as cut
        along this one, whatever the name: other programs of the run may name their only axis differently.
    """
    found: dict[str, Placement] = {}
    for name, lying in tiles.items():
        only = lying.cuts[0] if alone and len(lying.cuts) == 1 else None
        found[name] = only or lying.find_cut(axis) or B
    return found


def tiles_that_fit(program: Program, settings: PlanSettings) -> dict[str, Tiles]:
    """Returns the tiles of variables that the run holds, with those replaced by whole variables whose axes differ from
    this program's axes.

    If the program has pipeline stages, all tiles are returned unchanged: stage groups have axes of their own.
    """
    found = dict(settings.split.tiles)
    if not found or stage_groups_of(program, settings):
        return found
    while True:  # repeat: with fewer used axes more of them are merged, and other tiles may no longer fit
        axes = axes_of(program, settings.but(split__tiles=found))
        sizes = {a.name: a.size for a in axes}
        alone = axes[0].size if len(axes) == 1 else 0
        fit = {
            name: lying
            if lying.sizes == (alone,) or all(sizes.get(a) == n for a, n in zip(lying.axes, lying.sizes))
            else Tiles()
            for name, lying in found.items()
        }
        if fit == found:
            return found
        found = fit


def project_to_axis(program: Program, axis: str, axes: Sequence[Axis] = ()) -> Program:
    """Returns ``program`` as one axis sees it: without the ``wh.split`` scopes of other axes, and with coordinates
    along the axis in place of the ranks that scopes name.

    Ranks named by a split scope shard their rows along the axes over which the scope shards no tensors.

    Args:
      axes: all mesh axes, if there are several.
    """
    paths = list_paths(program)
    groups = {path for path in paths if ranks_of_scope(path) is not None} if len(axes) > 1 else set()
    if set(list_named_axes(paths)) <= {axis} and not groups and not any("(axis=" in text for text in paths):
        return program

    def as_seen(path: str) -> str:
        parts = (_locate(path, axis, axes) if path in groups else path).split("/")
        return "/".join(kept for part in parts if (kept := drop_axis(part, axis)))

    return with_paths(program, as_seen)


def _locate(path: str, axis: str, axes: Sequence[Axis]) -> str:
    """Rewrites the ranks that a scope's path names as coordinates along one mesh axis.

    Only the innermost part of the path that names ranks is changed: on the mesh ``stage=2,data=2`` a part with
    ``ranks=2+3`` gets ``ranks=1`` along ``stage``, and names none along ``data``, where it has all coordinates.

    Raises:
      PlanError: the ranks are not a block of the mesh.
    """
    ranks = ranks_of_scope(path) or frozenset()
    size = next(a.size for a in axes if a.name == axis)
    along = {at[[a.name for a in axes].index(axis)] for at in _block_of_ranks(path, ranks, axes)}

    def here(part: str) -> str:
        if len(along) == size:
            return with_ranks(part, ())
        # Along an axis over which the scope shards no tensors, its ranks shard the rows.
        found = with_ranks if axis in (axes_of_part(part) or (axis,)) else as_replica
        return found(part, sorted(along))

    return with_innermost(path, here)


def _block_of_ranks(path: str, ranks: Collection[int], axes: Sequence[Axis]) -> set[tuple[int, ...]]:
    """Returns the mesh coordinates of the ranks that a scope names.

    Raises:
      PlanError: the ranks are not a block of the mesh: all combinations of some coordinates of each axis.
    """
    found = {find_coordinates(rank, [a.size for a in axes]) for rank in ranks}
    along = [{at[i] for at in found} for i in range(len(axes))]
    if prod(map(len, along)) != len(found):
        raise PlanError(
            "the ranks of a scope do not form a block of the mesh",
            op=path,
            given=f"devices={sorted(ranks)}, mesh {format_axes(axes)}",
            expected="all combinations of some coordinates of each axis, such as all ranks of two rows of the mesh",
            action="change `devices=` of the scope, or the key `mesh`; on several hosts, mesh.rank_order=numbers keeps "
            "the ranks in order",
        )
    return found
