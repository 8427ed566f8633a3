"""Defines a captured program: nodes with global shapes, variables, inputs, outputs, and functions.

Functions are the bodies of loops, branches and calls. The representation needs no TensorFlow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import numpy as np

from whale.errors import PlanError
from whale.ir.marks import NO_MARKS, Marks
from whale.ir.ops import IDENTITIES
from whale.ir.values import DType, Func, Tensor, TensorType

# TensorFlow's attribute of a call that XLA compiles; Whale also sets it on nodes inlined from such a call, which are
# to be compiled again.
COMPILED = "_XlaMustCompile"
PRODUCT = "whale_product"  # suffix of the name of a matrix product that computes what another node did


class Ref(NamedTuple):
    """Refers to a tensor: output number ``index`` of the node called ``node``; as text ``node:index``."""

    node: str
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, of which a pair has no need

    def __str__(self) -> str:
        return f"{self.node}:{self.index}"


@dataclass(frozen=True, slots=True, init=False)
class Node:
    """Represents one operation of a graph.

    Attributes:
      name: unique in its graph.
      op: TensorFlow's or Whale's op type.
      inputs: the operands.
      controls: names of nodes that must run before (control edges).
      attrs: attributes, as the plain values of ``whale.ir.values``.
      outputs: dtype and shape of each output.
      scope: path of the user's annotation scopes around the node.
      stateful: as in the op's definition.
      marks: what Whale's passes record about the node.
    """

    name: str
    op: str
    inputs: tuple[Ref, ...] = ()
    controls: tuple[str, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[TensorType, ...] = ()
    scope: str = ""
    stateful: bool = False
    marks: Marks = NO_MARKS

    def __init__(
        self,
        name: str,
        op: str,
        inputs: tuple[Ref, ...] = (),
        controls: tuple[str, ...] = (),
        attrs: Mapping[str, Any] | None = None,
        outputs: tuple[TensorType, ...] = (),
        scope: str = "",
        stateful: bool = False,
        marks: Marks = NO_MARKS,
    ) -> None:
        """Creates a node; ``attrs=None`` are none."""
        # Passes create a million nodes for a large step. A frozen dataclass's own takes nearly twice as long.
        _set_name(self, name)
        _set_op(self, op)
        _set_inputs(self, inputs)
        _set_controls(self, controls)
        _set_attrs(self, {} if attrs is None else attrs)
        _set_outputs(self, outputs)
        _set_scope(self, scope)
        _set_stateful(self, stateful)
        _set_marks(self, marks)

    def with_marks(self, **marks: Any) -> Node:
        """Returns the node with added or changed marks (see ``whale.ir.marks``)."""
        return replace(self, marks=self.marks.replace_marks(**marks))

    def list_refs(self) -> tuple[Ref, ...]:
        """Returns references to all outputs of the node."""
        if len(self.outputs) == 1:  # nearly all nodes have one
            return (tuple.__new__(Ref, (self.name, 0)),)  # `Ref(...)` calls a Python function
        return tuple([Ref(self.name, i) for i in range(len(self.outputs))])


_set_name, _set_op, _set_inputs, _set_controls, _set_attrs, _set_outputs, _set_scope, _set_stateful, _set_marks = [
    Node.__dict__[one.name].__set__ for one in fields(Node)
]


def make_const(
    name: str, value: np.ndarray | Tensor, dtype: str | None = None, controls: tuple[str, ...] = (), scope: str = ""
) -> Node:
    """Creates a Const node.

    Args:
      dtype: the element type, for arrays whose NumPy dtype does not name it, such as bfloat16; None: that of the array.
    """
    tensor = value if isinstance(value, Tensor) else Tensor.from_numpy(value, dtype)
    attrs = {"dtype": DType(tensor.dtype), "value": tensor}
    return Node(name, "Const", (), controls, attrs, (TensorType(tensor.dtype, tensor.shape),), scope)


@dataclass(frozen=True, slots=True)
class Variable:
    """Represents a variable of a program.

    Attributes:
      node: name of the node that yields the resource handle.
      name: the variable's own name.
      type: dtype and shape of its value.
      scope: path of the user's annotation scopes around it.
    """

    node: str
    name: str
    type: TensorType
    scope: str = ""


@dataclass(frozen=True)
class Program:
    """Represents a static graph for one device: a captured training step, or the body of a function.

    Attributes:
      name: the program's name.
      nodes: in topological order.
      inputs: names of Placeholder nodes, in the order of the call's arguments.
      variables: the variables that the program uses.
      outputs: the tensors that the caller fetches.
      effects: names of nodes that run for their side effects, such as updates and prints.
      functions: the functions that nodes refer to, by name.
    """

    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...] = ()
    variables: tuple[Variable, ...] = ()
    outputs: tuple[Ref, ...] = ()
    effects: tuple[str, ...] = ()
    functions: Mapping[str, Program] = field(default_factory=dict)

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """Maps node names to the nodes of this graph; nodes of its functions are not included."""
        return {n.name: n for n in self.nodes}

    @cached_property
    def ops(self) -> frozenset[str]:
        """Returns the op types in this graph, without its functions, so that a pass can skip a program without its op
        types.
        """
        return frozenset([n.op for n in self.nodes])

    @cached_property
    def scopes(self) -> frozenset[str]:
        """Returns the paths of the scopes around this graph's nodes, of which thousands of nodes have a few."""
        return frozenset([n.scope for n in self.nodes])

    @cached_property
    def consumers(self) -> dict[Ref, list[tuple[Node, int]]]:
        """Maps each tensor to its readers, as (node, operand number)."""
        table: dict[Ref, list[tuple[Node, int]]] = {}
        for node in self.nodes:
            for i, ref in enumerate(node.inputs):
                if (readers := table.get(ref)) is None:
                    table[ref] = [(node, i)]
                else:
                    readers.append((node, i))
        return table

    @cached_property
    def kind_of(self) -> dict[str, int]:
        """Maps node names to numbers that are equal only for nodes of one kind: of equal op, attributes, marks and
        types, with constants of equal values and handles of variables as the same operands.

        What follows from these alone is found once for thousands of nodes. Types, marks and captured attributes are
        compared by identity, since captured nodes share them; others may have different numbers all the same.
        """
        first: dict[Any, int] = {}  # by the values of attributes that are a node's own: the identity of the first such

        def identify(attrs: Mapping[str, Any]) -> int:
            if type(attrs) is not dict:
                return id(attrs)
            try:
                return first.setdefault(tuple(sorted(attrs.items())), id(attrs))
            except TypeError:  # a value that has no hash, such as a function's attributes
                return id(attrs)

        by_name, handles = self.by_name, self.variable_of
        numbers: dict[tuple[object, ...], int] = {}
        found: dict[str, int] = {}
        for node in self.nodes:
            kind = [node.op, identify(node.attrs), id(node.marks), *map(id, node.outputs)]
            for name, index in node.inputs:
                made = by_name[name]
                kind.append(id(made.outputs[index]))
                while made.op in IDENTITIES and made.inputs:
                    made = by_name[made.inputs[0].node]
                is_handle = name in handles or (not handles and made.op == "Placeholder")
                kind.append(identify(made.attrs) if made.op == "Const" else int(is_handle))
            found[node.name] = numbers.setdefault(tuple(kind), len(numbers))
        return found

    @cached_property
    def variable_of(self) -> dict[str, Variable]:
        """Maps the name of each variable's handle node to the variable."""
        return {v.node: v for v in self.variables}

    def find_type(self, ref: Ref) -> TensorType:
        """Returns the dtype and shape of a tensor.

        Raises:
          KeyError: this graph has no node of that name.
        """
        return self.by_name[ref.node].outputs[ref.index]

    def const(self, ref: Ref) -> Any | None:
        """Returns the value of a constant tensor as a NumPy array, looking through Identity nodes; None if it is no
        constant.
        """
        node = self.by_name.get(ref.node)
        while node is not None and node.op in IDENTITIES and node.inputs:
            node = self.by_name.get(node.inputs[0].node)
        if node is None or node.op != "Const":
            return None
        value = node.attrs["value"]
        return value.numpy() if isinstance(value, Tensor) else None

    def replace_nodes(self, nodes: tuple[Node, ...], **changes: Any) -> Program:
        """Returns the program with these nodes, which must be in topological order, and with other fields from
        ``changes``.
        """
        return replace(self, nodes=nodes, **changes)


def iterate_function_refs(node: Node) -> Iterator[tuple[str, Func]]:
    """Yields (attribute name, ``Func``) for each function that a node's attributes name; each branch of a Case
    separately.
    """
    for key, value in node.attrs.items():
        if isinstance(value, Func):
            yield key, value
        elif isinstance(value, tuple) and value and isinstance(value[0], Func):
            for item in value:
                yield key, item


def iterate_calls(nodes: Iterable[Node]) -> Iterator[tuple[Node, Func]]:
    """Yields (node, ``Func``) for each function that an attribute of one of ``nodes`` names, as
    ``iterate_function_refs`` does for one node. Attributes that several nodes share are looked at once.
    """
    without: dict[int, Mapping[str, Any]] = {}  # by identity, the attributes that name no function
    for node in nodes:
        attrs = node.attrs
        if id(attrs) in without:
            continue
        found = [func for _, func in iterate_function_refs(node)]
        if not found:
            without[id(attrs)] = attrs
        for func in found:
            yield node, func


def find_called_functions(nodes: Iterable[Node], functions: Mapping[str, Program]) -> dict[str, Program]:
    """Returns those of ``functions`` that the nodes call, directly or through other functions, by name."""
    found: dict[str, Program] = {}
    # Attributes are decoded when they are read, which is worth it only where there is a function to find.
    waiting = [func.name for _, func in iterate_calls(nodes)] if functions else []
    while waiting:
        name = waiting.pop()
        if name in found or name not in functions:
            continue
        found[name] = functions[name]
        waiting += [func.name for _, func in iterate_calls(functions[name].nodes)]
    return found


def rename_nodes(program: Program, names: Mapping[str, str]) -> Program:
    """Returns ``program`` with nodes renamed by the map ``names`` (old -> new); its functions are not changed."""
    if not names:
        return program
    refs: dict[Ref, Ref] = {}

    def rename_ref(old: Ref) -> Ref:
        return refs.setdefault(old, Ref(names.get(old.node, old.node), old.index))

    def rename_node(old: Node) -> Node:
        if (
            old.name not in names
            and not any(r.node in names for r in old.inputs)
            and not names.keys() & {*old.controls}
        ):
            return old
        controls = tuple([names.get(c, c) for c in old.controls])
        return replace(
            old, name=names.get(old.name, old.name), inputs=tuple(map(rename_ref, old.inputs)), controls=controls
        )

    return replace(
        program,
        nodes=tuple(map(rename_node, program.nodes)),
        inputs=tuple(names.get(n, n) for n in program.inputs),
        variables=tuple(replace(v, node=names.get(v.node, v.node)) for v in program.variables),
        outputs=tuple(map(rename_ref, program.outputs)),
        effects=tuple(names.get(n, n) for n in program.effects),
    )


def sort_nodes(nodes: Mapping[str, Node]) -> tuple[Node, ...]:
    """Sorts nodes topologically, by operands and control edges; keeps the mapping's order if that is valid already.

    Raises:
      PlanError: the nodes form a cycle.
    """
    # Most graphs arrive sorted, and a check is much cheaper than a sort.
    return tuple(nodes.values()) if _is_sorted(nodes) else _sort_topologically(nodes)


def _is_sorted(nodes: Mapping[str, Node]) -> bool:
    seen: set[str] = set()
    for name, node in nodes.items():
        for before, _ in node.inputs:
            if before not in seen:
                return False
        if node.controls and not seen.issuperset(node.controls):
            return False
        seen.add(name)
    return True


def _sort_topologically(nodes: Mapping[str, Node]) -> tuple[Node, ...]:
    """Sorts nodes level by level: those without predecessors, then those that became ready, and so on, as ``graphlib``
    does.

    It takes a third of the time of ``graphlib``. Dictionaries keep an order where sets do not, so that all processes
    sort alike.
    """
    waits_for: dict[str, int] = {}
    after: dict[str, list[str]] = {name: [] for name in nodes}
    for name, node in nodes.items():
        names = dict.fromkeys([*[before for before, _ in node.inputs], *node.controls])
        waits_for[name] = len(names)
        for other in names:
            if other not in waits_for:
                waits_for[other] = 0
            after[other].append(name)
    order: list[str] = []
    ready = [name for name, count in waits_for.items() if not count]
    while ready:
        order += ready
        done, ready = ready, []
        for name in done:
            for other in after[name]:
                waits_for[other] -= 1
                if not waits_for[other]:
                    ready.append(other)
    if len(order) < len(waits_for):
        _refuse_cycle({n.name: [*[before for before, _ in n.inputs], *n.controls] for n in nodes.values()})
    return tuple([nodes[name] for name in order])


def _refuse_cycle(before: Mapping[str, Iterable[str]]) -> None:
    """Raises PlanError with the names of the nodes of a cycle.

    Args:
      before: node name -> names of its predecessors; must contain a cycle.
    """
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        cycle = list(reversed(error.args[1]))
        raise PlanError(
            "operations of the program would wait for each other in a cycle",
            op=" -> ".join(cycle[:6]) + (" ..." if len(cycle) > 6 else ""),
            expected="an order in which each comes after what it reads",
            action="turn off one feature of the step (an axis of the mesh, micro-batches or recompute), or give every "
            "rank rows of the batch; and please report the script",
        ) from None


def rewire(program: Program, nodes: Mapping[str, Node], moved: Mapping[Ref, Ref]) -> Program:
    """Returns ``program`` with its nodes replaced by ``nodes``, in which each reader of a replaced tensor reads its
    replacement.

    If the producer of a replaced tensor is not among the new nodes, nodes that had a control edge from it get one from
    the producer of its first output's replacement.

    Args:
      nodes: the new nodes by name, in any order; they may still refer to the replaced tensors.
      moved: replaced tensor -> its replacement.
    """
    names = {old.node: new.node for old, new in moved.items() if old.index == 0 and old.node not in nodes}

    def rename_controls(found: Collection[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys([names.get(name, name) for name in found]))

    changed: dict[str, Node] = {}
    moves, renames = moved.keys().isdisjoint, names.keys().isdisjoint
    for name, n in nodes.items():
        inputs, controls = n.inputs, n.controls
        if inputs and not moves(inputs):
            inputs = tuple([moved.get(r, r) for r in inputs])
        if controls and not renames(controls):
            controls = rename_controls(controls)
        if inputs is not n.inputs or controls is not n.controls:  # `replace` takes three times as long
            n = Node(n.name, n.op, inputs, controls, n.attrs, n.outputs, n.scope, n.stateful, n.marks)
        changed[name] = n
    outputs = tuple(moved.get(r, r) for r in program.outputs)
    is_sorted = _is_sorted(changed)
    order = tuple(changed.values()) if is_sorted else _sort_topologically(changed)
    made = program.replace_nodes(order, outputs=outputs, effects=rename_controls(program.effects))
    if is_sorted:
        made.__dict__["by_name"] = changed  # `cached_property` looks there first, and would make the same again
    return made


def remove_unread(program: Program, names: Collection[str]) -> Program:
    """Returns ``program`` without those of the nodes called ``names`` that nothing reads, waits for or fetches."""
    needed = {*(r.node for r in program.outputs), *program.effects}
    kept: list[Node] = []
    for node in reversed(program.nodes):
        if node.name in names and node.name not in needed:
            continue
        needed.update([r.node for r in node.inputs])
        needed.update(node.controls)
        kept.append(node)
    return program.replace_nodes(tuple(reversed(kept)))


def find_waited_for(program: Program, names: Iterable[str]) -> set[str]:
    """Returns the names of these nodes and of all their predecessors, through operands and control edges."""
    found: set[str] = set()
    stack = list(names)
    by_name = program.by_name
    while stack:
        name = stack.pop()
        if name in found:
            continue
        found.add(name)
        node = by_name[name]
        stack += [before for before, _ in node.inputs if before not in found]
        stack += node.controls
    return found


def remove_work(program: Program, done: Collection[str], and_before: bool = False) -> Program:
    """Returns ``program`` with the named nodes turned into NoOps, which do nothing and keep the control edges.

    Args:
      done: names of the nodes.
      and_before: also remove their predecessors, except those that other nodes need.
    """
    if not done:
        return program

    def make_idle(node: Node) -> Node:
        return replace(
            node, op="NoOp", inputs=(), attrs={}, marks=NO_MARKS, controls=() if and_before else node.controls
        )

    nodes = [make_idle(node) if node.name in done else node for node in program.nodes]
    return prune(program.replace_nodes(tuple(nodes)))


def prune(program: Program) -> Program:
    """Returns ``program`` without nodes that no output or effect needs, and without functions that only such nodes
    call.

    The program's inputs always stay.
    """
    needed = {*(r.node for r in program.outputs), *program.effects}
    for node in reversed(program.nodes):
        if node.name in needed:
            for before, _ in node.inputs:
                needed.add(before)
            if node.controls:
                needed.update(node.controls)
    needed.update(program.inputs)
    nodes = tuple([n for n in program.nodes if n.name in needed])
    variables = tuple([v for v in program.variables if v.node in needed])
    return replace(program, nodes=nodes, variables=variables, functions=find_called_functions(nodes, program.functions))
