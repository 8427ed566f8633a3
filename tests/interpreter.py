"""Runs programs in NumPy: the global one, or the programs of all ranks side by side with whale's ops between them.

Nodes run in a random order that operands and control edges allow, so an order that lowering forgot to keep shows up as
a wrong value; a collective that some rank never reaches, or reaches with other attributes, is an error.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.numpy_kernels import run_kernel
from whale.ir.ops import HOROVOD_ALL_REDUCE
from whale.ir.program import Node, Program, Ref, prune
from whale.ir.values import Func, TensorType

LOOPS = ("While", "StatelessWhile")
BRANCHES = ("If", "StatelessIf")
_REDUCE = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


# A node at work: yields whether it moved, returns its outputs.
Running = Generator[bool, None, tuple[Any, ...]]


class InterpreterError(AssertionError):
    """The programs cannot be run as they stand."""


@dataclass
class Rank:
    """What one rank owns: its variables, what it printed, and how often each of its random ops ran."""

    number: int
    variables: dict[str, np.ndarray]
    printed: list[bytes] = field(default_factory=list)
    draws: Counter[str] = field(default_factory=Counter)

    def draw(self, node: Node, shape: tuple[int, ...]) -> np.ndarray:
        """Random numbers that differ between ranks, nodes and calls."""
        self.draws[node.name] += 1
        seed = zlib.crc32(f"{self.number} {node.name} {self.draws[node.name]}".encode())
        return np.random.default_rng(seed).uniform(size=shape)


@dataclass
class Call:
    """One collective as it took place: its key, op, attributes, and the logical bytes that whale_ops would count."""

    key: str
    op: str
    attrs: Mapping[str, Any]
    bytes: int


@dataclass
class Outcome:
    """Fetched values and variables of each rank, the collectives in order of completion, the largest magnitude seen."""

    outputs: list[list[np.ndarray]]
    ranks: list[Rank]
    calls: list[Call]
    largest: float


class _Exchange:
    """Where ranks meet: a collective completes when every rank has posted its key."""

    def __init__(self, size: int):
        self.size = size
        self.posted: dict[tuple[str, int], dict[int, tuple[Node, list[np.ndarray]]]] = {}
        self.results: dict[tuple[str, int], dict[int, tuple[np.ndarray, ...]]] = {}
        self.count: Counter[tuple[int, str]] = Counter()
        self.mail: dict[tuple[str, int, int], np.ndarray] = {}
        self.calls: list[Call] = []
        self.largest = 0.0

    def see(self, value: Any) -> None:
        """Notes the magnitude of a value; rounding errors are relative to the largest."""
        if isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.size:
            finite = np.abs(value[np.isfinite(value)])
            self.largest = max(self.largest, float(finite.max())) if finite.size else self.largest

    def send(self, rank: int, node: Node, x: np.ndarray) -> None:
        peer = node.attrs["peer"]
        if (node.attrs["key"], rank, peer) in self.mail:
            raise InterpreterError(f"rank {rank} sends {node.attrs['key']} twice before it is received")
        self.mail[node.attrs["key"], rank, peer] = x
        self.calls.append(Call(node.attrs["key"], node.op, node.attrs, x.nbytes))

    def post(self, rank: int, node: Node, operands: list[np.ndarray]) -> tuple[str, int]:
        key = node.attrs["key"]
        ticket = (key, self.count[rank, key])
        self.count[rank, key] += 1
        members = self.posted.setdefault(ticket, {})
        members[rank] = (node, operands)
        group = node.attrs.get("ranks") or tuple(range(self.size))
        if rank not in group:
            raise InterpreterError(f"rank {rank} takes part in {key} of ranks {group}")
        if len(members) == len(group):
            self._complete(ticket, group, members)
        return ticket

    def _complete(
        self, ticket: tuple[str, int], group: Sequence[int], posted: Mapping[int, tuple[Node, list[np.ndarray]]]
    ) -> None:
        members = [posted[r] for r in group]
        first = members[0][0]
        for node, _ in members[1:]:
            if (node.op, node.attrs) != (first.op, first.attrs):
                raise InterpreterError(
                    f"collective {ticket[0]} differs: {first.op} {first.attrs}, {node.op} {node.attrs}"
                )
        operands = [xs for _, xs in members]
        results, moved = _COLLECTIVES[first.op](first.attrs, operands, len(group))
        self.results[ticket] = dict(zip(group, results))
        self.calls.append(Call(ticket[0], first.op, first.attrs, moved))


def _reduced(attrs: Mapping[str, Any], xs: Sequence[np.ndarray]) -> np.ndarray:
    if len({(x.shape, x.dtype) for x in xs}) != 1:
        raise InterpreterError(f"{attrs['key']}: reduces tensors of unlike types: {[(x.shape, x.dtype) for x in xs]}")
    result = xs[0]
    for x in xs[1:]:
        result = np.asarray(_REDUCE[attrs["reduction"]](result, x))
    return result


def _cuts(sizes: Sequence[int]) -> list[int]:
    return list(np.cumsum(sizes))[:-1]


def _expect(attrs: Mapping[str, Any], x: np.ndarray, axis: int, size: int) -> None:
    if x.shape[axis] != size:
        raise InterpreterError(f"{attrs['key']}: shape {x.shape}, dimension {axis} should be {size}")


def _all_reduce(attrs, operands, size):
    results = tuple(_reduced(attrs, [xs[i] for xs in operands]) for i in range(attrs["N"]))
    return [results] * size, 2 * (size - 1) * sum(x.nbytes for x in results)


def _all_gather(attrs, operands, size):
    for xs, n in zip(operands, attrs["sizes"]):
        for x in xs:
            _expect(attrs, x, attrs["axis"], n)
    whole = tuple(np.concatenate(parts, axis=attrs["axis"]) for parts in zip(*operands))
    return [whole] * size, (size - 1) * sum(x.nbytes for x in whole)


def _reduce_scatter(attrs, operands, size):
    whole = _reduced(attrs, [xs[0] for xs in operands])
    _expect(attrs, whole, attrs["axis"], sum(attrs["sizes"]))
    return [(x,) for x in np.split(whole, _cuts(attrs["sizes"]), attrs["axis"])], (size - 1) * whole.nbytes


def _all_to_all(attrs, operands, size):
    axis, other = attrs["split_axis"], attrs["concat_axis"]
    if axis == other:
        raise InterpreterError(f"{attrs['key']}: splits and concatenates dimension {axis}")
    for (x,), n in zip(operands, attrs["concat_sizes"]):
        _expect(attrs, x, other, n)
        _expect(attrs, x, axis, sum(attrs["split_sizes"]))
    pieces = [np.split(xs[0], _cuts(attrs["split_sizes"]), axis) for xs in operands]
    moved = sum(p.nbytes for r, row in enumerate(pieces) for to, p in enumerate(row) if to != r)
    return [(np.concatenate([row[r] for row in pieces], axis=other),) for r in range(size)], moved


def _broadcast(attrs, operands, size):
    root = operands[attrs["root"]]
    return [tuple(root)] * size, (size - 1) * sum(x.nbytes for x in root)


def _check(attrs, operands, size):
    return [()] * size, 0


def _met_under_its_name(node: Node) -> Node:
    """Horovod's all-reduce as Whale's: ranks meet under the node's name, and nothing scales the sum."""
    if [node.attrs[a] for a in ("reduce_op", "prescale_factor", "postscale_factor")] != [1, 1.0, 1.0]:
        raise InterpreterError(f"{node.name}: not a plain sum: {node.attrs}")
    attrs = {"key": node.name, "reduction": "sum", "N": node.attrs["num_tensors"]}
    return replace(node, op="WhaleAllReduce", attrs=attrs)


_COLLECTIVES: dict[str, Any] = {
    "WhaleAllReduce": _all_reduce, "WhaleAllGather": _all_gather, "WhaleReduceScatter": _reduce_scatter,
    "WhaleAllToAll": _all_to_all, "WhaleBroadcast": _broadcast, "WhaleCheck": _check,
}  # fmt: skip


class _Run:
    """One graph on one rank, run as far as it can be each time it is asked."""

    def __init__(
        self, root: Program, program: Program, rank: Rank, exchange: _Exchange, args: Sequence[Any], seed: random.Random
    ):
        self.root, self.program, self.rank, self.exchange, self.seed = root, program, rank, exchange, seed
        self.values: dict[Ref, Any] = {}
        self.waiting: dict[str, Running] = {}
        self.left = {n.name: n for n in prune(program).nodes}  # TensorFlow does not run what nobody needs
        waits_for = {name: {r.node for r in n.inputs}.union(n.controls) for name, n in self.left.items()}
        self.missing = {name: len(before) for name, before in waits_for.items()}  # how many have not run
        self.readers: dict[str, list[str]] = {name: [] for name in self.left}
        for name, before in waits_for.items():
            for one in before:
                self.readers[one].append(name)
        self.ready = [name for name, count in self.missing.items() if not count]
        self.arguments = dict(zip(program.inputs, args))
        for name in program.inputs:
            if name not in self.left:
                raise InterpreterError(f"{program.name}: input {name} has no node")

    def advance(self) -> bool:
        """Runs what can be run; False when nothing could."""
        moved = False
        while self.ready:
            at = self.seed.randrange(len(self.ready))
            self.ready[at], self.ready[-1] = self.ready[-1], self.ready[at]
            node = self.left.pop(self.ready.pop())
            operands = [self.values[r] for r in node.inputs]
            self.waiting[node.name] = self._start(node, operands)
            self._try(node.name)
            moved = True
        for name in list(self.waiting):
            moved |= self._try(name)
        return moved

    def _try(self, name: str) -> bool:
        """One step of a node that runs; its generator yields whether it moved, and returns its outputs."""
        try:
            return bool(next(self.waiting[name]))
        except StopIteration as stop:
            del self.waiting[name]
            self._finish(self.program.by_name[name], stop.value)
            return True

    def _finish(self, node: Node, outputs: tuple[Any, ...]) -> None:
        if len(outputs) != len(node.outputs):
            raise InterpreterError(f"{node.name} ({node.op}) gave {len(outputs)} outputs, declares {len(node.outputs)}")
        for ref, value, t in zip(node.list_refs(), outputs, node.outputs):
            _check_type(node, value, t)
            self.exchange.see(value)
            self.values[ref] = value
        for name in self.readers[node.name]:
            self.missing[name] -= 1
            if not self.missing[name]:
                self.ready.append(name)

    @property
    def finished(self) -> bool:
        return not self.left and not self.waiting

    def stuck(self) -> str:
        left, waiting = list(self.left)[:5], list(self.waiting)[:5]
        return f"rank {self.rank.number}, {self.program.name}: left {left}, waiting {waiting}"

    # -- one node

    def _start(self, node: Node, operands: list[Any]) -> Running:
        if node.op == HOROVOD_ALL_REDUCE:
            node, operands = _met_under_its_name(node), [None, *operands]
        if node.op in _COLLECTIVES:
            ticket = self.exchange.post(self.rank.number, node, operands[1:])
            while ticket not in self.exchange.results:
                yield False
            return self.exchange.results[ticket][self.rank.number]
        if node.op == "WhaleSend":
            self.exchange.send(self.rank.number, node, operands[1])
            return ()
        if node.op == "WhaleRecv":
            envelope = node.attrs["key"], node.attrs["peer"], self.rank.number
            while envelope not in self.exchange.mail:
                yield False
            return (self.exchange.mail.pop(envelope),)
        if node.op in LOOPS:
            return (yield from self._loop(node, operands))
        if node.op in BRANCHES:
            chosen = node.attrs["then_branch" if bool(operands[0]) else "else_branch"]
            return (yield from self._call(chosen, operands[1:]))
        return self._simple(node, operands)

    def _call(self, func: Func, args: Sequence[Any]) -> Running:
        inner = _Run(self.root, self.root.functions[func.name], self.rank, self.exchange, args, self.seed)
        while True:
            moved = inner.advance()
            if inner.finished:
                return tuple(inner.values[r] for r in inner.program.outputs)
            yield moved

    def _loop(self, node: Node, start: Sequence[Any]) -> Running:
        state = tuple(start)
        while True:
            (again,) = yield from self._call(node.attrs["cond"], state)
            if not bool(again):
                return state
            state = yield from self._call(node.attrs["body"], state)

    def _simple(self, node: Node, operands: list[Any]) -> tuple[Any, ...]:
        variables, rank = self.rank.variables, self.rank
        if node.op == "Placeholder":
            return (self.arguments[node.name],)
        if node.op == "Const":
            return (node.attrs["value"].numpy(),)
        if node.op == "VarHandleOp":
            return (node.name,)
        if node.op == "WhaleCommunicator":
            if node.attrs["rank"] != rank.number:
                raise InterpreterError(f"rank {rank.number} uses the communicator of rank {node.attrs['rank']}")
            return ("communicator",)
        if node.op == "WhaleHold":
            return (operands[0],)
        if node.op in ("NoOp", "PrintV2"):
            rank.printed += [bytes(x.item()) for x in operands]
            return ()
        if node.op == "ReadVariableOp":
            return (variables[operands[0]].copy(),)
        if node.op == "AssignVariableOp":
            variables[operands[0]] = operands[1].copy()
            return ()
        if node.op in ("AssignAddVariableOp", "AssignSubVariableOp"):
            sign = 1 if "Add" in node.op else -1
            variables[operands[0]] = variables[operands[0]] + sign * operands[1]
            return ()
        if node.op == "ResourceApplyGradientDescent":
            variables[operands[0]] = variables[operands[0]] - operands[1] * operands[2]
            return ()
        if node.op == "RandomUniform":
            return (rank.draw(node, tuple(map(int, operands[0]))),)
        if node.op == "UnruledNoise":
            return (operands[0] + rank.draw(node, operands[0].shape),)
        return run_kernel(node.op, node.attrs, operands)


def _check_type(node: Node, value: Any, t: TensorType) -> None:
    if not isinstance(value, np.ndarray):
        return  # handles
    dtype = "string" if value.dtype == object else value.dtype.name
    shape = t.shape
    fits = shape is None or (len(shape) == value.ndim and all(d is None or d == n for d, n in zip(shape, value.shape)))
    if dtype != t.dtype or not fits:
        raise InterpreterError(f"{node.name} ({node.op}) gave {dtype}{list(value.shape)}, its type says {t}")


def run(
    programs: Sequence[Program],
    feeds: Mapping[str, np.ndarray],
    variables: Mapping[str, np.ndarray] | Sequence[Mapping[str, np.ndarray]],
    seed: int = 0,
) -> Outcome:
    """Runs one program per rank, side by side; one program alone is the global run. Ranks may hold other variables.

    Raises:
      InterpreterError: a value's type is not what its node declares, a collective differs between ranks, or no rank
        can go on.
    """
    exchange = _Exchange(len(programs))
    held = [variables] * len(programs) if isinstance(variables, Mapping) else variables
    ranks = [Rank(i, {k: v.copy() for k, v in mine.items()}) for i, mine in enumerate(held)]
    runs = [
        _Run(p, p, rank, exchange, [feeds[name] for name in p.inputs], random.Random(f"{seed} {rank.number}"))
        for p, rank in zip(programs, ranks)
    ]
    while not all(r.finished for r in runs):
        moved = [r.advance() for r in runs]
        if not any(moved):
            raise InterpreterError("nothing can go on:\n" + "\n".join(r.stuck() for r in runs))
    if exchange.mail:
        raise InterpreterError(f"sent and never received: {sorted(exchange.mail)}")
    if open_posts := set(exchange.posted) - set(exchange.results):
        raise InterpreterError(f"collectives that not all ranks reached: {sorted(open_posts)}")
    return Outcome(
        [[r.values[ref] for ref in r.program.outputs] for r in runs], ranks, exchange.calls, exchange.largest
    )
