"""Puts nodes and variables whose names match a user's patterns into scopes.

A pattern is a glob: ``*`` is any text, ``/`` included, ``?`` one character, ``[0-5]`` one of several. It begins and
ends where parts of a name do: ``decoder/layers_[0-5]`` stands for all that is inside of those layers, whatever they are
inside of. Names are those of TensorFlow's name scopes, which layers of Keras and modules enter, and of variables.

Decision: 0060.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from whale.ir.ops import READS
from whale.ir.program import Node, Program
from whale.passes.analysis.scopes import PASSED_ON

KINDS = ("replica", "stage", "split")  # in the order in which scopes stand inside each other


@dataclass(frozen=True)
class Pattern:
    """A glob for names, and the scope for the nodes and variables whose names match.

    Attributes:
      text: the glob.
      kind: the scope's kind.
      part: the scope's part of a path: ``split_2(dim=-1)``.
    """

    text: str
    kind: str
    part: str

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        return re.compile(r"(?:^|/)" + fnmatch.translate(self.text).removesuffix(r"\Z") + r"(?:/|$)")

    def matches(self, name: str) -> bool:
        """Tells whether the pattern matches the name, or a sequence of its parts."""
        return self._expression.search(name) is not None


@dataclass(frozen=True)
class Named:
    """A program after its nodes and variables were put into scopes by name.

    Attributes:
      matched: the patterns that match at least one name.
      names: all names that patterns are compared with: those of name scopes of nodes, and of variables.
    """

    program: Program
    matched: frozenset[str] = frozenset()
    names: Collection[str] = field(default=())


def in_named_scopes(program: Program, patterns: Sequence[Pattern], variables: Mapping[str, str]) -> Named:
    """Puts the nodes and variables of ``program`` whose names match into scopes; scopes that they already have take
    precedence.

    Of each kind the first pattern that matches counts. What reads a variable stands in its split as well.

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
    return "/".join(p.part for p in sorted(patterns, key=lambda p: KINDS.index(p.kind)))


def nearest(pattern: str, names: Collection[str], count: int = 3) -> list[str]:
    """Returns the names, or sequences of their parts, that are most similar to a pattern that matches nothing."""
    parts = [name.split("/") for name in names]
    length = pattern.count("/") + 1
    inside = {"/".join(p[i : i + length]) for p in parts for i in range(max(1, len(p) - length + 1))}
    return difflib.get_close_matches(pattern, sorted(inside), count, 0.3)
