"""A TensorFlow graph as a Program."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from whale.capture.attrs import SCOPE_ATTR, NodeAttrs, dtype_name
from whale.errors import CaptureError
from whale.ir.program import Node, Program, Ref, Variable, topological
from whale.ir.values import DType, Func, TensorType

# Stateful ops that only look: as control outputs of a traced function they keep nothing alive.
PURE_READS = frozenset(
    {
        "ReadVariableOp", "_ReadVariablesOp", "VariableShape", "VarIsInitializedOp", "ResourceGather",
        "ResourceGatherNd", "Placeholder", "VarHandleOp",
    }
)  # fmt: skip


@cache
def op_facts(op: str) -> tuple[bool, tuple[str, ...]] | None:
    """(is stateful, names of its attributes that hold functions) of an op type; None when it is not registered."""
    op_def = op_def_registry.get(op)
    if op_def is None:
        return None
    return op_def.is_stateful, tuple(a.name for a in op_def.attr if a.type in ("func", "list(func)"))


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Building ten thousands of small objects that all stay alive makes each collection a waste."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def program_from_graph(
    graph: tf.Graph,
    *,
    name: str,
    inputs: Sequence[tf.Tensor],
    variables: Sequence[tuple[tf.Tensor, str, str, tuple[int | None, ...] | None]],
    outputs: Sequence[tf.Tensor],
    effects: Sequence[tf.Operation],
    types: Mapping[Ref, TensorType] | None = None,
) -> Program:
    """The part of ``graph`` that ``outputs`` and ``effects`` need, as a Program.

    Args:
      name: the program's name.
      inputs: outputs of Placeholder nodes, in call order; they stay in the program even when unused.
      variables: (handle tensor, name, dtype of the value, shape of the value) of each variable.
      outputs: what the caller fetches.
      effects: operations that run for what they do; pure reads among them (and calls that only read) are dropped.
      types: static types that are better known than the graph knows them.

    Raises:
      CaptureError: a placeholder that the outputs need is neither an input nor a variable's handle.
    """
    with no_garbage_collection():
        builder = _Builder(graph)
        program = builder.build(
            graph,
            builder.graph_def,
            name,
            inputs=[t.op.name for t in inputs],
            variables={t.op.name: (n, TensorType(d, s)) for t, n, d, s in variables},
            outputs=[_ref(t) for t in outputs],
            effects=[op.name for op in effects],
            types=types or {},
        )
        return program.with_nodes(program.nodes, functions=builder.reachable_functions(program))


def _ref(tensor: tf.Tensor) -> Ref:
    return Ref(tensor.op.name, tensor.value_index)


class _Builder:
    """Turns one graph and the functions of its library into programs."""

    def __init__(self, graph: tf.Graph) -> None:
        self.graph_def = graph.as_graph_def()
        self.library = {f.signature.name: f for f in self.graph_def.library.function}
        self.functions: dict[str, Program] = {}
        self._names: dict[tuple[str, tuple[TensorType, ...]], str] = {}
        self._types: dict[tuple[Any, tuple[int | None, ...] | None], TensorType] = {}

    def build(
        self,
        graph: tf.Graph,
        graph_def: Any,
        name: str,
        *,
        inputs: Sequence[str],
        variables: Mapping[str, tuple[str, TensorType]],
        outputs: Sequence[Ref],
        effects: Sequence[str],
        types: Mapping[Ref, TensorType],
    ) -> Program:
        """One graph as a program; the functions that it calls are added to ``self.functions``."""
        defs = {n.name: n for n in graph_def.node}
        operands = _operands(defs, [r.node for r in outputs] + list(effects) + list(inputs))
        nodes: dict[str, Node] = {}
        known = set(inputs) | variables.keys()
        effect_set = set(effects)
        idle: set[str] = set()
        for node_def, op in _with_operations(graph, graph_def):
            node_name = node_def.name
            if node_name not in operands:
                continue
            if node_def.op == "Placeholder" and node_name not in known:
                raise CaptureError(
                    "a placeholder is needed but has no value",
                    op=node_name,
                    given=f"inputs {', '.join(inputs) or '(none)'}",
                    action="feed this placeholder, or remove it from what is fetched",
                )
            refs, controls = operands[node_name]
            node, acts = self._node(graph, node_def, op, refs, controls)
            if types:
                better = tuple(types.get(Ref(node_name, i), t) for i, t in enumerate(node.outputs))
                if better != node.outputs:
                    node = Node(node.name, node.op, refs, controls, node.attrs, better, node.scope, node.stateful)
            nodes[node_name] = node
            if node_name in effect_set and not acts:
                idle.add(node_name)
        program = Program(
            name=name,
            nodes=topological(nodes),
            inputs=tuple(inputs),
            variables=tuple(
                Variable(node, n, t, nodes[node].scope) for node, (n, t) in variables.items() if node in nodes
            ),
            outputs=tuple(outputs),
            effects=tuple(e for e in effects if e not in idle),
        )
        return _without_dead(program) if idle else program

    def _node(
        self, graph: tf.Graph, node_def: Any, op: tf.Operation, refs: tuple[Ref, ...], controls: tuple[str, ...]
    ) -> tuple[Node, bool]:
        """The node, and whether it does anything besides computing its outputs."""
        op_type = node_def.op
        attrs: Mapping[str, Any] = NodeAttrs(node_def)
        facts = op_facts(op_type)
        acts = op_type not in PURE_READS
        if facts is None:
            op_type, attrs, facts = self._legacy_call(node_def)
        if facts[1] and self.library:
            renamed: dict[str, Any] = {}
            acts = not facts[0]
            for key in facts[1]:
                value = attrs[key] if key in attrs else None
                many = value if isinstance(value, tuple) else (value,)
                funcs = []
                for func in many:
                    if isinstance(func, Func) and func.name in self.library:
                        body = self._body(graph, func.name, _arguments(op, op_type))
                        acts = acts or bool(self.functions[body].effects)
                        func = Func(body, func.attrs)
                    else:
                        acts = True
                    funcs.append(func)
                if tuple(funcs) != many:
                    renamed[key] = tuple(funcs) if isinstance(value, tuple) else funcs[0]
            if renamed:
                attrs = {**attrs, **renamed}
            # Datasets, iterators and the like carry functions but are not calls: what they do is not their body's.
            acts = acts or op_type not in _CALLS
        scope = node_def.attr[SCOPE_ATTR].s.decode() if SCOPE_ATTR in node_def.attr else ""
        outputs = tuple(self._type(t) for t in op.outputs)
        return Node(node_def.name, op_type, refs, controls, attrs, outputs, scope, facts[0]), acts

    def _legacy_call(self, node_def: Any) -> tuple[str, Mapping[str, Any], tuple[bool, tuple[str, ...]]]:
        """A node whose op type is a function's name, as the call op that means the same."""
        function = self.library.get(node_def.op)
        if function is None:
            raise CaptureError(
                "an op type is not registered",
                op=node_def.name,
                given=node_def.op,
                action="load the library that registers it before capturing",
            )
        signature = function.signature
        stateful = signature.is_stateful
        attrs = {
            "f": Func(node_def.op, {}),
            "Tin": tuple(DType(dtype_name(a.type)) for a in signature.input_arg),
            "Tout": tuple(DType(dtype_name(a.type)) for a in signature.output_arg),
        }
        op_type = "StatefulPartitionedCall" if stateful else "PartitionedCall"
        return op_type, attrs, (stateful, ("f",))

    def _type(self, tensor: tf.Tensor) -> TensorType:
        shape = tensor.shape
        key = (tensor.dtype, None if shape.rank is None else tuple(shape.as_list()))
        found = self._types.get(key)
        if found is None:
            found = self._types[key] = TensorType(key[0].name, key[1])
        return found

    def _body(self, graph: tf.Graph, name: str, arguments: list[tf.Tensor] | None) -> str:
        """Captures the function ``name`` for these arguments; returns its key in ``self.functions``."""
        from whale.capture.bodies import body_graph

        types = tuple(map(self._type, arguments)) if arguments is not None else ()
        key = (name, types)
        if key in self._names:
            return self._names[key]
        taken = {n for n, _ in self._names}
        unique = name if name not in taken else f"{name}.{sum(1 for n, _ in self._names if n == name)}"
        self._names[key] = unique
        body = body_graph(graph, self.library, name, arguments)
        graph_def = body.graph.as_graph_def() if body.graph_def is None else body.graph_def
        self.functions[unique] = self.build(
            body.graph,
            graph_def,
            unique,
            inputs=body.inputs,
            variables={},
            outputs=[_ref(t) for t in body.outputs],
            effects=body.effects,
            types={},
        )
        return unique

    def reachable_functions(self, program: Program) -> dict[str, Program]:
        """The functions that ``program`` calls, directly or through others."""
        found: dict[str, Program] = {}
        todo = [program] if self.functions else []
        while todo:
            for node in todo.pop().nodes:
                facts = op_facts(node.op)
                for key in facts[1] if facts else ():
                    value = node.attrs.get(key)
                    for func in value if isinstance(value, tuple) else (value,):
                        if isinstance(func, Func) and func.name in self.functions and func.name not in found:
                            found[func.name] = self.functions[func.name]
                            todo.append(found[func.name])
        return found


_CALLS = frozenset(
    {"PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile", "If", "StatelessIf", "Case",
     "StatelessCase"}
)  # fmt: skip


def _arguments(op: tf.Operation, op_type: str) -> list[tf.Tensor] | None:
    """The tensors that a call op passes to its functions; None when the op does not say (datasets)."""
    if op_type in ("PartitionedCall", "StatefulPartitionedCall"):
        return list(op.inputs)
    if op_type in ("While", "StatelessWhile"):
        # Outputs carry the loop's invariant shapes; handles know what they refer to on the input side only.
        return [i if i.dtype in (tf.resource, tf.variant) else o for i, o in zip(op.inputs, op.outputs)]
    if op_type in ("If", "StatelessIf", "Case", "StatelessCase"):
        return list(op.inputs)[1:]
    return None


def _with_operations(graph: tf.Graph, graph_def: Any) -> Iterator[tuple[Any, tf.Operation]]:
    """NodeDefs with their operations; both lists are in order of creation unless nodes were left out."""
    operations = graph.get_operations()
    if len(operations) == len(graph_def.node):
        for node_def, op in zip(graph_def.node, operations):
            yield node_def, (op if op.name == node_def.name else graph.get_operation_by_name(node_def.name))
    else:
        for node_def in graph_def.node:
            yield node_def, graph.get_operation_by_name(node_def.name)


def _operands(defs: Mapping[str, Any], roots: Sequence[str]) -> dict[str, tuple[tuple[Ref, ...], tuple[str, ...]]]:
    """(data operands, control operands) of every node that ``roots`` need."""
    found: dict[str, tuple[tuple[Ref, ...], tuple[str, ...]]] = {}
    stack = list(roots)
    while stack:
        name = stack.pop()
        if name in found:
            continue
        refs: list[Ref] = []
        controls: list[str] = []
        for text in defs[name].input:
            if text[0] == "^":
                text = text[1:]
                controls.append(text)
            else:
                text, _, index = text.partition(":")
                refs.append(Ref(text, int(index) if index else 0))
            if text not in found:
                stack.append(text)
        found[name] = (tuple(refs), tuple(controls))
    return found


def _without_dead(program: Program) -> Program:
    """Without the nodes that only dropped effects needed (whale.ir.program.prune would decode every attribute)."""
    by_name = program.by_name
    needed: set[str] = set()
    stack = [r.node for r in program.outputs] + list(program.effects) + list(program.inputs)
    while stack:
        name = stack.pop()
        if name not in needed:
            needed.add(name)
            node = by_name[name]
            stack.extend(r.node for r in node.inputs)
            stack.extend(node.controls)
    return program.with_nodes(
        tuple(n for n in program.nodes if n.name in needed),
        variables=tuple(v for v in program.variables if v.node in needed),
    )
