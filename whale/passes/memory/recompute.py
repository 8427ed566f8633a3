"""Recomputes activations for the backward pass (``memory.recompute``), instead of keeping them in memory until then.

Follows Chen et al., "Training deep nets with sublinear memory cost", 2016. Some tensors of the forward pass, the
checkpoints, are kept; they cut the forward pass into segments. When the backward pass reads a tensor of a segment, it
reads it from a copy of the segment's nodes, computed from the checkpoints. The copies wait, by control edges, for the
gradient that arrives at the segment's end; otherwise TensorFlow would compute them at once. Not copied, so that their
results are kept: nodes after the last checkpoint, whose results are read soon; nodes with side effects; random ops;
loops and branches.

Marks may also say what is recomputed (``wh.recompute``); then everything else is a checkpoint.

A copy is placed in the program before the first node that reads it, and waits only for nodes before that place, so that
no cycle can arise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from whale.errors import PlanError
from whale.ir.ops import RANDOM, VIEWS
from whale.ir.program import (
    COMPILED,
    Node,
    Program,
    Ref,
    iterate_function_refs,
    sort_nodes,
)
from whale.ir.values import UNMOVABLE
from whale.passes.analysis.stages import stage_of

_MOST_SEGMENTS = 64  # the largest number of segments that ``auto`` tries


def recompute(program: Program, kind: str) -> Program:
    """Adds copies of forward nodes for the backward nodes of ``program`` to read, so that activations need not be kept.

    Args:
      kind: how the checkpoints (tensors that are kept) are chosen. ``marked``: the user has marked them, or has marked
        what is recomputed instead. ``auto``: by bytes. ``stage``: tensors that one pipeline stage sends to another.

    Raises:
      PlanError: with gradients in the program, no tensor is marked, or there are marks of both kinds, or there are no
        stages.
    """
    forward = _Forward(program)
    if not forward.backward or any(n.marks.recomputed for n in program.nodes):
        return program  # no gradients, or done before
    ways = {"marked": forward.number_marked, "auto": forward.choose, "stage": forward.number_sent}
    numbers = ways[kind]()
    if kind == "stage" and not numbers:
        raise PlanError(
            "the model has no pipeline stages whose activations could be recomputed",
            op=program.name,
            given='memory.recompute="stage"',
            expected="two stages or more, one of which sends a tensor to another",
            action='build the parts of the model under wh.stage(), or set memory.recompute="auto"',
        )
    if kind == "marked" and not numbers:
        raise PlanError(
            "no activation is marked to be kept or to be recomputed",
            op=program.name,
            given='memory.recompute="marked"',
            expected="marked tensors of the forward pass",
            action="mark tensors to keep with wh.checkpoint(tensor) or "
            'tf.compat.v1.add_to_collection("checkpoints", tensor), or layers to recompute with wh.recompute(), '
            'or set memory.recompute="auto"',
        )
    return _Copies(forward, numbers).run() if numbers else program


class _Forward:
    """Describes the forward pass of a program: which nodes belong to it, and which of them may be computed twice."""

    def __init__(self, program: Program):
        self.program = program
        self.position = {n.name: i for i, n in enumerate(program.nodes)}
        self.backward: set[str] = set()
        self.fixed: set[str] = set()  # nodes that depend on variables and constants only
        for node in program.nodes:
            # An empty list does not count: the gradient of a loop creates lists for the forward pass to fill.
            reads = [r.node for r in node.inputs if program.by_name[r.node].op != "EmptyTensorList"]
            if node.marks.backward or not self.backward.isdisjoint(reads):
                self.backward.add(node.name)
            elif node.name in program.variable_of or node.op == "ReadVariableOp":
                self.fixed.add(node.name)
            elif not node.stateful and node.op != "Placeholder" and self.fixed.issuperset(reads):
                self.fixed.add(node.name)
        self.drawn = self._find_drawn()
        self.twice = {n.name for n in program.nodes if self._may_run_twice(n)}

    def _find_drawn(self) -> set[str]:
        """Returns the names of nodes computed from random numbers only, such as dropout masks."""
        found: set[str] = set()
        for node in self.program.nodes:
            made = node.op in RANDOM or (bool(node.inputs) and not node.stateful)
            if (
                made
                and node.name not in self.fixed
                and all(r.node in self.fixed or r.node in found for r in node.inputs)
            ):
                found.add(node.name)
        return found

    def _may_run_twice(self, node: Node) -> bool:
        if node.name in self.backward or node.name in self.fixed or node.name in self.drawn:
            return False
        if not node.inputs or node.stateful:
            return False
        if node.op in RANDOM or node.attrs.get(COMPILED) or any(True for _ in iterate_function_refs(node)):
            return False
        types = [*node.outputs, *map(self.program.find_type, node.inputs)]
        return not any(t.dtype in UNMOVABLE for t in types)

    def number_marked(self) -> dict[str, int]:
        """Maps the user's checkpoints to numbers in program order; nodes that a checkpoint is only a reshape of get its
        number.

        If the user marked what is recomputed instead, all other nodes are checkpoints.

        Raises:
          PlanError: the user marked both tensors to keep and tensors to recompute.
        """
        again = {name for name in self.twice if self.program.by_name[name].marks.compute_again}
        found: dict[str, int] = {}
        names = [n.name for n in self.program.nodes if n.marks.checkpoint and n.name not in self.backward]
        if again and names:
            raise PlanError(
                "activations are marked both to be kept and to be recomputed",
                op=names[0],
                given="wh.checkpoint and wh.recompute in one step",
                expected="only one of the two in a step",
                action="remove wh.checkpoint or wh.recompute",
            )
        if again:
            return self._around(again)
        for number, name in enumerate(names):
            while name not in found:
                found[name] = number
                node = self.program.by_name[name]
                if node.op not in VIEWS or node.inputs[0].node in self.fixed:
                    break
                name = node.inputs[0].node
        return found

    def _around(self, again: set[str]) -> dict[str, int]:
        """Numbers the nodes that are kept when the user marked what is recomputed: maps each to the number of
        recomputed segments on the longest path to it.

        Kept nodes with equal numbers are checkpoints between the same two segments.

        Args:
          again: names of the recomputed nodes.
        """
        found: dict[str, int] = {}
        level: dict[str, int] = {}
        behind: set[str] = set()  # kept nodes that read recomputed results
        for node in self.program.nodes:
            name = node.name
            if name in self.backward or name in self.fixed:
                continue
            reads = [r.node for r in node.inputs if r.node in level]
            if name not in again:
                behind |= {name} if not again.isdisjoint(reads) else set()
                level[name] = max((level[r] + (r in again or r in behind) for r in reads), default=0)
                found[name] = level[name]
            else:
                level[name] = max((level[r] + (r in behind) for r in reads), default=0)
        return found

    def number_sent(self) -> dict[str, int]:
        """Chooses the tensors that a stage sends to another one as checkpoints. Maps each of their nodes to the number
        of its stage, in program order.
        """
        found: dict[str, int] = {}
        numbers: dict[str, int] = {}
        for node in self.program.nodes:
            stage = stage_of(node.scope)
            if not stage or node.name in self.backward or node.name in self.fixed:
                continue
            readers = (reader for ref in node.list_refs() for reader, _ in self.program.consumers.get(ref, ()))
            if any(r.name not in self.backward and stage_of(r.scope) not in ("", stage) for r in readers):
                found[node.name] = numbers.setdefault(stage, len(numbers))
        return found

    def choose(self) -> dict[str, int]:
        """Chooses checkpoints so that peak memory is least: all tensors that are alive at some points of the forward
        pass. Maps each to the number of its point.
        """
        nodes = [n for n in self.program.nodes if n.name not in self.backward and n.name not in self.fixed]
        place = {n.name: i for i, n in enumerate(nodes)}
        last = list(range(len(nodes)))  # where a node is read last in the forward pass
        held = [0] * len(nodes)  # bytes that the backward pass reads of it
        for node in nodes:
            for ref in node.inputs:
                if ref.node in place:
                    last[place[ref.node]] = max(last[place[ref.node]], place[node.name])
        for i, node in enumerate(nodes):
            for ref in node.list_refs() if node.name in self.twice else ():
                if any(reader.name in self.backward for reader, _ in self.program.consumers.get(ref, ())):
                    held[i] += self._bytes(ref)
        alive = [0] * len(nodes)
        for i, node in enumerate(nodes):
            if node.name in self.twice:
                total = sum(map(self._bytes, node.list_refs()))
                for j in range(i, last[i]):
                    alive[j] += total
        best, least = list[int](), sum(held)
        for count in range(2, _MOST_SEGMENTS + 1):
            cuts = _cuts(held, alive, sum(held) / count)
            most = _peak_held(held, alive, cuts)
            if most < least:
                best, least = cuts, most
        found: dict[str, int] = {}
        for number, cut in enumerate(best):
            for i in range(cut + 1):
                if last[i] > cut and nodes[i].name in self.twice:
                    found.setdefault(nodes[i].name, number)
        return found

    def _bytes(self, ref: Ref) -> int:
        t = self.program.find_type(ref)
        return t.bytes if t.is_static else 0


def _cuts(held: list[int], alive: list[int], wanted: float) -> list[int]:
    """Cuts the forward pass into segments of about ``wanted`` bytes; returns the positions where segments end, chosen
    where few bytes are alive.

    Args:
      held: for each position of the forward pass, bytes of its node's results that the backward pass reads.
      alive: for each position, bytes of the tensors that later nodes read.
      wanted: bytes that the backward pass reads of one segment.
    """
    found: list[int] = []
    total, best = 0, -1
    i = 0
    while i < len(held):
        total += held[i]
        if total >= wanted / 2 and (best < 0 or alive[i] < alive[best]) and alive[i]:
            best = i
        if total >= 1.5 * wanted and best >= 0:
            found.append(best)
            i, total, best = best, 0, -1
        i += 1
    return found


def _peak_held(held: list[int], alive: list[int], cuts: list[int]) -> int:
    """Returns the peak bytes during the backward pass: the checkpoints so far and one recomputed segment.

    Args:
      held, alive: as of ``_cuts``.
      cuts: positions where segments end, as returned by ``_cuts``.
    """
    most = checkpoints = start = 0
    for cut in (*cuts, len(held) - 1):
        most = max(most, checkpoints + sum(held[start : cut + 1]))
        checkpoints, start = checkpoints + alive[cut], cut + 1
    return most


@dataclass
class _Segment:
    """Represents a segment that is recomputed.

    Attributes:
      nodes: its nodes in program order.
      first_reader: position in the program of the first backward node that reads it.
      waits_for: names of the gradients that the copies wait for.
    """

    nodes: list[Node]
    first_reader: int
    waits_for: tuple[str, ...]


class _Copies:
    """Builds the program with the copies of recomputed nodes.

    Args:
      numbers: the checkpoints with their numbers.
    """

    def __init__(self, forward: _Forward, numbers: Mapping[str, int]):
        self.forward, self.program, self.numbers = forward, forward.program, numbers
        self.segment = self._segments()
        self.depth = self._depths()

    def run(self) -> Program:
        wanted: dict[int, set[str]] = {}
        for node in self.program.nodes:
            if node.name in self.forward.backward:
                for ref in node.inputs:
                    if self._is_copied(ref.node):
                        self._want(ref.node, wanted.setdefault(self.segment[ref.node], set()))
        segments = [s for number, names in wanted.items() if (s := self._segment(number, names)) is not None]
        copied = {n.name for s in segments for n in s.nodes}

        def rewrite_ref(ref: Ref) -> Ref:
            return Ref(_copy(ref.node), ref.index) if ref.node in copied else ref

        before: dict[int, list[Node]] = {}
        for s in segments:
            for node in s.nodes:
                inputs = tuple(map(rewrite_ref, node.inputs))
                # Copies that read other copies wait for these already.
                controls = node.controls if inputs != node.inputs else (*node.controls, *s.waits_for)
                copy = replace(
                    node,
                    name=_copy(node.name),
                    inputs=inputs,
                    controls=controls,
                    marks=node.marks.replace_marks(recomputed=True),
                )
                before.setdefault(s.first_reader, []).append(copy)
        nodes: dict[str, Node] = {}
        for i, node in enumerate(self.program.nodes):
            nodes.update((copy.name, copy) for copy in before.get(i, ()))
            if node.name in self.forward.backward:
                node = replace(node, inputs=tuple(map(rewrite_ref, node.inputs)))
            nodes[node.name] = node
        return self.program.replace_nodes(sort_nodes(nodes))

    def _segments(self) -> dict[str, int]:
        """Maps each forward node to its segment: the number of the first checkpoint that depends on it. Nodes after the
        last checkpoint are left out.
        """
        found: dict[str, int] = {}
        for node in reversed(self.program.nodes):
            if node.name in self.forward.backward:
                continue
            number = self.numbers.get(node.name, found.get(node.name))
            for ref in node.inputs if number is not None else ():
                assert number is not None
                found[ref.node] = min(number, found.get(ref.node, number))
        return found

    def _depths(self) -> dict[str, int]:
        """Maps each node, forward or backward, to the number of the last segment that it depends on; to -1 if it
        depends on variables and constants only.

        A gradient with a number above that of a segment comes from after the segment, which the segment's copies can
        wait for.
        """
        end = max(self.numbers.values()) + 1
        found: dict[str, int] = {}
        for node in self.program.nodes:
            own = -1
            if node.name not in self.forward.backward and node.name not in self.forward.fixed:
                own = self.numbers.get(node.name, self.segment.get(node.name, end))
            found[node.name] = max([own, *(found[r.node] for r in node.inputs)])
        return found

    def _is_copied(self, name: str) -> bool:
        """Returns True if a forward node is recomputed for the backward pass; a tensor that recomputed nodes of another
        segment read is kept.
        """
        if name not in self.segment or name in self.numbers or name not in self.forward.twice:
            return False
        for ref in self.program.by_name[name].list_refs():
            for reader, _ in self.program.consumers.get(ref, ()):
                again = reader.name in self.forward.twice and reader.name not in self.numbers
                if again and self.segment.get(reader.name, self.segment[name]) != self.segment[name]:
                    return False
        return True

    def _want(self, name: str, found: set[str]) -> None:
        stack = [name]
        while stack:
            name = stack.pop()
            if name not in found:
                found.add(name)
                stack += [r.node for r in self.program.by_name[name].inputs if self._is_copied(r.node)]

    def _segment(self, number: int, names: set[str]) -> _Segment | None:
        """Returns a segment's nodes to copy and the gradients that the copies wait for; None if no gradient arrives
        before they are read.

        Args:
          number: number of the segment.
          names: names of the nodes to copy.
        """
        reached, first = set(names), -1
        for i, node in enumerate(self.program.nodes):
            if node.name not in self.forward.backward or reached.isdisjoint(r.node for r in node.inputs):
                continue
            first = i if first < 0 else first
            gradients = [r.node for r in node.inputs if self._arrives(r.node, number, reached, first)]
            if gradients:
                order = self.forward.position
                nodes = [self.program.by_name[name] for name in sorted(names, key=order.__getitem__)]
                return _Segment(nodes, first, tuple(dict.fromkeys(gradients)))
            reached.add(node.name)
        return None

    def _arrives(self, name: str, number: int, reached: set[str], first: int) -> bool:
        """Returns True if the copies of segment ``number`` can wait for the node ``name``: it is a backward node that
        yields a gradient from after the segment, before the copies are read and without depending on them.

        Args:
          reached: names of backward nodes, and copied nodes, that depend on the copies.
          first: position in the program of the first node that reads a copy.
        """
        return (
            name in self.forward.backward
            and name not in reached
            and self.depth[name] > number
            and self.forward.position[name] < first
        )


def _copy(name: str) -> str:
    return f"{name}/whale_again"
