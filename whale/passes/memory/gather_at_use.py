"""Gathers split weights separately for each use (ZeRO-3): every use gets its own copy, which is freed after it.

A program reads a weight once and uses the value twice or more: in the forward product, and in the backward one.
Gathered once, it would stay in memory from the beginning of a step to its end. Here every use has a copy, and so its
own all-gather, except where the shards suffice. An all-gather waits for the product before the last one, or all weights
would be gathered when the step begins. The order is that of the program, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from whale.ir.marks import Marks
from whale.ir.program import Node, Program, Ref, remove_unread
from whale.ir.values import DType, Func
from whale.passes.analysis.scopes import PASSED_ON
from whale.passes.analysis.state import is_model
from whale.passes.memory.zero import find_gathered_type


@dataclass(frozen=True)
class _Use:
    """A reader of a variable's value, and the nodes that pass the value on to it, in order."""

    read: Node
    chain: tuple[Node, ...]
    reader: Node
    operand: int


def gather_at_use(program: Program, min_bytes: int, ahead: int) -> Program:
    """Gives each use of a variable's value in ``program`` a copy of it.

    Args:
      min_bytes: smaller variables stay whole and keep one value.
      ahead: how many weights may be gathered while another is used.
    """
    position = {node.name: i for i, node in enumerate(program.nodes)}
    kept = {c for n in program.nodes for c in n.controls} | {*program.effects, *(r.node for r in program.outputs)}
    reads = [node for node in program.nodes if node.op == "ReadVariableOp" and node.inputs]
    large = [node for node in reads if find_gathered_type(program, node.inputs[0], min_bytes) is not None]
    uses = [use for node in large for use in _uses(program, node, (), kept) if not _is_of_parts(program, use.reader)]
    if not uses:
        return program
    uses.sort(key=lambda use: (position[use.reader.name], use.operand))
    operands: dict[tuple[str, int], Ref] = {}
    before: dict[str, list[Node]] = {}
    paced: list[str] = []
    for number, use in enumerate(uses):
        controls: tuple[str, ...] = ()
        if is_model(program, use.reader):
            waits_for = paced[-ahead - 1] if len(paced) > ahead else use.reader.name
            controls = (waits_for,) if waits_for != use.reader.name else ()
            paced += [use.reader.name] if paced[-1:] != [use.reader.name] else []
        *made, last = _copies(use, number, controls)
        before.setdefault(use.reader.name, []).extend([*made, last])
        operands[use.reader.name, use.operand] = Ref(last.name)
    nodes: list[Node] = []
    for node in program.nodes:
        nodes += before.get(node.name, [])
        inputs = tuple(operands.get((node.name, i), ref) for i, ref in enumerate(node.inputs))
        nodes.append(node if inputs == node.inputs else replace(node, inputs=inputs))
    return remove_unread(program.replace_nodes(tuple(nodes)), {n.name for use in uses for n in use.chain})


def _is_of_parts(program: Program, reader: Node) -> bool:
    """Tells whether shards suffice for ``reader``: only a scalar computed from them reaches products or lookups.

    Examples are the norm of a weight in a loss, and its gradient.
    """
    waiting, seen = [reader], {reader.name}
    while waiting:
        node = waiting.pop()
        if is_model(program, node) or any(isinstance(v, Func) for v in node.attrs.values()):
            return False
        for ref in node.list_refs():
            if program.find_type(ref).shape == ():
                continue
            for other, _ in program.consumers.get(ref, ()):
                if other.name not in seen:
                    seen.add(other.name)
                    waiting.append(other)
    return True


def _uses(program: Program, read: Node, chain: tuple[Node, ...], kept: Collection[str]) -> Iterator[_Use]:
    """Yields the readers of the value, through nodes that only pass it on; nodes in ``kept`` are readers themselves."""
    value = Ref((chain or (read,))[-1].name)
    for reader, operand in program.consumers.get(value, ()):
        passes_on = reader.op in PASSED_ON and operand == 0 and not reader.controls and reader.name not in kept
        if passes_on and program.consumers.get(Ref(reader.name)):
            yield from _uses(program, read, (*chain, reader), kept)
        else:
            yield _Use(read, chain, reader, operand)


def _copies(use: _Use, number: int, controls: tuple[str, ...]) -> Iterator[Node]:
    """Yields the nodes that copy the value for one use, with marks before, at and behind the point where it is
    gathered.
    """
    scope = use.reader.scope
    value = Ref(use.read.name)
    for place, node in enumerate((None, *use.chain)):
        if node is not None:
            copy = replace(node, name=f"{node.name}/whale_use_{number}", inputs=(value, *node.inputs[1:]), scope=scope)
            yield copy
            value = Ref(copy.name)
        (kind,) = (node or use.read).outputs
        name = f"{use.read.name}/whale_use_{number}" + (f"_{place}" if place else "")
        attrs, waits = {"T": DType(kind.dtype)}, controls if not place else ()
        yield Node(name, "Identity", (value,), waits, attrs, (kind,), scope, marks=Marks(gathered_at_use=True))
        value = Ref(name)
