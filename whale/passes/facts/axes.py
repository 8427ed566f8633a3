"""Which axes a program's ranks form, and what of the program an axis sees.

An axis divides tensors under the ``wh.split`` scopes that name it, and rows of the batch everywhere else. A scope that
names none means the axis ``tensor``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod

from whale.errors import PlanError
from whale.ir.layout import B, Placement
from whale.ir.mesh import Axis, Tiles, format_axes
from whale.ir.program import Program
from whale.passes.facts.scopes import all_paths, axes_of_part, without_axis
from whale.passes.facts.stages import DATA, TENSOR
from whale.passes.settings import PlanSettings

ALL = "ranks"  # the one axis of a program that has no more


def named_axes(paths: Iterable[str]) -> tuple[str, ...]:
    """The axes that the ``wh.split`` scopes in scopes' paths divide tensors over, in the order of their entering."""
    found: dict[str, None] = {}
    for path in sorted(set(paths)):
        for part in path.split("/"):
            found.update(dict.fromkeys(axes_of_part(part) or ()))
    return tuple(found)


def axes_of(program: Program, settings: PlanSettings) -> tuple[Axis, ...]:
    """The axes over which the ranks of ``settings`` divide a normalised program; one, where more make no difference.

    Raises:
      PlanError: the ranks do not fill the mesh.
    """
    used = set(named_axes(all_paths(program)))
    used |= {axis or TENSOR for tiles in settings.split.tiles.values() for axis in tiles.axes}
    given = settings.mesh or _of_groups(settings)  # a program without stages divides rows over their axis
    axes = _completed(given, used, settings.size)
    return _merged(axes, used)


def _of_groups(settings: PlanSettings) -> tuple[Axis, ...]:
    """The mesh that ``split.ranks`` is short for."""
    size, group = settings.size, settings.split.ranks
    if group > size or (group and size % group):
        raise PlanError(
            "the ranks cannot be divided into equal groups",
            given=f"split.ranks={group}, {size} ranks",
            expected=f"split.ranks={' or '.join(str(n) for n in range(1, size + 1) if size % n == 0)}",
            action="change split.ranks or the number of ranks",
        )
    return (Axis(DATA, size // group), Axis(TENSOR, group)) if group else ()


def _completed(given: tuple[Axis, ...], used: Iterable[str], size: int) -> tuple[Axis, ...]:
    """``given`` and one more axis of all ranks that are left: the first that a scope names, else ``data``."""
    filled = prod(a.size for a in given)
    if size % filled:
        raise PlanError(
            "the ranks do not fill the mesh",
            given=f"mesh {format_axes(given)}, {size} ranks",
            expected=f"a multiple of {filled} ranks",
            action="change the mesh or the number of ranks",
        )
    if filled == size:
        return given
    names = [a.name for a in given]
    missing = sorted(name for name in used if name not in names)
    if missing:
        return (*given, Axis(missing[0], size // filled))
    if DATA not in names:
        return (Axis(DATA, size // filled), *given)
    raise PlanError(
        "the mesh leaves ranks over",
        given=f"mesh {format_axes(given)}, {size} ranks",
        expected=f"{filled} ranks, or sizes whose product is {size}",
        action="change the mesh or the number of ranks",
    )


def _merged(axes: tuple[Axis, ...], used: Iterable[str]) -> tuple[Axis, ...]:
    """Axes of more than one coordinate; neighbours that only divide rows are one."""
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


def known_along(tiles: Mapping[str, Tiles], axis: str, alone: bool = False) -> dict[str, Placement]:
    """How variables that earlier programs have fixed lie over one axis, by handle node.

    Args:
      alone: whether it is the only axis of the program, whatever it was called where they were fixed.
    """
    found: dict[str, Placement] = {}
    for name, lying in tiles.items():
        only = lying.cuts[0] if alone and len(lying.cuts) == 1 else None
        found[name] = only or lying.along(axis) or B
    return found


def seen_along(program: Program, axis: str) -> Program:
    """``program`` with the ``wh.split`` scopes of other axes taken out of its paths."""
    seen: dict[str, str] = {}

    def path(text: str) -> str:
        if "split_" not in text:
            return text
        if text not in seen:
            kept = (without_axis(part, axis) for part in text.split("/"))
            seen[text] = "/".join(part for part in kept if part)
        return seen[text]

    def of_graph(graph: Program) -> Program:
        nodes = tuple(n if n.scope == path(n.scope) else replace(n, scope=path(n.scope)) for n in graph.nodes)
        variables = tuple(v if v.scope == path(v.scope) else replace(v, scope=path(v.scope)) for v in graph.variables)
        return replace(graph, nodes=nodes, variables=variables)

    paths = all_paths(program)
    if set(named_axes(paths)) <= {axis} and not any("(axis=" in text for text in paths):
        return program
    functions: Mapping[str, Program] = {name: of_graph(body) for name, body in program.functions.items()}
    return replace(of_graph(program), functions=functions)
