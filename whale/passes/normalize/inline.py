"""Replaces function calls by the bodies of the functions (``inline``), and gives each loop and branch functions of its
own (``specialise``).

Loops and branches stay, with copies of the functions that they call, so that each can have its own layouts. Functions
of other ops (datasets, iterators) are not planned and may be shared. They are renamed after the op that uses them as
well, since TensorFlow gives some of them random names in each process.

A function that asks for XLA is inlined too: layouts change inside of it, and communication cannot be inside of what XLA
compiles. Its nodes are marked, and in each rank's program they are compiled in clusters between communication ops
(``whale.kernels.clusters``). Some of them have no kernel on the CPU: gradients of grouped or dilated convolutions,
convolutions and pooling with the channels first, XLA's own ops. Those are compiled in any case (``whale.kernels.xla``).

Decisions: 0020, 0169.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from whale.errors import REPORT_FAULT, ProgramError
from whale.ir.ops import ASSIGNS, CALLS, CONVOLUTIONS, FILTER_GRADIENTS, FUSED_UPDATE, HAS_BODIES, READS
from whale.ir.program import COMPILED, Node, Program, Ref, iterate_calls, iterate_function_refs, sort_nodes
from whale.ir.values import Func, TensorType
from whale.passes.normalize.cse import is_shared_scalar

# Dtypes of convolutions for which the CPU has kernels of gradients too.
_CONVOLVED = frozenset({"float16", "bfloat16", "float32", "float64"})


def inline(program: Program) -> Program:
    """Replaces every call in ``program`` by its function's nodes, also in bodies of loops and branches.

    A body's nodes are named ``call/inner``. Nodes that waited for the call wait for all effects of the body, or, if
    they read or write a variable, for its accesses in the body. Nodes that the call waited for run before the body's
    stateful nodes, but for reads of variables that none of them writes. A function that asks for XLA compilation is
    inlined as well, and its nodes are marked (see the module's text).

    Raises:
      ProgramError: a function calls itself, or is not in the program, or gets another number of arguments than it
        takes.
    """
    return _Inliner(program).run()


class _Inliner:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.done: dict[str, Program] = {}
        self.active: list[str] = []
        self.compiled: set[str] = set()  # functions of loops and branches inside compiled functions

    def run(self) -> Program:
        program = self.program
        if not program.functions:
            return program
        flat = self._flatten(program)
        kept: dict[str, Program] = {}
        pending = [flat]
        while pending:
            for node, func in iterate_calls(pending.pop().nodes):
                if func.name in program.functions and func.name not in kept:
                    kept[func.name] = self._function(func.name, node)
                    pending.append(kept[func.name])
        return replace(flat, functions={n: _mark_compiled(f) if n in self.compiled else f for n, f in kept.items()})

    def _function(self, name: str, call: Node) -> Program:
        """Returns the function ``name`` with the calls in its body inlined; each function is processed once."""
        if name in self.active:
            raise ProgramError(
                "a tf.function calls itself, and calls of functions cannot be inlined",
                op=call.name,
                given=" -> ".join([*self.active, name]),
                expected="functions without recursion",
                action="write the recursion as a tf.while_loop",
            )
        if name not in self.done:
            if name not in self.program.functions:
                raise ProgramError(
                    "a call refers to a function that the captured program does not have",
                    op=call.name,
                    given=name,
                    expected=f"one of the program's {len(self.program.functions)} functions",
                    action="capture the program again, together with its functions",
                )
            self.active.append(name)
            self.done[name] = self._flatten(self.program.functions[name])
            self.active.pop()
        return self.done[name]

    def _flatten(self, program: Program) -> Program:
        if not any(n.op in CALLS for n in program.nodes):
            return program
        splice = _Splice(program)
        for node in program.nodes:
            if node.op in CALLS:
                body = self._function(node.attrs["f"].name, node)
                if _asks_for_xla(node):
                    self.compiled |= _list_called(body, self.program.functions)
                    body = _mark_compiled(body)
                splice.call(node, body)
            else:
                splice.keep(node)
        return splice.result()


class _Splice:
    """Collects the nodes of one program while its calls are replaced by bodies."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes: dict[str, Node] = {}
        self.taken = set(program.by_name)
        self.moved: dict[Ref, Ref] = {}
        self.effects_of: dict[str, tuple[str, ...]] = {}
        self.done: dict[str, Node] = {}  # by the name of a call: a NoOp of this name, which waits for the whole body
        # By the name of a call and the handle of a variable: the body's nodes that read it, and those that write it.
        self.accesses: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
        # Of the scalars of updates, by their function, name in it, operands and scope: the node that computes one.
        self.scalars: dict[tuple[str, str, tuple[Ref, ...], str], str] = {}
        self.shared: dict[str, frozenset[str]] = {}  # by function: its scalars that calls share
        self.placeholders = {n.name for n in program.nodes if n.op == "Placeholder"}

    def keep(self, node: Node) -> None:
        """Adds a node that is not a call, its operands renamed to the inlined nodes."""
        if self.moved:
            inputs = tuple([self.moved.get(r, r) for r in node.inputs])
            if inputs != node.inputs:
                node = replace(node, inputs=inputs)
        if node.controls and not self.done.keys().isdisjoint(node.controls):
            node = replace(node, controls=self._find_waits(node))
        self.nodes[node.name] = node

    def _find_waits(self, node: Node) -> tuple[str, ...]:
        """Returns the controls of a node that waits for calls: if it reads or writes a variable, the accesses of this
        variable in their bodies; else all that their ends wait for, or their ends.
        """
        waits: dict[str, None] = {}
        for control in node.controls:
            accesses = None
            if node.op in ASSIGNS or node.op == "ReadVariableOp":
                accesses = self.accesses.get((control, node.inputs[0].node))
            if node.op == "NoOp" and control in self.done:
                waits.update(dict.fromkeys(self.done[control].controls))
            elif accesses is None:
                self._keep_ends((control,))
                waits[control] = None
            else:
                reads, writes = accesses
                waits.update(dict.fromkeys(writes if node.op == "ReadVariableOp" else (*reads, *writes)))
        return tuple(waits)

    def _keep_ends(self, controls: tuple[str, ...]) -> None:
        for name in controls:
            if name in self.done:
                self.nodes[name] = self.done[name]

    def call(self, call: Node, body: Program) -> None:
        """Adds the nodes of ``body`` in place of ``call``; if others wait for all of it, a NoOp with its name remains.

        Raises:
          ProgramError: the call passes another number of arguments than the function takes.
        """
        given = tuple(self.moved.get(r, r) for r in call.inputs)
        if len(given) != len(body.inputs):
            raise ProgramError(
                "a call passes another number of arguments than its function takes",
                op=call.name,
                given=f"{len(given)} arguments",
                expected=f"{len(body.inputs)} arguments of {body.name}",
                action=f"capture the program again; if it stops here once more, {REPORT_FAULT}",
            )
        arguments = dict(zip(body.inputs, given))
        names: dict[str, str] = {}

        def ref(inner: Ref) -> Ref:
            return arguments[inner.node] if inner.node in arguments else Ref(names[inner.node], inner.index)

        def control(inner: str) -> str:
            return arguments[inner].node if inner in arguments else names[inner]

        def waits(*controls: str) -> tuple[str, ...]:
            # An argument of the program is there from the start: waiting for it can be left out.
            return tuple(dict.fromkeys(c for c in controls if c not in self.placeholders))

        self._keep_ends(call.controls)
        before = self._gate(f"{call.name}/before", call.controls) if len(call.controls) > 1 else call.controls
        again = call.marks.compute_again
        # Operations of updates are as many as the variables, and the scalars that they use are mostly the same.
        shares = FUSED_UPDATE in body.ops and not again
        scalars = self._find_scalars(body) if shares else ()
        for node in body.nodes:
            if node.name in arguments:
                continue
            controls: tuple[str, ...] = ()
            inputs = tuple([ref(r) for r in node.inputs])
            if node.controls or (node.stateful and before):
                ordered = node.stateful and not (node.op == "ReadVariableOp" and self._are_others(call, inputs[0].node))
                controls = waits(*map(control, node.controls), *(before if ordered else ()))
            scope, marks = node.scope or call.scope, node.marks
            if node.name in scalars and not controls:
                key = (body.name, node.name, inputs, scope)
                if key in self.scalars:
                    names[node.name] = self.scalars[key]
                    continue
                names[node.name] = self.scalars[key] = self._name(f"{call.name}/{node.name}")
            else:
                names[node.name] = self._name(f"{call.name}/{node.name}")
            if again:
                marks = marks.replace_marks(compute_again=True)
            self.nodes[names[node.name]] = Node(
                names[node.name], node.op, inputs, controls, node.attrs, node.outputs, scope, node.stateful, marks
            )
        stateful = [names[n.name] for n in body.nodes if n.stateful and n.name in names]
        results = tuple(ref(r) for r in body.outputs)
        for i, result in enumerate(results):
            self.moved[Ref(call.name, i)] = result
            self._keep_type(result, call.outputs[i])
        self.effects_of[call.name] = tuple(control(e) for e in body.effects)
        done = waits(*before, *stateful, *map(control, body.effects), *(r.node for r in results))
        self.done[call.name] = Node(call.name, "NoOp", (), done, scope=call.scope)
        self._note_accesses(call, [self.nodes[name] for name in stateful])

    def _find_scalars(self, body: Program) -> frozenset[str]:
        """Returns the names of the nodes of a body that yield the same number in each call with the same operands."""
        if body.name not in self.shared:
            self.shared[body.name] = frozenset([node.name for node in body.nodes if is_shared_scalar(node)])
        return self.shared[body.name]

    def _note_accesses(self, call: Node, stateful: list[Node]) -> None:
        """Notes which nodes of a body read and write which of the program's variables, if its stateful nodes do nothing
        else.
        """
        handles = self.program.variable_of
        known = [(node, [ref.node for ref in _list_handles(node)]) for node in stateful]
        if all(found and handles.keys() >= {*found} for _, found in known):
            for node, found in known:
                for handle in found:
                    reads, writes = self.accesses.setdefault((call.name, handle), ([], []))
                    (reads if node.op in READS else writes).append(node.name)

    def _are_others(self, call: Node, variable: str) -> bool:
        """Returns True if none of the nodes that a call waits for writes the program's variable ``variable``."""
        handles, nodes = self.program.variable_of, self.program.by_name
        before = [nodes[name] for name in call.controls]
        return variable in handles and all(
            node.op in READS
            or (node.op in ASSIGNS and node.inputs[0].node in handles and node.inputs[0].node != variable)
            for node in before
        )

    def _gate(self, name: str, controls: tuple[str, ...]) -> tuple[str, ...]:
        name = self._name(name)
        self.nodes[name] = Node(name, "NoOp", (), controls)
        return (name,)

    def _name(self, name: str) -> str:
        unique, n = name, 1
        while unique in self.taken:
            unique, n = f"{name}_{n}", n + 1
        self.taken.add(unique)
        return unique

    def _keep_type(self, result: Ref, wanted: TensorType) -> None:
        """Adds to a result's type the static sizes that the call's output type has but the body's does not."""
        node = self.nodes.get(result.node)
        if node is None:
            return
        own = node.outputs[result.index]
        better = _merge(own, wanted)
        if better != own:
            outputs = (*node.outputs[: result.index], better, *node.outputs[result.index + 1 :])
            self.nodes[result.node] = replace(node, outputs=outputs)

    def result(self) -> Program:
        program = self.program
        effects = dict.fromkeys(e for name in program.effects for e in self.effects_of.get(name, (name,)))
        return replace(
            program,
            nodes=sort_nodes(self.nodes),
            outputs=tuple(self.moved.get(r, r) for r in program.outputs),
            effects=tuple(effects),
        )


def _list_handles(node: Node) -> tuple[Ref, ...]:
    """Returns the handles of the variables that a node reads or writes; none if it may do anything else."""
    if node.op == FUSED_UPDATE:
        return node.inputs[: node.attrs["H"]]
    return node.inputs[:1] if node.op in READS or node.op in ASSIGNS else ()


def _merge(own: TensorType, other: TensorType) -> TensorType:
    if own.shape is None:
        return TensorType(own.dtype, other.shape)
    if other.shape is None or len(other.shape) != len(own.shape):
        return own
    return TensorType(own.dtype, tuple(b if a is None else a for a, b in zip(own.shape, other.shape)))


def specialise(program: Program) -> Program:
    """Copies functions so that no loop or branch shares a body with another; copies are named after node and attribute
    ("loop/body").

    Functions of other ops are copied once and renamed.
    """
    if not program.functions:
        return program
    functions: dict[str, Program] = {}
    source = dict(program.functions)
    kept: dict[str, str] = {}

    def copy_graph(graph: Program, prefix: str) -> Program:
        source.update(graph.functions)
        return replace(graph, nodes=tuple(copy_node(n, prefix) for n in graph.nodes), functions={})

    def own(func: Func, name: str) -> Func:
        if func.name not in source:
            return func
        functions[name] = replace(copy_graph(source[func.name], name + "/"), name=name)
        return replace(func, name=name)

    def copy_value(value: Any, name: str) -> Any:
        """Returns the attribute ``value`` with its functions renamed; copies each function once."""
        if isinstance(value, tuple):
            return tuple(copy_value(item, f"{name}{i}") for i, item in enumerate(value))
        if not isinstance(value, Func) or value.name not in source:
            return value
        if value.name not in kept:
            kept[value.name] = name
            body = source[value.name]
            functions[name] = replace(body, name=name, nodes=tuple(with_kept(n, name + "/") for n in body.nodes))
        return replace(value, name=kept[value.name])

    def with_kept(node: Node, prefix: str) -> Node:
        changes = {
            key: copy_value(node.attrs[key], f"{prefix}{node.name}/{key}") for key, _ in iterate_function_refs(node)
        }
        return replace(node, attrs={**node.attrs, **changes}) if changes else node

    def copy_node(node: Node, prefix: str) -> Node:
        changes: dict[str, object] = {}
        if node.op not in HAS_BODIES:
            return with_kept(node, prefix)
        for key, value in _function_attrs(node):
            name = f"{prefix}{node.name}/{key}"
            if isinstance(value, tuple):
                changes[key] = tuple(own(f, f"{name}{i}") for i, f in enumerate(value))
            else:
                changes[key] = own(value, name)
        return replace(node, attrs={**node.attrs, **changes}) if changes else node

    main = copy_graph(program, "")
    return replace(main, functions=functions)


def _function_attrs(node: Node) -> list[tuple[str, Func | tuple[Func, ...]]]:
    keys = ("cond", "body", "then_branch", "else_branch", "branches")
    return [(key, node.attrs[key]) for key in keys if key in node.attrs]


def _asks_for_xla(call: Node) -> bool:
    """Returns True if the called function has ``jit_compile=True``."""
    return bool(call.attrs.get(COMPILED))


def _mark_compiled(program: Program) -> Program:
    """Marks all nodes of a function's body as to be compiled by XLA; functions that it calls are left alone."""

    def mark(node: Node) -> Node:
        attrs = {**node.attrs, COMPILED: True} if _needs_xla(program, node) else node.attrs
        return replace(node, attrs=attrs, marks=node.marks.replace_marks(compiled=True))

    return program.replace_nodes(tuple(map(mark, program.nodes)))


def _list_called(program: Program, functions: Mapping[str, Program]) -> set[str]:
    """Returns the names of functions that nodes of ``program`` refer to, such as bodies of loops and branches,
    including nested ones.
    """
    found: set[str] = set()
    bodies = [program]
    while bodies:
        for _, func in iterate_calls(bodies.pop().nodes):
            if func.name in functions and func.name not in found:
                found.add(func.name)
                bodies.append(functions[func.name])
    return found


def _needs_xla(program: Program, node: Node) -> bool:
    """Returns True if a node has, or may have, no kernel on the CPU, so that it runs only if XLA compiles it."""
    channels_first = str(node.attrs.get("data_format", "")).startswith("NC")
    if node.op not in CONVOLUTIONS:
        return node.op.startswith("Xla") or ("Pool" in node.op and channels_first)
    dilated = any(rate > 1 for rate in node.attrs.get("dilations", ()))
    known = node.op.startswith("Depthwise") or _has_one_group(program, node)
    return channels_first or dilated or not known or node.outputs[0].dtype not in _CONVOLVED


def _has_one_group(program: Program, node: Node) -> bool:
    """Returns True if a convolution with the channels last is known to be ungrouped: each filter reads all channels."""
    if node.op == "Conv" or (node.op.startswith("Conv2D") and node.op.endswith("V2")):
        return False  # TensorFlow's gradient functions do not create these ops
    images, kernel = node.outputs[0], node.outputs[0]
    if "BackpropInput" not in node.op:
        images = program.find_type(node.inputs[0])
    if node.op not in FILTER_GRADIENTS:
        kernel = program.find_type(node.inputs[1])
    if images.shape is None or kernel.shape is None:
        return False
    return images.shape[-1] is not None and images.shape[-1] == kernel.shape[-2]
