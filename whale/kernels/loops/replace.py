"""Replaces loops of known length, in one rank's program, by few operations.

Keras' recurrent layers, ``tf.nn.dynamic_rnn``, ``tf.map_fn`` and loops that users write run dozens of small operations
in each iteration, and as many for the gradient. No layer is recognised. In any loop whose number of iterations is
known, values that iterations do not change are computed before the loop; a matrix product that no later iteration needs
becomes one product over the rows of all iterations; TensorLists become rows of one tensor; and the rest of an iteration
becomes the text of one operation, WhaleLoop.

Decision: 0167.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from cost_model.kernels.loop_counts import evaluate, find_function, find_turns
from whale.ir.ops import LOOPS
from whale.ir.program import Node, Program, Ref, find_called_functions, remove_unread, rewire
from whale.ir.values import DType, TensorType
from whale.kernels.loops.rewrite import LoopRewrite
from whale.kernels.loops.stacked import GraphNodes
from whale.kernels.loops.turns import (
    MOST_TURNS,
    ZEROS,
    Item,
    Items,
    Made,
    NotFollowed,
    Whole,
    change_list,
    find_root,
    follow_turns,
    is_zero,
    makes_list,
    require_sizes,
)
from whale.kernels.xla import find_compiled


class _Refused(Exception):
    """Raised if some loops cannot be replaced after all; the graph is then processed again without them."""

    def __init__(self, loops: set[str]) -> None:
        super().__init__(f"WhaleLoop cannot replace the loops {', '.join(sorted(loops))}")
        self.loops = loops


def replace_loops(program: Program) -> Program:
    """Replaces the loops of one rank's program and of its functions that have a known length and can be expressed by
    WhaleLoop; others stay.
    """
    if not program.functions:
        return program
    compiled = find_compiled(program)
    main = _replace_in_graph(program, program.functions)
    functions = dict(program.functions)
    for name in find_called_functions(main.nodes, functions):
        if name not in compiled:
            functions[name] = _replace_in_graph(functions[name], program.functions)
    return replace(main, functions=find_called_functions(main.nodes, functions))


def _replace_in_graph(graph: Program, functions: Mapping[str, Program]) -> Program:
    if not any(node.op in LOOPS for node in graph.nodes):
        return graph
    refused: set[str] = set()
    while True:
        try:
            return _Replacement(graph, functions, refused).run()
        except _Refused as error:
            refused |= error.loops


class _Replacement:
    """Replaces the loops of one graph, except those in ``refused``."""

    def __init__(self, graph: Program, functions: Mapping[str, Program], refused: set[str]) -> None:
        self.graph, self.functions, self.refused = graph, functions, refused
        self.g = GraphNodes(graph)
        self.loops: dict[str, LoopRewrite] = {}
        self.numbers: dict[Ref, int] = {}
        self.lists: dict[Ref, Items] = {}
        self.gone: set[Ref] = set()  # lists that no longer exist, since the loop that yields them is replaced
        self.moved: dict[Ref, Ref] = {}

    def run(self) -> Program:
        turns = find_turns(self.graph, self.functions, {})
        for node in self.graph.nodes:
            evaluate(node, self.numbers)
            if node.op in LOOPS:
                if node.name in turns:
                    self._follow_loop(node, turns[node.name].count)
            elif makes_list(self.graph, node):
                self._follow_list(node)
        if not self.loops:
            return self.graph
        for node in reversed(self.graph.nodes):  # readers first: they tell which results of a loop are needed
            self._replace(node)
        return self._assemble()

    def _follow_loop(self, node: Node, count: int) -> None:
        condition, body = (find_function(node, key, self.functions) for key in ("cond", "body"))
        if node.name in self.refused or body is None or condition is None or not 1 <= count <= MOST_TURNS:
            return
        if any(one.stateful and one.op != "Placeholder" for one in condition.nodes):
            return
        lists = {i: self.lists[ref] for i, ref in enumerate(node.inputs) if ref in self.lists}
        numbers = {i: self.numbers[ref] for i, ref in enumerate(node.inputs) if ref in self.numbers}
        try:
            turns = follow_turns(node.name, body, count, lists, numbers)
            rewrite = LoopRewrite(self.graph, node, body, turns, self.g.add_for(node), self.loops)
            fetched = {ref.index for ref in self.graph.outputs if ref.node == node.name}
            rewrite.prepare(
                k for k in range(len(node.outputs)) if k in fetched or self.graph.consumers.get(Ref(node.name, k))
            )
        except NotFollowed:
            return
        if not all(node.outputs[i].is_static for i in rewrite.states):  # its iterations change a size
            return
        self.loops[node.name] = rewrite
        for k, items in turns.lists.items():
            self.lists[Ref(node.name, k)] = items
        for k, value in turns.last.items():
            self.numbers[Ref(node.name, k)] = value
        self.gone.update(Ref(node.name, k) for k, t in enumerate(node.outputs) if t.dtype == "variant")

    def _follow_list(self, node: Node) -> None:
        def item_of(ref: Ref) -> Item:
            ref = find_root(self.graph, ref)
            if ref in self.numbers:
                return self.numbers[ref]
            return ZEROS if is_zero(self.graph, ref) else Whole(ref)

        try:
            made, taken = change_list(self.graph, node, self.lists, self.numbers, item_of)
        except NotFollowed:
            return
        if made is not None:
            self.lists[Ref(node.name)] = made
            if not self.gone.isdisjoint(node.inputs):
                self.gone.add(Ref(node.name))
        if isinstance(taken, int):
            self.numbers[Ref(node.name, 1 if made is not None else 0)] = taken

    def _replace(self, node: Node) -> None:
        if node.name in self.loops:
            try:
                self._replace_loop(self.loops[node.name])
            except NotFollowed as error:
                raise _Refused({node.name}) from error
            return
        given = [ref for ref in node.inputs if ref in self.gone]
        fetched = {ref for ref in self.graph.outputs if ref.node == node.name and ref in self.gone}
        if not given and not fetched:
            return
        try:
            self._read_list(node, given, fetched)
        except NotFollowed as error:
            raise _Refused(self._find_makers(given or [Ref(node.name)])) from error

    def _find_makers(self, lists: list[Ref]) -> set[str]:
        found = {item.loop for ref in lists for item in self.lists.get(ref, ()) if isinstance(item, Made)}
        return found or {ref.node for ref in lists if ref.node in self.loops} or set(self.loops)

    def _read_list(self, node: Node, given: list[Ref], fetched: set[Ref]) -> None:
        """Replaces a node that reads TensorLists of replaced loops, which exist as rows of tensors only.

        A stack, length or item becomes a tensor. For any other op, and for a list that the graph returns, nodes are
        added that create the list.

        Args:
          node: the node that reads or yields such lists.
          given: those of its operands that are such lists.
          fetched: those of its results that are such lists and that the graph returns.
        """
        g = self.g.add_for(node)
        if fetched:
            self.moved.update({ref: self._make_list(g, ref) for ref in fetched})
        if Ref(node.name) in self.gone:
            return
        if node.op == "TensorListStack":
            self.moved[Ref(node.name)] = g.stack(self._settle(node.inputs[0]), _find_row_type(node.outputs[0]))
        elif node.op == "TensorListLength":
            self.moved[Ref(node.name)] = g.const(np.array(len(self._items(node.inputs[0])), np.int32))
        elif node.op == "TensorListGetItem" and node.inputs[1] in self.numbers:
            item = self._settle(node.inputs[0])[self.numbers[node.inputs[1]]]
            shape = require_sizes(node.outputs[0])
            self.moved[Ref(node.name)] = g.reshape(g.stack((item,), node.outputs[0]), shape)
        else:
            for ref in given:
                if ref not in self.moved:
                    self.moved[ref] = self._make_list(g, ref)

    def _items(self, ref: Ref) -> Items:
        if ref not in self.lists:
            raise NotFollowed("the items of a list of tensors that the graph reads are unknown")
        return self.lists[ref]

    def _settle(self, ref: Ref) -> Items:
        return tuple(
            [self.loops[item.loop].settle(item) if isinstance(item, Made) else item for item in self._items(ref)]
        )

    def _make_list(self, g: GraphNodes, ref: Ref) -> Ref:
        whole = g.stack(self._settle(ref), None)
        t = g.type_of(whole)
        shape = g.const(np.array(require_sizes(t)[1:], np.int32))
        attrs = {"element_dtype": DType(t.dtype), "shape_type": DType("int32")}
        return g.add("TensorListFromTensor", (whole, shape), "variant", (), **attrs)

    def _replace_loop(self, rewrite: LoopRewrite) -> None:
        results = rewrite.add_sums()
        results.update(rewrite.emit())
        for k, t in enumerate(rewrite.loop.outputs):
            old = Ref(rewrite.loop.name, k)
            if k in results:
                self.moved[old] = results[k]
            elif rewrite.is_passed_on(k):
                self.moved[old] = rewrite.loop.inputs[k]
            elif k in rewrite.turns.last:
                value = np.array(rewrite.turns.last[k], t.dtype)
                self.moved[old] = rewrite.g.const(value)

    def _assemble(self) -> Program:
        graph = self.graph
        for rewrite in self.loops.values():
            self.moved.update(rewrite.find_results())
        moved = {old: self._follow(new) for old, new in self.moved.items()}
        gone = {ref.node for ref in self.gone}
        waits = {name: self._find_waits(one) for name, one in self.loops.items()}
        waits.update({name: () for name in gone if name not in self.loops})
        nodes: dict[str, Node] = {}
        for node in (*graph.nodes, *self.g.nodes.values()):
            if node.name in waits:
                continue
            if any(name in waits for name in node.controls):
                controls = [other for name in node.controls for other in waits.get(name, (name,))]
                node = replace(node, controls=tuple(dict.fromkeys(controls)))
            nodes[node.name] = node
        nodes = {name: node for name, node in nodes.items() if Ref(name) not in moved or name in self.g.nodes}
        effects = tuple(dict.fromkeys(o for name in graph.effects for o in waits.get(name, (name,))))
        made = rewire(replace(graph, effects=effects), nodes, moved)
        on_lists = {node.name for node in graph.nodes if makes_list(graph, node)}
        return remove_unread(made, {*self.g.nodes, *on_lists})

    def _follow(self, ref: Ref) -> Ref:
        while ref in self.moved:
            ref = self.moved[ref]
        return ref

    def _find_waits(self, rewrite: LoopRewrite) -> tuple[str, ...]:
        """Returns the names of the nodes that take the loop's place in control inputs: nodes that waited for the loop
        wait for these.
        """
        made = (rewrite.name,) if rewrite.name in self.g.nodes else ()
        return (*made, *[name for name in rewrite.waits if name in self.g.nodes])


def _find_row_type(t: TensorType) -> TensorType | None:
    """Returns the type of a tensor's rows (without dimension 0); None if its rank is unknown or 0."""
    return TensorType(t.dtype, t.shape[1:]) if t.shape else None
