"""Reads and rewrites the paths of scopes, and puts nodes and variables into scopes by patterns of their names.

A path is the nesting of scopes around a node, such as ``replica_0/split_2(dim=-1)``. Each part is a scope: its kind, a
number, and its options.

A pattern is a glob: ``*`` is any text, also with ``/``, ``?`` one character, ``[0-5]`` one of several. It matches whole
parts of a name: ``decoder/layers_[0-5]`` matches everything in these layers, whatever the layers are in. Names are
those of TensorFlow's name scopes, which Keras layers and modules enter, and of variables.

Decision: 0060.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache

from whale.ir.ops import READS, VIEWS
from whale.ir.program import Node, Program

_PIPELINE = re.compile(r"pipeline_\d+\(micro_batches=(\d+)\)$")
_SCOPE = re.compile(
    r"(?P<kind>split|replica)_\d+"
    r"(?:\((?:axis=(?P<axis>\w+(?:\+\w+)*))?,?(?:dim=(?P<dim>-?\d+))?,?(?:(?P<way>sequence|context)=(?P<sequence>\d+))?,?"
    r"(?:ranks=(?P<ranks>\d+(?:\+\d+)*))?\))?$"
)
_AXES = re.compile(r"\(axis=[\w+]+(?P<more>,|\)$)")

# Ops that hand a variable's elements on, so that a reader of their result counts as a reader of the variable.
PASSED_ON = VIEWS | {"ReadVariableOp", "Cast", "Transpose"}
_KINDS = ("replica", "stage", "split")  # outermost first


@lru_cache(maxsize=4096)
def split_scope(path: str) -> tuple[str, int | None] | None:
    """Returns (the path, its ``dim=`` or None) if the innermost scope of ``path`` is a ``wh.split``; else None."""
    match = _SCOPE.match(path.rsplit("/", 1)[-1])
    if match is None or match["kind"] != "split":
        return None
    return path, int(match["dim"]) if match["dim"] else None


def has_split_scopes(program: Program) -> bool:
    """Returns True if any node of the program is under ``wh.split``."""
    return any(map(split_scope, program.scopes))


def find_split_weights(program: Program) -> set[str]:
    """Returns the handle nodes of the variables that nodes under split scopes read, and of all others of their shapes:
    their optimizers' slots.
    """
    read = {ref.node for n in program.nodes if "split_" in n.scope and split_scope(n.scope) for ref in n.inputs}
    shapes = {v.type.shape for v in program.variables if v.node in read and len(v.type.shape or ()) >= 2}
    return {v.node for v in program.variables if v.type.shape in shapes}


def axes_of_part(part: str) -> tuple[str, ...] | None:
    """Returns the mesh axes over which one part of a path shards tensors, ("tensor",) if it names none; None if the
    part is no split.
    """
    match = _SCOPE.match(part)
    if match is None or match["kind"] != "split":
        return None
    return tuple(match["axis"].split("+")) if match["axis"] else ("tensor",)


def drop_axis(part: str, axis: str) -> str:
    """Rewrites one part of a path as ``axis`` sees it: "" for a split over other axes, the part without axis names for
    a split over this one.
    """
    axes = axes_of_part(part)
    if axes is None:
        return part
    if axis not in axes:
        return ""
    return _AXES.sub(lambda m: "(" if m["more"] == "," else "", part)


def with_ranks(part: str, ranks: Sequence[int]) -> str:
    """Replaces the ranks that one part of a path names by ``ranks``, or removes them for (); a part without ranks is
    unchanged.
    """
    match = _SCOPE.match(part)
    if match is None or not match["ranks"]:
        return part
    named = f"ranks={'+'.join(map(str, ranks))}" if ranks else ""
    return re.sub(r",?ranks=[\d+]+", lambda m: named and m[0][: m[0].startswith(",")] + named, part).replace("()", "")


def as_replica(part: str, ranks: Sequence[int]) -> str:
    """Turns a split, one part of a path, into a ``replica`` on ``ranks``: what a mesh axis sees of a split that shards
    no tensors over it.
    """
    return f"replica_{part.partition('(')[0].rpartition('_')[2]}(ranks={'+'.join(map(str, ranks))})"


def with_innermost(path: str, change: Callable[[str], str]) -> str:
    """Applies ``change`` to the innermost part of a path that names ranks, and removes ranks from the other parts."""
    parts = path.split("/")
    innermost = max(i for i, part in enumerate(parts) if with_ranks(part, ()) != part)
    return "/".join(change(part) if i == innermost else with_ranks(part, ()) for i, part in enumerate(parts))


def with_paths(program: Program, change: Callable[[str], str]) -> Program:
    """Rewrites all scope paths of ``program`` and its functions with ``change``, which is called once for each path."""
    change = cache(change)

    def rewrite_graph(graph: Program) -> Program:
        nodes = tuple(replace(n, scope=new) if (new := change(n.scope)) != n.scope else n for n in graph.nodes)
        variables = tuple(replace(v, scope=new) if (new := change(v.scope)) != v.scope else v for v in graph.variables)
        return replace(graph, nodes=nodes, variables=variables)

    functions: Mapping[str, Program] = {name: rewrite_graph(body) for name, body in program.functions.items()}
    return replace(rewrite_graph(program), functions=functions)


@lru_cache(maxsize=4096)
def sequence_of(path: str) -> int | None:
    """Returns the activation dimension that the innermost scope, a ``wh.split(sequence=..)``, names; None if the scope
    has no such option.
    """
    return _dimension_of(path, "sequence")


@lru_cache(maxsize=4096)
def context_of(path: str) -> int | None:
    """Returns the activation dimension that the innermost scope, a ``wh.split(context=..)``, names; None if the scope
    has no such option.
    """
    return _dimension_of(path, "context")


def _dimension_of(path: str, way: str) -> int | None:
    match = _SCOPE.match(path.rsplit("/", 1)[-1])
    return int(match["sequence"]) if match is not None and match["way"] == way else None


@lru_cache(maxsize=4096)
def ranks_of_scope(path: str) -> frozenset[int] | None:
    """Returns the ranks that the innermost ``wh.split`` or ``wh.replica`` with ranks names; None if no scope in the
    path names any (all ranks).
    """
    for part in reversed(path.split("/")):
        match = _SCOPE.match(part)
        if match is not None and match["ranks"]:
            return frozenset(map(int, match["ranks"].split("+")))
    return None


def micro_batches_in(paths: Iterable[str]) -> dict[int, str]:
    """Maps each number of micro-batches that a pipeline scope in ``paths`` asks for to one such scope, for error
    messages.
    """
    parts = sorted({part for path in set(paths) for part in path.split("/")})
    return {int(match[1]): part for part in parts if (match := _PIPELINE.match(part))}


def list_paths(program: Program) -> set[str]:
    """Returns the scope paths of all nodes and variables of a program and its functions."""
    bodies = (program, *program.functions.values())
    return {x.scope for body in bodies for x in body.nodes} | {v.scope for body in bodies for v in body.variables}


@dataclass(frozen=True)
class Pattern:
    """Represents a glob for names, and the scope for the nodes and variables whose names match.

    Attributes:
      text: the glob.
      kind: the scope's kind: replica, stage or split.
      part: the scope as a part of a path: ``split_2(dim=-1)``.
    """

    text: str
    kind: str
    part: str

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        return re.compile(r"(?:^|/)" + fnmatch.translate(self.text).removesuffix(r"\Z") + r"(?:/|$)")

    def matches(self, name: str) -> bool:
        """Returns True if the pattern matches the name, or consecutive parts of it."""
        return self._expression.search(name) is not None


@dataclass(frozen=True)
class Named:
    """Holds a program whose nodes and variables were put into scopes by name.

    Attributes:
      matched: texts of the patterns that match at least one name.
      names: all names that patterns were compared with, of name scopes and of variables, for suggestions.
    """

    program: Program
    matched: frozenset[str] = frozenset()
    names: Collection[str] = field(default=())


def in_named_scopes(program: Program, patterns: Sequence[Pattern], variables: Mapping[str, str]) -> Named:
    """Puts nodes and variables whose names match a pattern into its scope; scopes that they have already take
    precedence.

    Of each kind of scope, the first pattern that matches counts. A node that reads a variable in a split is put into
    that split as well.

    Args:
      variables: handle node -> name of the variable, with the layers that it belongs to.
    """
    matched: set[str] = set()
    known: dict[str, dict[str, Pattern]] = {}

    def find(name: str) -> dict[str, Pattern]:
        if name not in known:
            known[name] = {}
            for pattern in patterns:
                if pattern.matches(name):
                    matched.add(pattern.text)
                    known[name].setdefault(pattern.kind, pattern)
        return known[name]

    of_variable = {v.node: find(variables.get(v.node, v.name)) for v in program.variables}
    scoped = replace(
        _graph(program, find, of_variable),
        functions={name: _graph(body, find, {}) for name, body in program.functions.items()},
    )
    scopes = {n.name.rpartition("/")[0] for body in (program, *program.functions.values()) for n in body.nodes}
    return Named(scoped, frozenset(matched), sorted({*scopes, *variables.values()} - {""}))


def _graph(program: Program, found: object, of_variable: Mapping[str, dict[str, Pattern]]) -> Program:
    reads: dict[str, dict[str, Pattern]] = {}
    nodes: list[Node] = []
    for node in program.nodes:
        own = found(node.name) if node.name not in of_variable else of_variable[node.name]  # type: ignore[operator]
        for ref in node.inputs:
            read = of_variable.get(ref.node) or reads.get(ref.node) or {}
            if read and (node.op in READS or node.op in PASSED_ON):
                reads[node.name] = read
            if own and "split" in read:
                own = {**read, **own}
        nodes.append(node if node.scope or not own else replace(node, scope=_path(own.values())))
    variables = tuple(
        v if v.scope or not of_variable.get(v.node) else replace(v, scope=_path(of_variable[v.node].values()))
        for v in program.variables
    )
    return program.replace_nodes(tuple(nodes), variables=variables)


def _path(patterns: Iterable[Pattern]) -> str:
    return "/".join(p.part for p in sorted(patterns, key=lambda p: _KINDS.index(p.kind)))


def nearest(pattern: str, names: Collection[str], count: int = 3) -> list[str]:
    """Returns up to ``count`` names, or consecutive parts of names, that are most similar to a pattern that matches
    nothing.
    """
    parts = [name.split("/") for name in names]
    length = pattern.count("/") + 1
    inside = {"/".join(p[i : i + length]) for p in parts for i in range(max(1, len(p) - length + 1))}
    return difflib.get_close_matches(pattern, sorted(inside), count, 0.3)
