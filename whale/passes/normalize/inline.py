"""Replaces function calls by the bodies of the functions; loops and conditionals stay."""

from __future__ import annotations

from dataclasses import replace

from whale.errors import ProgramError
from whale.ir.ops import CALLS
from whale.ir.program import Node, Program, Ref, iterate_function_refs, sort_nodes
from whale.ir.values import TensorType
from whale.passes.normalize.compiled import asks_for_xla, list_called, mark_compiled


def inline(program: Program) -> Program:
    """Replaces every call in ``program`` (of a micro-batch as well) by its function's nodes.

    A body's nodes are called ``call/inner``. Nodes that waited for the call wait for all effects of the body; nodes
    that the call waited for precede the body's stateful nodes. Bodies of While, If and Case are inlined inside. A
    function that asks for XLA compilation is inlined as well; nodes that need XLA are marked (see
    whale.passes.normalize.compiled).

    Raises:
      ProgramError: a call calls itself, or its function is not in the program.
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
            for node in pending.pop().nodes:
                for _, func in iterate_function_refs(node):
                    if func.name in program.functions and func.name not in kept:
                        kept[func.name] = self._function(func.name, node)
                        pending.append(kept[func.name])
        return replace(flat, functions={n: mark_compiled(f) if n in self.compiled else f for n, f in kept.items()})

    def _function(self, name: str, call: Node) -> Program:
        """Returns the function ``name`` after inlining the calls in its body."""
        if name in self.active:
            raise ProgramError(
                "a function calls itself",
                op=call.name,
                given=" -> ".join([*self.active, name]),
                action="write the recursion as a tf.while_loop",
            )
        if name not in self.done:
            if name not in self.program.functions:
                raise ProgramError(
                    "a call refers to a function that the program does not have",
                    op=call.name,
                    given=name,
                    action="capture the program again together with its functions",
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
                if asks_for_xla(node):
                    self.compiled |= list_called(body, self.program.functions)
                    body = mark_compiled(body)
                splice.call(node, body)
            else:
                splice.keep(node)
        return splice.result()


class _Splice:
    """The nodes of one program while its calls are being replaced."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes: dict[str, Node] = {}
        self.taken = set(program.by_name)
        self.moved: dict[Ref, Ref] = {}
        self.effects_of: dict[str, tuple[str, ...]] = {}
        self.awaited = {c for n in program.nodes for c in n.controls}
        self.placeholders = {n.name for n in program.nodes if n.op == "Placeholder"}

    def keep(self, node: Node) -> None:
        """Adds a node that is not a call, with operands renamed to the inlined nodes."""
        if self.moved:
            inputs = tuple([self.moved.get(r, r) for r in node.inputs])
            if inputs != node.inputs:
                node = replace(node, inputs=inputs)
        self.nodes[node.name] = node

    def call(self, call: Node, body: Program) -> None:
        """Puts the body's nodes in place of ``call``.

        Raises:
          ProgramError: the call does not fit the function.
        """
        given = tuple(self.moved.get(r, r) for r in call.inputs)
        if len(given) != len(body.inputs):
            raise ProgramError(
                "a call passes another number of arguments than its function takes",
                op=call.name,
                given=len(given),
                expected=f"{len(body.inputs)} for {body.name}",
                action="capture the program again",
            )
        arguments = dict(zip(body.inputs, given))
        names = {n.name: self._name(f"{call.name}/{n.name}") for n in body.nodes if n.name not in arguments}

        def ref(inner: Ref) -> Ref:
            return arguments[inner.node] if inner.node in arguments else Ref(names[inner.node], inner.index)

        def control(inner: str) -> str:
            return arguments[inner].node if inner in arguments else names[inner]

        def waits(*controls: str) -> tuple[str, ...]:
            # Waiting for an argument of the program is waiting for nothing.
            return tuple(dict.fromkeys(c for c in controls if c not in self.placeholders))

        before = self._gate(f"{call.name}/before", call.controls) if len(call.controls) > 1 else call.controls
        stateful = [names[n.name] for n in body.nodes if n.stateful and n.name in names]
        again = call.marks.compute_again
        for node in body.nodes:
            if node.name in arguments:
                continue
            controls: tuple[str, ...] = ()
            if node.controls or (node.stateful and before):
                controls = waits(*map(control, node.controls), *(before if node.stateful else ()))
            self.nodes[names[node.name]] = replace(
                node,
                name=names[node.name],
                inputs=tuple([ref(r) for r in node.inputs]),
                controls=controls,
                marks=node.marks.replace_marks(compute_again=True) if again else node.marks,
                scope=node.scope or call.scope,
            )
        results = tuple(ref(r) for r in body.outputs)
        for i, result in enumerate(results):
            self.moved[Ref(call.name, i)] = result
            self._keep_type(result, call.outputs[i])
        self.effects_of[call.name] = tuple(control(e) for e in body.effects)
        if call.name in self.awaited:
            done = waits(*before, *stateful, *map(control, body.effects), *(r.node for r in results))
            self.nodes[call.name] = Node(call.name, "NoOp", (), done, scope=call.scope)

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
        """Keeps static sizes that are known from the call's output types, but not from the body."""
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


def _merge(own: TensorType, other: TensorType) -> TensorType:
    if own.shape is None:
        return TensorType(own.dtype, other.shape)
    if other.shape is None or len(other.shape) != len(own.shape):
        return own
    return TensorType(own.dtype, tuple(b if a is None else a for a, b in zip(own.shape, other.shape)))
