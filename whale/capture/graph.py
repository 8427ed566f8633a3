"""Converts a tf.Graph with its function library to a Program."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from whale.capture.attrs import SCOPE_ATTR, NodeAttrs, find_dtype_name, read_marks
from whale.capture.bodies import load_body
from whale.errors import CaptureError
from whale.ir.collector import suspend_garbage_collection
from whale.ir.marks import Marks
from whale.ir.ops import BRANCHES, CALLS, HAS_BODIES, LOOPS, READS
from whale.ir.program import Node, Program, Ref, Variable, rename_nodes
from whale.ir.values import DType, Func, TensorType

_NUMBER = re.compile(r"[_.]?\d+")

# Stateful ops that only look: as control outputs of a traced function they keep nothing alive.
PURE_READS = READS | {"Placeholder", "VarHandleOp"}

_LARGEST_SHARED_BYTES = 1024  # NodeDefs of more bytes are constants, which are not worth a comparison

_Operands = tuple[tuple[Ref, ...], tuple[str, ...]]  # of a node: data operands, control operands
_NO_OPERANDS: _Operands = ((), ())

NO_NAMES: Mapping[str, str] = MappingProxyType({})


@cache
def find_op_facts(op: str) -> tuple[bool, tuple[str, ...]] | None:
    """Looks up an op type in TensorFlow's registry.

    Returns:
      (whether the op is stateful, names of its attributes that hold functions); None if the op type is not registered.
    """
    op_def = op_def_registry.get(op)
    if op_def is None:
        return None
    return op_def.is_stateful, tuple(a.name for a in op_def.attr if a.type in ("func", "list(func)"))


def read_graph(
    graph: tf.Graph,
    *,
    name: str,
    inputs: Sequence[tf.Tensor],
    variables: Sequence[tuple[tf.Tensor, str, str, tuple[int | None, ...] | None]],
    outputs: Sequence[tf.Tensor],
    effects: Sequence[tf.Operation],
    types: Mapping[Ref, TensorType] | None = None,
    names: Mapping[str, str] = NO_NAMES,
) -> Program:
    """Converts the part of ``graph`` that ``outputs`` and ``effects`` need to a Program.

    Args:
      graph: the graph to read.
      name: name of the program.
      inputs: outputs of Placeholder nodes, in call order; all of them stay in the program, even unused ones.
      variables: one (handle tensor, name, dtype of the value, shape of the value) per variable.
      outputs: the tensors that the caller fetches.
      effects: operations that run for their side effects. Those that only read state are dropped, and so are calls of
        functions that only read state.
      types: static types for tensors whose shapes the graph knows less well.
      names: TensorFlow's name of a node -> its name in the program; other nodes of ``graph`` keep theirs, and so do
        those of its functions.

    Raises:
      CaptureError: the outputs need a placeholder that is neither an input nor a variable's handle; an op type is not
        registered; or the graph has a cycle.
    """
    with suspend_garbage_collection():
        builder = _Builder(graph)
        program = builder.build(
            graph,
            builder.graph_def,
            name,
            inputs=[t.op.name for t in inputs],
            variables={t.op.name: (n, TensorType(d, s)) for t, n, d, s in variables},
            outputs=[_make_ref(t) for t in outputs],
            effects=[op.name for op in effects],
            types=types or {},
            names=names,
        )
        return program.replace_nodes(program.nodes, functions=builder.list_reachable_functions(program))


def _make_ref(tensor: tf.Tensor) -> Ref:
    return Ref(tensor.op.name, tensor.value_index)


@dataclass(slots=True)
class _Alike:
    """Holds what NodeDefs that differ only in their names and operands have in common: a graph of thousands of nodes
    has some dozens of them.

    Attributes:
      op: the op type.
      attrs: the attributes, which all these nodes share.
      stateful: as in the op's definition.
      functions: names of the attributes that hold functions.
      scope, marks: as in ``Node``.
      types: the output types of such a node by the sizes of its only output; None: of unknown rank.
      constant: the output types if the node is a constant; else None.
    """

    op: str
    attrs: NodeAttrs
    stateful: bool
    functions: tuple[str, ...]
    scope: str
    marks: Marks
    types: dict[tuple[int | None, ...] | None, tuple[TensorType, ...]] = field(default_factory=dict)
    constant: tuple[TensorType, ...] | None = None


class _Builder:
    """Converts one graph, and the functions that it calls, to programs; ``read_graph`` creates one for each graph."""

    def __init__(self, graph: tf.Graph) -> None:
        self.graph_def = graph.as_graph_def()
        self.library = {f.signature.name: f for f in self.graph_def.library.function}
        self.functions: dict[str, Program] = {}
        self._names: dict[tuple[str, tuple[TensorType, ...]], str] = {}
        self._types: dict[tuple[Any, tuple[int | None, ...] | None], TensorType] = {}
        self._alike: dict[bytes, _Alike] = {}  # by the NodeDef without name and operands

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
        names: Mapping[str, str] = NO_NAMES,
    ) -> Program:
        """Converts one graph to a program, and adds the functions that it calls to ``self.functions``."""
        defs = {n.name: n for n in graph_def.node}
        effects = [e for e in effects if defs[e].op not in PURE_READS]
        operands = _read_operands(defs, names)
        roots = [*(r.node for r in outputs), *effects, *inputs]
        needed, is_sorted = _find_needed(operands, [names.get(n, n) for n in roots])
        known = {*inputs, *variables}
        nodes: dict[str, Node] = {}
        idle: set[str] = set()
        alike = self._alike
        pairs = zip(defs.items(), operands.items(), _list_operations(graph, defs), strict=True)
        for (node_name, node_def), (own, (refs, controls)), op in pairs:
            if own not in needed:
                continue
            # The name and the operands have been read, and what is left is what nodes have in common.
            node_def.ClearField("name")
            node_def.ClearField("input")
            key = node_def.SerializeToString(deterministic=True)
            common = alike.get(key)
            if common is None:
                common = _describe(node_def)
                if len(key) <= _LARGEST_SHARED_BYTES:
                    alike[key] = common
            op_type, stateful = common.op, common.stateful
            attrs: Mapping[str, Any] = common.attrs
            if common.functions:
                op_type, attrs, stateful, acts = self._call(graph, node_name, node_def, op, attrs)
                if not acts:
                    idle.add(node_name)
            elif op_type == "Placeholder" and node_name not in known:
                raise _make_missing_value_error(node_name, inputs)
            kinds = common.constant or self._make_types(common, op)
            if types:
                kinds = tuple([types.get(Ref(node_name, i), t) for i, t in enumerate(kinds)])
            nodes[own] = Node(own, op_type, refs, controls, attrs, kinds, common.scope, stateful, common.marks)
        acting = {names.get(n, n) for n in effects if n not in idle}
        own_variables = [(names.get(node, node), n, t) for node, (n, t) in variables.items()]
        program = Program(
            name=name,
            nodes=tuple(nodes.values()) if is_sorted else _sort_nodes(nodes),
            inputs=tuple([names.get(n, n) for n in inputs]),
            variables=tuple([Variable(node, n, t, nodes[node].scope) for node, n, t in own_variables if node in nodes]),
            outputs=tuple([Ref(names.get(n, n), i) for n, i in outputs]),
            # TensorFlow keeps control outputs in sets, whose order differs between processes.
            effects=tuple([n for n in nodes if n in acting]),
        )
        return program if idle.isdisjoint(effects) else _remove_dead(program)

    def _make_types(self, common: _Alike, op: tf.Operation) -> tuple[TensorType, ...]:
        """Returns the types of an operation's outputs."""
        outputs = op.outputs
        if len(outputs) != 1:
            return tuple([self._make_type(t) for t in outputs])
        # TensorFlow makes a TensorShape of these two for whoever asks for `tensor.shape`, which takes much longer.
        sizes, is_unknown = outputs[0]._shape
        key = None if is_unknown else tuple(sizes)
        kinds = common.types.get(key)
        if kinds is None:
            kinds = common.types[key] = (self._make_type(outputs[0]),)
            if common.op == "Const":  # its value, and with it its shape, is an attribute
                common.constant = kinds
        return kinds

    def _call(
        self, graph: tf.Graph, name: str, node_def: Any, op: tf.Operation, attrs: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, Any], bool, bool]:
        """Captures the functions that a node calls; returns (op type, attributes, is stateful, has side effects) for
        the node.
        """
        op_type = node_def.op
        facts = find_op_facts(op_type)
        if facts is None:
            op_type, attrs, facts = self._convert_legacy_call(name, node_def)
        acts = op_type not in HAS_BODIES and op_type not in CALLS
        renamed: dict[str, Any] = {}
        for key in facts[1]:
            value = attrs.get(key)
            many = value if isinstance(value, tuple) else (value,)
            funcs = []
            for func in many:
                if isinstance(func, Func) and func.name in self.library:
                    body = self._capture_body(graph, func.name, _list_call_arguments(op, op_type))
                    acts = acts or bool(self.functions[body].effects)
                    func = func if body == func.name else Func(body, func.attrs)
                else:
                    # Nodes of datasets and iterators may lack their function; assume that it has side effects.
                    acts = True
                funcs.append(func)
            if tuple(funcs) != many:
                renamed[key] = tuple(funcs) if isinstance(value, tuple) else funcs[0]
        return op_type, {**attrs, **renamed} if renamed else attrs, facts[0], acts

    def _convert_legacy_call(
        self, name: str, node_def: Any
    ) -> tuple[str, Mapping[str, Any], tuple[bool, tuple[str, ...]]]:
        """Converts a node whose op type is a function's name to a PartitionedCall.

        Returns:
          (op type, attributes, (is stateful, names of the attributes that hold functions)).
        """
        function = self.library.get(node_def.op)
        if function is None:
            raise CaptureError(
                "an op type is not registered",
                op=name,
                given=node_def.op,
                expected="an op type that this process has registered",
                action="call tf.load_op_library() for the library with this op before the graph is built",
            )
        signature = function.signature
        stateful = signature.is_stateful
        attrs = {
            "f": Func(node_def.op, {}),
            "Tin": tuple(DType(find_dtype_name(a.type)) for a in signature.input_arg),
            "Tout": tuple(DType(find_dtype_name(a.type)) for a in signature.output_arg),
        }
        op_type = "StatefulPartitionedCall" if stateful else "PartitionedCall"
        return op_type, attrs, (stateful, ("f",))

    def _make_type(self, tensor: tf.Tensor) -> TensorType:
        sizes, is_unknown = tensor._shape
        key = (tensor.dtype, None if is_unknown else tuple(sizes))
        found = self._types.get(key)
        if found is None:
            found = self._types[key] = TensorType(key[0].name, key[1])
        return found

    def _capture_body(self, graph: tf.Graph, name: str, arguments: list[tf.Tensor] | None) -> str:
        """Captures function ``name`` for arguments of these types, once; returns its key in ``self.functions``.

        Further captures of the same function for other types are called ``name.1``, ``name.2``, ...
        """
        types = tuple(map(self._make_type, arguments)) if arguments is not None else ()
        key = (name, types)
        if key in self._names:
            return self._names[key]
        taken = {n for n, _ in self._names}
        unique = name if name not in taken else f"{name}.{sum(1 for n, _ in self._names if n == name)}"
        self._names[key] = unique
        body = load_body(graph, self.library, name, arguments)
        graph_def = body.graph.as_graph_def() if body.graph_def is None else body.graph_def
        self.functions[unique] = rename_arguments(
            self.build(
                body.graph,
                graph_def,
                unique,
                inputs=body.inputs,
                variables={},
                outputs=[_make_ref(t) for t in body.outputs],
                effects=body.effects,
                types={},
            )
        )
        return unique

    def list_reachable_functions(self, program: Program) -> dict[str, Program]:
        """Returns the functions that ``program`` calls, directly or through others."""
        found: dict[str, Program] = {}
        pending = [program] if self.functions else []
        while pending:
            for node in pending.pop().nodes:
                facts = find_op_facts(node.op)
                for key in facts[1] if facts else ():
                    value = node.attrs.get(key)
                    for func in value if isinstance(value, tuple) else (value,):
                        if isinstance(func, Func) and func.name in self.functions and func.name not in found:
                            found[func.name] = self.functions[func.name]
                            pending.append(found[func.name])
        return found


# Stands for the function attributes of an op type that is not registered: a function called by its own name.
_LEGACY = ("",)


def _list_call_arguments(op: tf.Operation, op_type: str) -> list[tf.Tensor] | None:
    """Returns the tensors that a call, loop or branch passes to its functions; None for other ops, such as those of
    tf.data.
    """
    if op_type in CALLS:
        return list(op.inputs)
    if op_type in LOOPS:
        # Outputs carry the loop's invariant shapes; handles know what they refer to on the input side only.
        return [i if i.dtype in (tf.resource, tf.variant) else o for i, o in zip(op.inputs, op.outputs)]
    if op_type in BRANCHES:
        return list(op.inputs)[1:]
    return None


def _make_missing_value_error(placeholder: str, inputs: Sequence[str]) -> CaptureError:
    return CaptureError(
        "a placeholder is needed but has no value",
        op=placeholder,
        given=f"values for {', '.join(inputs) or 'nothing'}",
        expected=f"a value for {placeholder} too",
        action="feed this placeholder, or do not fetch what depends on it",
    )


def _describe(node_def: Any) -> _Alike:
    """Returns what a NodeDef has in common with all that differ from it only in their names and operands."""
    op, given = node_def.op, node_def.attr
    stateful, functions = find_op_facts(op) or (False, _LEGACY)
    scope = given[SCOPE_ATTR].s.decode() if SCOPE_ATTR in given else ""
    return _Alike(op, NodeAttrs(node_def), stateful, functions, scope, read_marks(given))


def _list_operations(graph: tf.Graph, defs: Mapping[str, Any]) -> list[tf.Operation]:
    """Returns the tf.Operations of the NodeDefs ``defs``, which are given by name, in their order."""
    operations: list[tf.Operation] = graph.get_operations()
    names = list(defs)
    # Both list the nodes in order of creation. A node that only one of them has would shift all that follow.
    if len(operations) == len(names) and all(operations[i].name == names[i] for i in _sample_numbers(len(names))):
        return operations
    return [graph.get_operation_by_name(name) for name in names]


def _sample_numbers(count: int) -> list[int]:
    return [*range(0, count, 64), count - 1] if count else []


def _read_operands(defs: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, _Operands]:
    """Returns the operands of each node of a graph by the node's new name, in the order of ``defs``.

    Args:
      defs: the graph's NodeDefs by name.
      names: TensorFlow's name of a node -> the name that takes its place; others keep theirs.
    """
    found: dict[str, _Operands] = {}
    # By the texts of operands. A reference holds the very string that its node has as name: passes look nodes up by it,
    # and strings that are not one object are compared letter by letter. `Ref(...)` would call a Python function.
    refs_of = {name: tuple.__new__(Ref, (names.get(name, name), 0)) for name in defs}
    for name, node_def in defs.items():
        own = refs_of[name][0]
        texts = node_def.input[:]  # a list, which is iterated in half the time of the message's own sequence
        if not texts:
            found[own] = _NO_OPERANDS
            continue
        refs: list[Ref] = []
        controls: list[str] = []
        for text in texts:
            ref = refs_of.get(text)
            if ref is None:
                if text[0] == "^":
                    # Arguments have their values from the start, so nothing has to wait for them.
                    if defs[text[1:]].op != "Placeholder":
                        controls.append(refs_of[text[1:]][0])
                    continue
                node, _, number = text.partition(":")
                ref = refs_of[text] = Ref(refs_of[node][0], int(number))
            refs.append(ref)
        found[own] = tuple(refs), tuple(controls)
    return found


def _find_needed(operands: dict[str, _Operands], roots: Sequence[str]) -> tuple[set[str], bool]:
    """Returns the names of ``roots`` and of all nodes that these depend on, and whether each of these comes after its
    operands.

    Args:
      operands: of each node of a graph, by its name, in order of creation: nodes come after their operands, except
        where a control edge was added to an old node.
    """
    needed, later = set(roots), set[str]()
    passed: list[str] = []  # nodes that no later one needs
    is_sorted = True
    for name, (refs, controls) in reversed(operands.items()):
        if name not in needed:
            passed.append(name)
        elif refs or controls:
            before = [node for node, _ in refs]
            before += controls
            is_sorted = is_sorted and later.isdisjoint(before)
            needed.update(before)
        later.add(name)
    stack = [name for name in passed if name in needed]
    while stack:
        refs, controls = operands[stack.pop()]
        for node in (*[node for node, _ in refs], *controls):
            if node not in needed:
                needed.add(node)
                stack.append(node)
    return needed, is_sorted


def _sort_nodes(nodes: Mapping[str, Node]) -> tuple[Node, ...]:
    """Returns ``nodes`` in order of creation, but each after its operands, since control edges may be added to old
    nodes.

    Raises:
      CaptureError: the nodes form a cycle.
    """
    done: dict[str, Node] = {}
    ready: set[str] = set()  # the names in `done`: of a set it is quickly told whether it has several
    waiting: dict[str, None] = {}
    for first, one in nodes.items():
        inputs, controls = one.inputs, one.controls
        if (not inputs or ready.issuperset([before for before, _ in inputs])) and (
            not controls or ready.issuperset(controls)
        ):
            done[first] = one
            ready.add(first)
            continue
        stack = [first]
        while stack:
            name = stack[-1]
            if name in done:
                stack.pop()
                continue
            node = nodes[name]
            missing = [r.node for r in node.inputs if r.node not in done]
            if node.controls:
                missing += [c for c in node.controls if c not in done]
            if not missing:
                done[name] = node
                ready.add(name)
                waiting.pop(name, None)
                stack.pop()
            elif name in waiting:
                raise CaptureError(
                    "the graph has a cycle",
                    op=name,
                    given=f"{name} depends on {missing[0]}, which depends on {name}",
                    expected="loops as While ops, which tf.while_loop builds with control flow v2",
                    action="call tf.compat.v1.enable_control_flow_v2() before the graph is built",
                )
            else:
                waiting[name] = None
                stack += reversed(missing)
    return tuple(done.values())


def _remove_dead(program: Program) -> Program:
    """Removes nodes that neither outputs nor effects need any more; unlike whale.ir.program.prune, it decodes no
    attributes.
    """
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
    return program.replace_nodes(
        tuple(n for n in program.nodes if n.name in needed),
        variables=tuple(v for v in program.variables if v.node in needed),
    )


# Names of nodes that are equal in all processes.
#
# TensorFlow names what a function captures without a name, and the bodies of loops and branches, by a counter of the
# process, which every eager tensor counts on. Ranks compare programs by name, and rank 0's plan speaks of nodes by
# name.
class Names:
    """Makes names unique, in constant time per name, however often the same name was asked for before.

    Args:
      used: names that are taken from the start.
    """

    def __init__(self, used: Iterable[str] = ()):
        self._used = set(used)
        self._numbers: dict[str, int] = {}

    def make_unused(self, name: str) -> str:
        """Returns ``name`` if it is free, else ``name_1``, ``name_2``, ...; the returned name is taken from then on."""
        unique, n = name, self._numbers.get(name, 1)
        while unique in self._used:
            unique, n = f"{name}_{n}", n + 1
        self._numbers[name] = n
        self._used.add(unique)
        return unique


def name_captures(names: Sequence[str], taken: Collection[str]) -> dict[str, str]:
    """Returns new names for captured tensors that TensorFlow has named by a number only: ``scope/995`` ->
    ``scope/captured``.

    The number is a counter of the process, so that it differs between ranks, which compare programs by names.

    Args:
      names: names of the captured tensors' placeholders, in order of capture.
      taken: names of all nodes of the graph.

    Returns:
      New name by old name; names that do not end in a number are left out.
    """
    found: dict[str, str] = {}
    used = Names(taken)
    for name in names:
        scope, _, last = name.rpartition("/")
        if last.isdigit():
            found[name] = used.make_unused(f"{scope}/captured" if scope else "captured")
    return found


def rename_arguments(body: Program) -> Program:
    """Renames the inputs of a function so that their names have no numbers, which differ between processes."""
    used = Names({n.name for n in body.nodes} - set(body.inputs))
    return rename_nodes(body, {n: used.make_unused(_NUMBER.sub("", n).strip("_/") or "argument") for n in body.inputs})
