"""Reads and rewrites the paths of scopes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache

from whale.ir.ops import VIEWS
from whale.ir.program import Program

_PIPELINE = re.compile(r"pipeline_\d+\(micro_batches=(\d+)\)$")
_SCOPE = re.compile(
    r"(?P<kind>split|replica)_\d+"
    r"(?:\((?:axis=(?P<axis>\w+(?:\+\w+)*))?,?(?:dim=(?P<dim>-?\d+))?,?(?:(?P<way>sequence|context)=(?P<sequence>\d+))?,?"
    r"(?:ranks=(?P<ranks>\d+(?:\+\d+)*))?\))?$"
)
_AXES = re.compile(r"\(axis=[\w+]+(?P<more>,|\)$)")

# Ops that pass a variable's elements on, so that a reader of the result reads the variable.
PASSED_ON = VIEWS | {"ReadVariableOp", "Cast", "Transpose"}  # these make new memory, of the same elements


def split_scope(path: str) -> tuple[str, int | None] | None:
    """Returns (path, ``dim`` as the user named it) of the innermost scope around a node if it is a split, else None."""
    match = _SCOPE.match(path.rsplit("/", 1)[-1])
    if match is None or match["kind"] != "split":
        return None
    return path, int(match["dim"]) if match["dim"] else None


def has_split_scopes(program: Program) -> bool:
    """Tells whether any node of the program is under ``wh.split``."""
    return any("split_" in n.scope and split_scope(n.scope) for n in program.nodes)


def axes_of_part(part: str) -> tuple[str, ...] | None:
    """Returns the axes over which a part of a path divides tensors, if it is a split; else None."""
    match = _SCOPE.match(part)
    if match is None or match["kind"] != "split":
        return None
    return tuple(match["axis"].split("+")) if match["axis"] else ("tensor",)


def drop_axis(part: str, axis: str) -> str:
    """Rewrites a part of a path for ``axis``: "" for a split over other axes, and without axis names for a split over
    this one.
    """
    axes = axes_of_part(part)
    if axes is None:
        return part
    if axis not in axes:
        return ""
    return _AXES.sub(lambda m: "(" if m["more"] == "," else "", part)


def with_ranks(part: str, ranks: Sequence[int]) -> str:
    """Replaces the ranks that a replica or a split, a part of a path, names; with (), removes them."""
    match = _SCOPE.match(part)
    if match is None or not match["ranks"]:
        return part
    named = f"ranks={'+'.join(map(str, ranks))}" if ranks else ""
    return re.sub(r",?ranks=[\d+]+", lambda m: named and m[0][: m[0].startswith(",")] + named, part).replace("()", "")


def as_replica(part: str, ranks: Sequence[int]) -> str:
    """Replaces a split, a part of a path, by the replica that an axis sees along which the split divides no tensors."""
    return f"replica_{part.partition('(')[0].rpartition('_')[2]}(ranks={'+'.join(map(str, ranks))})"


def with_innermost(path: str, change: Callable[[str], str]) -> str:
    """Applies ``change`` to the innermost part of a path that names ranks, and removes the ranks from the other
    parts.
    """
    parts = path.split("/")
    innermost = max(i for i, part in enumerate(parts) if with_ranks(part, ()) != part)
    return "/".join(change(part) if i == innermost else with_ranks(part, ()) for i, part in enumerate(parts))


def with_paths(program: Program, change: Callable[[str], str]) -> Program:
    """Rewrites the scopes' paths of ``program`` and of its functions; ``change`` is called once for each path."""
    change = cache(change)

    def rewrite_graph(graph: Program) -> Program:
        nodes = tuple(replace(n, scope=new) if (new := change(n.scope)) != n.scope else n for n in graph.nodes)
        variables = tuple(replace(v, scope=new) if (new := change(v.scope)) != v.scope else v for v in graph.variables)
        return replace(graph, nodes=nodes, variables=variables)

    functions: Mapping[str, Program] = {name: rewrite_graph(body) for name, body in program.functions.items()}
    return replace(rewrite_graph(program), functions=functions)


@lru_cache(maxsize=4096)
def sequence_of(path: str) -> int | None:
    """Returns the dimension along which the innermost ``wh.split`` scope divides activations between products; None: it
    does not.
    """
    return _dimension_of(path, "sequence")


@lru_cache(maxsize=4096)
def context_of(path: str) -> int | None:
    """Returns the dimension along which the innermost ``wh.split`` scope divides every layer; None: it does not."""
    return _dimension_of(path, "context")


def _dimension_of(path: str, way: str) -> int | None:
    match = _SCOPE.match(path.rsplit("/", 1)[-1])
    return int(match["sequence"]) if match is not None and match["way"] == way else None


@lru_cache(maxsize=4096)
def ranks_of_scope(path: str) -> frozenset[int] | None:
    """Returns the ranks that the innermost ``wh.split`` or ``wh.replica`` scope with ranks names; None stands for all
    ranks.
    """
    for part in reversed(path.split("/")):
        match = _SCOPE.match(part)
        if match is not None and match["ranks"]:
            return frozenset(map(int, match["ranks"].split("+")))
    return None


def micro_batches_in(paths: Iterable[str]) -> dict[int, str]:
    """Maps each number of micro-batches that a pipeline scope in ``paths`` asks for to one such scope."""
    parts = sorted({part for path in set(paths) for part in path.split("/")})
    return {int(match[1]): part for part in parts if (match := _PIPELINE.match(part))}


def list_paths(program: Program) -> set[str]:
    """Returns the paths of all scopes of the nodes and variables of a program and its functions."""
    bodies = (program, *program.functions.values())
    return {x.scope for body in bodies for x in body.nodes} | {v.scope for body in bodies for v in body.variables}
