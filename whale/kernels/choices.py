"""Says which substitutions of kernels are not taken since they measured slower, and cuts out those to be measured.

A substitution is known by what it replaces: the signature of the operation (for fused ones, of the operation that is
made), which is equal wherever the same kernels run on tensors of the same types. What was measured, and where, is the
caller's; a pass is told which substitutions to leave out.

Decision: 0176.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cost_model.graph.signature import signature
from whale.ir.program import Node, Program, Ref
from whale.ir.values import UNMOVABLE, DType


@dataclass(frozen=True, slots=True)
class Choices:
    """Holds the substitutions that are not taken.

    Attributes:
      declined: their names (``name_substitution``).
    """

    declined: frozenset[str] = frozenset()

    def takes(self, kind: str, program: Program, node: Node) -> bool:
        """Tells whether a substitution is taken (see ``name_substitution``)."""
        return not self.declined or name_substitution(kind, program, node) not in self.declined


ALL = Choices()
Change = Callable[[Program, Choices], Program]


def name_substitution(kind: str, program: Program, node: Node) -> str:
    """Returns the name of a substitution: equal for those that gain or lose the same.

    Args:
      kind: of the key `kernels`.
      node: what is replaced; of fused operations, what they become.
    """
    return f"{kind} {signature(program, node)}"


class Substitution(NamedTuple):
    """A substitution that can be measured: its name, and the programs of its nodes alone, before and after."""

    name: str
    before: Program
    after: Program


def cut_out(program: Program, names: Collection[str]) -> Program | None:
    """Returns the program of some nodes alone, whose arguments are what they read; None: it cannot be run alone.

    Constants stay constants and variables variables, since kernels may depend on either.
    """
    nodes: dict[str, Node] = {}
    inputs: list[str] = []
    passed: dict[Ref, Ref] = {}
    variables = []
    for node in program.nodes:
        if node.name not in names:
            continue
        operands = []
        for ref in node.inputs:
            if ref.node in names:
                operands.append(ref)
                continue
            made, t = program.by_name[ref.node], program.find_type(ref)
            variable = program.variable_of.get(ref.node)
            if made.op == "Const" or variable is not None:
                if ref.node not in nodes:
                    nodes[ref.node] = Node(made.name, made.op, (), (), made.attrs, made.outputs, "", made.stateful)
                    variables += [variable] if variable is not None else []
                operands.append(ref)
                continue
            if t.dtype in UNMOVABLE or t.dtype in ("string", "resource") or not t.is_static:
                return None
            if ref not in passed:
                argument = f"argument_{len(passed)}"
                nodes[argument] = Node(argument, "Placeholder", attrs={"dtype": DType(t.dtype)}, outputs=(t,))
                inputs.append(argument)
                passed[ref] = Ref(argument)
            operands.append(passed[ref])
        controls = tuple(c for c in node.controls if c in names)
        nodes[node.name] = Node(
            node.name, node.op, tuple(operands), controls, node.attrs, node.outputs, "", node.stateful
        )
    kept = {ref.node for ref in program.outputs}
    outputs = [
        ref
        for node in program.nodes
        if node.name in names
        for ref in node.list_refs()
        if ref.node in kept or any(reader.name not in names for reader, _ in program.consumers.get(ref, ()))
    ]
    effects = tuple(name for name in nodes if name in names and not nodes[name].outputs)
    return Program("part", tuple(nodes.values()), tuple(inputs), tuple(variables), tuple(outputs), effects)


def list_changed(kind: str, ops: Collection[str], program: Program, change: Change) -> Iterator[Substitution]:
    """Lists the substitutions of a pass that replaces operations one by one.

    Args:
      ops: the types of the operations that it replaces; what else it changes belongs to one of them.
      change: the pass, of one graph.
    """
    made = change(program, ALL)
    changed = {n.name for n in program.nodes if _differs(n, made.by_name.get(n.name))}
    for node in program.nodes:
        if node.name not in changed or node.op not in ops:
            continue
        beside = {ref.node for ref in node.inputs}
        beside.update(reader.name for ref in node.list_refs() for reader, _ in program.consumers.get(ref, ()))
        others = {name for name in beside & changed if program.by_name[name].op not in ops}
        yield from _measurable(name_substitution(kind, program, node), cut_out(program, {node.name, *others}), change)


def list_fused(
    kind: str, program: Program, fused: Collection[tuple[Node, Collection[str]]], change: Change
) -> Iterator[Substitution]:
    """Lists the substitutions of a pass that fuses operations.

    Args:
      fused: what it makes, each with the names of the nodes that it replaces.
    """
    for node, names in fused:
        yield from _measurable(name_substitution(kind, program, node), cut_out(program, set(names)), change)


def _measurable(name: str, before: Program | None, change: Change) -> Iterator[Substitution]:
    if before is None or any(not t.is_static for n in before.nodes for t in n.outputs if t.dtype != "resource"):
        return
    after = change(before, ALL)
    if after.nodes != before.nodes:
        yield Substitution(name, before, after)


def _differs(node: Node, made: Node | None) -> bool:
    return made is None or made.op != node.op or made.attrs != node.attrs
