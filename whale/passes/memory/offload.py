"""Offload: variables that lie in the host's memory, while the model is computed on an accelerator.

Ren et al., "ZeRO-Offload: democratizing billion-scale model training", USENIX ATC 2021: the update is computed where
the optimizer's state lies, so that a step moves each gradient to the host and each change of a weight back, and the
state never. What moves passes through ``WhaleOffload``, which counts its bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from whale.errors import PlanError
from whale.ir.ops import HAS_BODIES
from whale.ir.program import ON_HOST, Node, Program, Ref, function_refs
from whale.ir.values import UNMOVABLE, DType
from whale.passes.facts.cost import matmul_flops
from whale.passes.memory.footprint import variable_kinds
from whale.passes.memory.zero import is_model, only_state
from whale.rules.graph import USE

COPY = "WhaleOffload"
LEVELS = {"optimizer": ("slots",), "v0": ("slots", "parameters")}  # kinds of variables that lie in the host's memory


def offloaded(program: Program, level: str) -> tuple[str, ...]:
    """Handle nodes of the variables that come to lie in the host's memory; what one op updates lies together.

    Raises:
      PlanError: a loop or a branch takes such a variable.
    """
    if not level or not any(is_model(program, node) for node in program.nodes):
        return ()  # a run that sets variables to their first values, say: it does not show which ones are state
    kinds, variables = variable_kinds(program), program.variable_of
    found = {handle for handle, kind in kinds.items() if kind in LEVELS[level] and variables[handle].type.shape}
    while True:
        more = {
            ref.node
            for node in program.nodes
            if any(ref.node in found for ref in node.inputs) and not _is_call(node)
            for ref in node.inputs
            if ref.node in variables
        }
        if more <= found:
            break
        found |= more
    for node in program.nodes:
        taken = [ref.node for ref in node.inputs if ref.node in found]
        if taken and (_is_call(node) or not all(variables[name].type.shape for name in taken)):
            raise PlanError(
                "a variable cannot lie in the host's memory",
                op=f"{node.name} ({node.op}), which uses {variables[taken[0]].name}",
                given=f'offload.level="{level}"',
                expected="reads and updates outside of loops and branches, of variables that are no scalars",
                action="update it behind the loop, or leave offload.level out",
            )
    return tuple(v.node for v in program.variables if v.node in found)


def offload(program: Program, handles: Collection[str]) -> Program:
    """``program`` (one rank's) with what is computed in the host's memory marked, and copies where tensors cross.

    Args:
      handles: of the variables that lie there.
    """
    if program.variable_of.keys().isdisjoint(handles):
        return program
    return _Crossings(program, _computed_there(program, handles)).run()


def crossing_bytes(program: Program) -> tuple[int, int]:
    """(bytes to the host, bytes from it) that a step of a rank's program copies; sizes that only it knows are 0."""
    copies = [n for n in program.nodes if n.op == COPY and n.outputs[0].is_static]
    to_host = sum(n.outputs[0].bytes for n in copies if n.attrs["to_host"])
    return to_host, sum(n.outputs[0].bytes for n in copies) - to_host


def _is_call(node: Node) -> bool:
    return node.op in HAS_BODIES or any(True for _ in function_refs(node))


def _computed_there(program: Program, handles: Collection[str]) -> set[str]:
    """Nodes that take such a variable, what is computed from state, and what for it alone and would move more."""
    there: set[str] = set()
    of_state: set[str] = set()
    state = only_state(program).intersection(handles)
    for node in program.nodes:
        taken = [r.node for r in node.inputs if r.node in program.variable_of]
        if any(h in handles for h in taken):
            there.add(node.name)
            if any(h in state for h in taken):
                of_state.add(node.name)
        elif not taken and not _is_call(node) and any(r.node in of_state for r in node.inputs):
            there.add(node.name)
            of_state.add(node.name)
        elif node.attrs.get(USE) and node.inputs[0].node in there:
            there.add(node.name)  # a weight for one of its uses: copied for each
    kept = {*program.effects, *(r.node for r in program.outputs), *program.inputs, *program.variable_of}
    while more := _cheaper_there(program, there, kept):
        there |= more
    return there


def _cheaper_there(program: Program, there: Collection[str], kept: Collection[str]) -> set[str]:
    """Nodes of which all readers are in the host's memory, and whose operands are less to move than their results."""
    crossing = {ref for node in program.nodes if node.name in there for ref in node.inputs}
    found: set[str] = set()
    for node in reversed(program.nodes):
        if node.name in there or node.name in kept or node.op == "Const" or node.stateful or not node.outputs:
            continue
        readers = [reader.name for ref in node.refs() for reader, _ in program.consumers.get(ref, ())]
        if not readers or any(name not in there and name not in found for name in readers):
            continue
        operands = [r for r in dict.fromkeys(node.inputs) if program.by_name[r.node].op != "Const"]
        types = [program.type_of(r) for r in operands]
        if _is_call(node) or not all(t.is_static for t in (*types, *node.outputs)):
            continue
        if matmul_flops(node, [program.type_of(r) for r in node.inputs]):
            continue
        more = sum(t.bytes for r, t in zip(operands, types) if r not in crossing and r.node not in there)
        if more < sum(t.bytes for t in node.outputs):
            found.add(node.name)
            crossing.update(node.inputs)
    return found


class _Crossings:
    def __init__(self, program: Program, there: Collection[str]):
        self.program, self.there = program, there
        self.nodes: list[Node] = []
        self.made: dict[tuple[Ref, bool], Ref] = {}

    def run(self) -> Program:
        for node in self.program.nodes:
            on_host = node.name in self.there
            inputs = tuple(self._operand(ref, on_host) for ref in node.inputs)
            node = replace(node, inputs=inputs) if inputs != node.inputs else node
            self.nodes.append(_on_host(node) if on_host else node)
        return self.program.with_nodes(tuple(self.nodes))

    def _operand(self, ref: Ref, on_host: bool) -> Ref:
        source = self.program.by_name[ref.node]
        if source.name in self.program.variable_of or (source.name in self.there) == on_host:
            return ref
        if source.name in self.program.inputs:
            return ref  # it is where the caller has it
        if (ref, on_host) not in self.made:
            made = self._again(source) if source.op in ("Const", "WhaleCommunicator") else self._copy(ref, on_host)
            self.nodes.append(made)
            self.made[ref, on_host] = Ref(made.name)
        return self.made[ref, on_host]

    def _again(self, source: Node) -> Node:
        return _on_host(replace(source, name=f"{source.name}/whale_host"))

    def _copy(self, ref: Ref, to_host: bool) -> Node:
        kind = self.program.type_of(ref)
        assert kind.dtype not in UNMOVABLE, ref
        name = f"{ref.node}/whale_{ref.index}_to_{'host' if to_host else 'device'}"
        attrs = {"T": DType(kind.dtype), "to_host": to_host}
        return _on_host(Node(name, COPY, (ref,), (), attrs, (kind,), self.program.by_name[ref.node].scope, True))


def _on_host(node: Node) -> Node:
    return replace(node, attrs={**node.attrs, ON_HOST: True})


def handles_on_host(program: Program) -> set[str]:
    """Of a rank's program that went through ``offload``."""
    nodes: Iterable[Node] = (n for n in program.nodes if n.attrs.get(ON_HOST))
    return {r.node for n in nodes for r in n.inputs if r.node in program.variable_of}
