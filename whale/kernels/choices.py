"""Decides which kernel substitutions are taken: all but those that measured slower; cuts out small programs to measure
them.

A substitution is identified by the signature of the operation that it replaces (for fused operations, of the operation
that results). The signature is equal wherever the same kernels run on tensors of the same types, so one measurement
decides for all of these. Measuring, and remembering results, is up to the caller, who tells a pass which substitutions
to leave out.

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
    """Says which substitutions a pass of this package may make: all but those that measured slower.

    Attributes:
      declined: names of the substitutions that are not made, as of ``name_substitution``.
    """

    declined: frozenset[str] = frozenset()

    def takes(self, kind: str, program: Program, node: Node) -> bool:
        """Returns True if a pass shall make the substitution, which is given by the arguments of
        ``name_substitution``.
        """
        return not self.declined or name_substitution(kind, program, node) not in self.declined


ALL = Choices()
Change = Callable[[Program, Choices], Program]


def name_substitution(kind: str, program: Program, node: Node) -> str:
    """Returns the name under which the measured time of a substitution is stored: its kind, and the signature (op,
    attributes, operand types) of the node.

    Substitutions with equal names run the same kernels on tensors of the same types, so one measurement is valid for
    all of them.

    Args:
      kind: kind of substitution, a value of the key `kernels`.
      node: the operation that is replaced; for fused operations, the one that results.
    """
    return f"{kind} {signature(program, node)}"


class Substitution(NamedTuple):
    """Represents a substitution that can be measured.

    Attributes:
      name: as of ``name_substitution``.
      before: a program of the replaced nodes alone.
      after: the same program after the substitution.
    """

    name: str
    before: Program
    after: Program


def cut_out(program: Program, names: Collection[str]) -> Program | None:
    """Returns a program of the nodes ``names`` alone, to be timed; None if it could not run alone.

    Tensors that the nodes read from other nodes become arguments. Constants stay constants and variables variables,
    since kernels may depend on either.
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
    """Lists the substitutions of a pass that replaces operations one by one, each as a program that can be measured.

    Args:
      kind: as of ``name_substitution``.
      ops: types of the operations that the pass replaces; neighbours that it changes as well are measured with them.
      change: the pass, as a function from a graph and ``Choices`` to the changed graph.
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
    """Lists the substitutions of a pass that fuses operations, each as a program that can be measured.

    Args:
      kind: as of ``name_substitution``.
      fused: the fused operations, each with the names of the nodes that it replaces.
      change: the pass, as a function from a graph and ``Choices`` to the changed graph.
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
