"""Finds which micro-batches of a rank can run the same functions.

``find_kinds`` makes the program of each micro-batch and groups consecutive ones that differ at most in constants that
grow with the micro-batch's number. ``whale.partition.pipeline.microbatch_loop`` then needs one set of functions per
group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from whale.ir.layout import Shard
from whale.ir.plan import Plan
from whale.ir.program import Node, Program, Ref
from whale.ir.values import Func
from whale.partition.spmd import partition_for_rank

TIME = "whale/micro"


@dataclass
class MicrobatchKind:
    """Represents consecutive micro-batches that run the same functions.

    Attributes:
      members: numbers of the micro-batches.
      program: the program of the first of them.
      varying: name of a constant that differs between them -> (value in micro-batch 0, increment per micro-batch).
      joins: node that sums (all-reduce) or concatenates (all-gather) over micro-batches -> the tensor that each
        micro-batch contributes; filled by ``microbatch_loop``.
      region: node -> "outer" (in the main graph), "each" (in the functions), "join" (a node of ``joins``) or "free" (a
        constant, copied wherever it is read); filled by ``microbatch_loop``.
    """

    members: range
    program: Program
    varying: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    joins: dict[str, Ref] = field(default_factory=dict)  # sums and gatherings -> what a micro-batch has of it
    region: dict[str, str] = field(default_factory=dict)  # node -> outer, each, join


def find_kinds(program: Program, plan: Plan) -> list[MicrobatchKind]:
    """Returns the kinds of micro-batches of a rank's program, in the order of the micro-batches."""
    alike = _KindFinder(program, plan)
    return [kind for run in alike.find_runs() for kind in alike.find_kinds(run)]


_wrapping = np.errstate(over="ignore")  # numbers of random streams overflow 64 bits on purpose


class _KindFinder:
    def __init__(self, program: Program, plan: Plan):
        self.program, self.plan = program, plan
        self.locals: dict[int, Program] = {}

    def find_runs(self) -> list[range]:
        """Returns the ranges of consecutive micro-batches that have equally many rows."""
        cuts = {
            p.sizes for s in self.plan.strategies[""].values() for p in s.inputs + s.outputs if isinstance(p, Shard)
        }
        starts = [i for i in range(self.plan.size) if i == 0 or any(c[i] != c[i - 1] for c in cuts)]
        return [range(a, b) for a, b in zip(starts, [*starts[1:], self.plan.size])]

    def _make_local(self, number: int) -> Program:
        if number not in self.locals:
            self.locals[number] = partition_for_rank(self.program, self.plan, number, "", None, TIME)
        return self.locals[number]

    @_wrapping
    def find_kinds(self, run: range) -> list[MicrobatchKind]:
        """Returns the kinds among consecutive micro-batches with equally many rows.

        They are one kind if their programs differ only in integer constants that grow linearly with the micro-batch's
        number.
        """
        first = self._make_local(run[0])
        if len(run) == 1:
            return [MicrobatchKind(run, first)]
        second = _find_differences(first, self._make_local(run[1]))
        last = _find_differences(first, self._make_local(run[-1]))
        if second is None:
            return [MicrobatchKind(run[:1], first), *self.find_kinds(run[1:])]
        varying: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for name, value in second.items():
            start = _read_value(first.by_name[name]).astype(np.int64)
            step = value.astype(np.int64) - start
            varying[name] = start - run[0] * step, step
        if last is None or last.keys() != second.keys() or any(
            not np.array_equal(evaluate_varying(varying[name], run[-1], value.dtype), value)
            for name, value in last.items()
        ):  # fmt: skip
            return [MicrobatchKind(range(i, i + 1), self._make_local(i)) for i in run]
        return [MicrobatchKind(run, first, varying)]


@_wrapping
def evaluate_varying(varying: tuple[np.ndarray, np.ndarray], number: int, dtype: Any) -> np.ndarray:
    """Returns the value of a constant in micro-batch ``number``.

    Args:
      varying: (value in micro-batch 0, increment per micro-batch).
    """
    return (varying[0] + number * varying[1]).astype(dtype)


def _read_value(node: Node) -> np.ndarray:
    value: np.ndarray = node.attrs["value"].numpy()
    return value


def _find_differences(a: Program, b: Program) -> dict[str, np.ndarray] | None:
    """Returns the integer constants that differ between two programs, with their values in ``b``.

    The result is None if the programs differ in anything else.
    """
    if len(a.nodes) != len(b.nodes) or a.effects != b.effects or a.functions.keys() != b.functions.keys():
        return None
    found: dict[str, np.ndarray] = {}
    for x, y in zip(a.nodes, b.nodes):
        if (x.name, x.op, x.inputs, x.controls, x.outputs) != (y.name, y.op, y.inputs, y.controls, y.outputs):
            return None
        if _has_same_attributes(x, y):
            continue
        if x.op != "Const" or not x.outputs[0].dtype.startswith(("int", "uint")):
            return None
        found[x.name] = _read_value(y)
    for name, body in a.functions.items():
        if body is not b.functions[name] and _find_differences(body, b.functions[name]) != {}:
            return None
    return found


def _has_same_attributes(x: Node, y: Node) -> bool:
    if x is y or (x.attrs is y.attrs and x.marks == y.marks):
        return True
    # A stateful random kernel continues its stream from call to call, so one seed serves all micro-batches.
    mine, other = ({k: v for k, v in n.attrs.items() if k != "seed2"} for n in (x, y))
    return mine == other and x.marks == y.marks


def may_carry(node: Node) -> bool:
    """Returns True if the node may name functions in its attributes, as loops, branches and calls do.

    A quick test, so that the attributes of all other nodes need not be searched.
    """
    return any(
        isinstance(v, Func) or (isinstance(v, tuple) and v and isinstance(v[0], Func)) for v in node.attrs.values()
    )


def give_own_bodies(program: Program, number: int) -> Program:
    """Returns the program with its functions renamed for kind ``number`` of micro-batches, so that kinds do not share
    names.
    """
    if number == 0 or not program.functions:
        return program
    names = {name: f"{name}/micro_batch_{number}" for name in program.functions}

    def rename_value(value: Any) -> Any:
        if isinstance(value, Func):
            return replace(value, name=names.get(value.name, value.name))
        return tuple(map(rename_value, value)) if isinstance(value, tuple) else value

    def rename_node(node: Node) -> Node:
        if not may_carry(node):
            return node
        return replace(node, attrs={key: rename_value(value) for key, value in node.attrs.items()})

    functions = {
        names[name]: replace(body, name=names[name], nodes=tuple(map(rename_node, body.nodes)))
        for name, body in program.functions.items()
    }
    return replace(program, nodes=tuple(map(rename_node, program.nodes)), functions=functions)
