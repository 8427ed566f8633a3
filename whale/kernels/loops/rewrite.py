"""Replaces one loop: values that iterations do not change are computed before it, products over all iterations before
or after it, and the rest becomes one operation, WhaleLoop.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from whale.ir.ops import FUSED_LOOP, IDENTITIES, MATMULS
from whale.ir.program import COMPILED, Node, Program, Ref, iterate_function_refs
from whale.ir.values import DType, Shape, TensorType, count_item_bytes, find_numpy_dtype
from whale.kernels.loops.code import (
    NEXT,
    NUMBER,
    SAME,
    SLICE,
    STACKED,
    STATE,
    SUPPORTED,
    TurnCode,
    View,
    find_tensors,
    make_number,
    make_view,
)
from whale.kernels.loops.stacked import GraphNodes, Operand, can_stack, find_steps, stack_node, sum_product
from whale.kernels.loops.turns import (
    ZEROS,
    Item,
    Items,
    Made,
    NotFollowed,
    Row,
    Turns,
    Whole,
    find_root,
    is_zero,
    makes_list,
    require_sizes,
)

_DTYPES = ("float32", "float64")
_FEW_ELEMENTS = 1 << 13  # a tensor with more is not stacked only to be summed over iterations
_ADDS = frozenset(("AddV2", "Add", "AddN"))


class _Kind(Enum):
    """Says what a tensor of a loop's body depends on, and so where it is computed: before the loop (SAME, EARLY) or in
    each iteration (TURN).

    The kind of a node is the largest kind of its operands.
    """

    SAME = 0  # the same in each iteration
    SLICE = 1  # an iteration's part of a tensor that exists before the loop
    EARLY = 2  # computed from such parts, and tensors that are the same, only
    TURN = 3  # depends on the iteration before
    OTHER = 4  # lists and counters


@dataclass
class LoopRewrite:
    """Replaces one loop of a graph.

    Attributes:
      graph: the graph that contains the loop, before anything is replaced.
      loop: the loop's node.
      body: the loop's body.
      turns: what is known of the iterations: their number, counters, and contents of lists.
      g: collects the nodes that replace the loop.
      others: the loops of the graph that are replaced, by name.
      kinds: what each tensor of the body depends on.
      same: tensors of the body that are the same in each iteration -> their values in the graph.
      early: tensors of the body that do not depend on earlier iterations -> their values in all iterations, computed
        before the loop.
      late: tensors of the body that no later iteration needs -> their values in all iterations, computed after the
        loop.
      reads: tensors of the body that are slices -> the slice of each iteration.
    """

    graph: Program
    loop: Node
    body: Program
    turns: Turns
    g: GraphNodes
    others: dict[str, LoopRewrite]
    kinds: dict[Ref, _Kind] = field(default_factory=dict)
    states: list[int] = field(default_factory=list)  # numbers of loop variables that iterations change
    sums: dict[int, Ref] = field(default_factory=dict)  # loop variable to which iterations only add -> the addend
    stacked: dict[Ref, int] = field(default_factory=dict)  # tensor of which all iterations are kept -> its number
    same: dict[Ref, Ref] = field(default_factory=dict)
    early: dict[Ref, Ref] = field(default_factory=dict)
    late: dict[Ref, Ref] = field(default_factory=dict)
    reads: dict[Ref, Items] = field(default_factory=dict)
    waits: list[str] = field(default_factory=list)  # reads of variables that were moved before the loop
    feeding: set[str] = field(default_factory=set)  # nodes that the next states depend on
    _known: dict[tuple[str, Ref], bool] = field(default_factory=dict)

    # -- analysis

    def prepare(self, needed: Iterable[int]) -> None:
        """Finds out which variables and tensors iterations change.

        Args:
          needed: numbers of the loop's results that others read.

        Raises:
          NotFollowed: WhaleLoop cannot compute the loop.
        """
        body = self.body
        for node in body.nodes:
            reads = node.op == "ReadVariableOp"
            if (node.stateful and not reads and node.op != "Placeholder") or node.attrs.get(COMPILED):
                raise NotFollowed(f"the loop runs {node.op}, which has side effects or is compiled by XLA")
            if any(True for _ in iterate_function_refs(node)):
                raise NotFollowed(f"the loop runs {node.op}, which calls functions")
        self._classify()
        self._find_states(needed)

    def _classify(self) -> None:
        body, kinds = self.body, self.kinds
        for i, name in enumerate(body.inputs):
            t = body.find_type(Ref(name))
            if find_root(body, body.outputs[i]) == Ref(name) and t.dtype != "variant":
                kinds[Ref(name)] = _Kind.SAME
            elif t.dtype == "variant" or (t.dtype not in _DTYPES and t.shape == ()):
                kinds[Ref(name)] = _Kind.OTHER
            else:
                kinds[Ref(name)] = _Kind.TURN
        for node in body.nodes:
            if node.name in body.inputs:
                continue
            if makes_list(body, node):
                for k in range(len(node.outputs)):
                    kinds[Ref(node.name, k)] = self._classify_read(Ref(node.name, k))
                continue
            kind = max([kinds[ref] for ref in node.inputs], key=lambda one: one.value, default=_Kind.SAME)
            if kind is _Kind.OTHER and node.op == "Cast" and self._counts(node.inputs[0]):
                kind = _Kind.SLICE  # a counter as a number to compute with: its values become a vector
            elif kind is _Kind.SLICE and node.op not in IDENTITIES:
                kind = _Kind.EARLY
            for k in range(len(node.outputs)):
                kinds[Ref(node.name, k)] = kind

    def _counts(self, ref: Ref) -> bool:
        return len(self.turns.numbers.get(ref, ())) == self.turns.count

    def _classify_read(self, ref: Ref) -> _Kind:
        items = self.turns.reads.get(ref)
        if items is None or len(items) != self.turns.count:
            return _Kind.OTHER
        first = items[0]
        found = {item if not isinstance(item, Made) else item._replace(turn=0) for item in items}
        if len(found) == 1 and (first == ZEROS or isinstance(first, Whole) or self._is_same_elsewhere(first)):
            return _Kind.SAME
        return _Kind.SLICE

    def _is_same_elsewhere(self, item: Item) -> bool:
        return isinstance(item, Made) and self.others[item.loop].kind_of(item.ref) is _Kind.SAME

    def kind_of(self, ref: Ref) -> _Kind:
        """Returns what a tensor of the body depends on."""
        return self.kinds[find_root(self.body, ref)]

    def is_passed_on(self, number: int) -> bool:
        """Returns True if iterations leave loop variable ``number`` unchanged."""
        return self.kinds[Ref(self.body.inputs[number])] is _Kind.SAME

    def _find_states(self, needed: Iterable[int]) -> None:
        """Decides for each loop variable that iterations change and something reads how it is computed: as a state of
        WhaleLoop (``states``), or, if iterations only add to it, as a sum after the loop (``sums``).

        Args:
          needed: numbers of the loop's results that others read.
        """
        body = self.body
        number = {Ref(name): i for i, name in enumerate(body.inputs)}
        readers: dict[int, list[Node]] = {}
        for node in body.nodes:
            for ref in node.inputs:
                root = find_root(body, ref)
                if root in number and node.op not in IDENTITIES:
                    readers.setdefault(number[root], []).append(node)
        adds: dict[int, Ref] = {}
        for i, name in enumerate(body.inputs):
            if self.kinds[Ref(name)] is not _Kind.TURN:
                continue
            root = find_root(body, body.outputs[i])
            node = body.by_name[root.node]
            mine = [k for k, ref in enumerate(node.inputs) if find_root(body, ref) == Ref(name)]
            alone = [reader.name for reader in readers.get(i, ())] == [node.name]
            if node.op in _ADDS and len(mine) == 1 and alone and len(self._readers_of(root)) == 0:
                others = [ref for k, ref in enumerate(node.inputs) if k != mine[0]]
                shape = node.outputs[0].shape
                if len(others) == 1 and body.find_type(others[0]).shape == shape == body.find_type(Ref(name)).shape:
                    adds[i] = others[0]
        wanted = {i for i in needed if self.kinds[Ref(body.inputs[i])] is _Kind.TURN}
        waiting = [i for i in wanted if i not in adds]
        self.sums = {i: ref for i, ref in adds.items() if i in wanted and self._can_sum(ref)}
        waiting += [i for i in adds if i in wanted and i not in self.sums]
        self._need_states(waiting)
        for ref in self.sums.values():
            self._need_ancestors(ref)

    def _readers_of(self, root: Ref) -> list[Node]:
        """Returns the nodes of the body that read a tensor, looking through identities."""
        found, waiting = [], [root]
        while waiting:
            ref = waiting.pop()
            for reader, _ in self.body.consumers.get(ref, ()):
                if reader.op in IDENTITIES:
                    waiting.append(Ref(reader.name))
                else:
                    found.append(reader)
        return found

    def _need_states(self, numbers: Iterable[int]) -> None:
        """Notes that WhaleLoop has to compute some loop variables: adds them to ``states``, with all variables that
        their next values depend on.

        The nodes of the body that compute these values are added to ``feeding``.

        Args:
          numbers: numbers of the loop variables.
        """
        body = self.body
        of = {name: i for i, name in enumerate(body.inputs)}
        waiting = [i for i in numbers if i not in self.states]
        while waiting:
            i = waiting.pop()
            if i in self.states:
                continue
            self.states.append(i)
            stack = [body.outputs[i].node]
            while stack:
                name = stack.pop()
                if name in self.feeding:
                    continue
                self.feeding.add(name)
                if name in of:
                    if self.kinds[Ref(name)] is _Kind.TURN:
                        waiting.append(of[name])
                    continue
                if self._is_turns_own(name):
                    stack += [ref.node for ref in body.by_name[name].inputs]
        self.states.sort()

    def _is_turns_own(self, name: str) -> bool:
        return self.kinds[Ref(name)] in (_Kind.TURN, _Kind.EARLY)

    def _can_sum(self, ref: Ref) -> bool:
        """Returns True if the sum of ``ref`` over all iterations is cheap to compute after the loop, from the stacked
        values of all iterations.

        It is if ``ref`` is a product ``transpose(a) x b`` (the sum is a single larger product), a sum or reshape of
        such products, or a small tensor.
        """
        ref = find_root(self.body, ref)
        node, t = self.body.by_name[ref.node], self.body.find_type(ref)
        if self.kinds[ref] in (_Kind.SAME, _Kind.OTHER):
            return False
        if node.op == "MatMul" and node.attrs.get("transpose_a") and not node.attrs.get("transpose_b"):
            return all(self.kind_of(one) is not _Kind.SAME for one in node.inputs)
        if node.op == "Reshape":
            return self._can_sum(node.inputs[0])
        if node.op == "AddN":
            return all(map(self._can_sum, node.inputs))
        return t.is_static and t.elements <= _FEW_ELEMENTS

    # -- tensors outside of the loop

    def argument(self, ref: Ref) -> Ref:
        """Returns the tensor that loop variable ``ref`` has before the first iteration."""
        return self.loop.inputs[self.body.inputs.index(ref.node)]

    def find_same(self, ref: Ref) -> Ref:
        """Returns the value in the graph of a tensor of the body that is the same in each iteration; adds the nodes
        that compute it.
        """
        body = self.body
        ref = find_root(body, ref)
        if ref in self.same:
            return self.same[ref]
        node = body.by_name[ref.node]
        if node.name in body.inputs:
            found = self.argument(ref)
        elif ref in self.turns.reads:
            item = self.turns.reads[ref][0]
            t = body.find_type(ref)
            if isinstance(item, Made):
                found = self.others[item.loop].find_same(item.ref)
            elif isinstance(item, Whole):
                found = item.ref
            else:
                found = self.g.zeros(t.dtype, require_sizes(t))
        else:
            inputs = tuple([self.find_same(one) for one in node.inputs])
            controls: tuple[str, ...] = ()
            name = self.g.name(node.name.rpartition("/")[2])
            if node.op == "ReadVariableOp":
                controls = self.loop.controls
                self.waits.append(name)
            self.g.keep(replace(node, name=name, inputs=inputs, controls=controls))
            for k in range(len(node.outputs)):
                self.same[Ref(node.name, k)] = Ref(name, k)
            return self.same[ref]
        self.same[ref] = found
        return found

    def items_of(self, ref: Ref) -> Items:
        """Returns what a tensor of kind SLICE is in each iteration, as rows of tensors of the graph."""
        if ref not in self.reads:
            node = self.body.by_name[ref.node]
            if node.op == "Cast":
                values = np.array(self.turns.numbers[node.inputs[0]])
                vector = self.g.const(values.astype(find_numpy_dtype(node.outputs[0].dtype)))
                self.reads[ref] = tuple([Row(vector, i) for i in range(self.turns.count)])
            else:
                self.reads[ref] = tuple([self.settle(item) for item in self.turns.reads[ref]])
        return self.reads[ref]

    def settle(self, item: Item) -> Item:
        """Returns a list item as a tensor of the graph, or a row of one. If an iteration of another replaced loop makes
        the item, it is looked up there.
        """
        if not isinstance(item, Made):
            return item
        return self.others[item.loop].item_at(item.ref, item.turn)

    def item_at(self, ref: Ref, turn: int) -> Item:
        """Returns what a tensor of the body is in iteration ``turn``, as a tensor of the graph or a row of one.

        Raises:
          NotFollowed: it is a list or a counter.
        """
        ref = find_root(self.body, ref)
        if is_zero(self.body, ref):
            return ZEROS
        kind = self.kinds[ref]
        if kind is _Kind.SAME:
            return Whole(self.find_same(ref))
        if kind is _Kind.SLICE:
            return self.items_of(ref)[turn]
        if kind is _Kind.OTHER:
            raise NotFollowed("a list of tensors contains lists or counters of the loop")
        return Row(self.find_stacked(ref), turn)

    def find_stacked(self, ref: Ref) -> Ref:
        """Returns the values of a tensor of the body in all iterations, stacked in their order: [iterations, ...].

        The tensor is computed before the loop, after it, or inside of it as a result of WhaleLoop.

        Raises:
          NotFollowed: it cannot be stacked.
        """
        ref = find_root(self.body, ref)
        node, kind = self.body.by_name[ref.node], self.kinds[ref]
        if kind is _Kind.SLICE:
            if ref not in self.early:
                self.early[ref] = self.g.stack(self.items_of(ref), self.body.find_type(ref))
            return self.early[ref]
        if kind is _Kind.EARLY and (ref in self.early or self._is_worth_it(ref)):
            return self._compute_early(ref)
        if kind is _Kind.TURN:
            self._need_ancestors(ref)  # first, since nodes that feed states must be computed inside of the loop
        if kind is _Kind.TURN and self._is_late(ref):
            if ref not in self.late:
                self.late[ref] = self._stack(node)
            return self.late[ref]
        if kind not in (_Kind.EARLY, _Kind.TURN):
            raise NotFollowed("the values of a loop counter in all iterations are needed as one tensor")
        t = self.body.find_type(ref)
        if not t.is_static or t.dtype not in (*_DTYPES, "bool"):
            raise NotFollowed(
                f"the iterations yield a tensor {t}, whose shape is unknown or whose dtype WhaleLoop cannot stack"
            )
        number = self.stacked.setdefault(ref, len(self.stacked))
        result = Ref(self.name, -1 - number)  # a placeholder: result numbers are known once all states are
        self.g.types[result] = TensorType(self.find_dtype(), (self.turns.count, *require_sizes(t)))
        return self.g.cast(result, t.dtype)

    def find_results(self) -> dict[Ref, Ref]:
        """Maps the placeholders that ``find_stacked`` has returned to the results of WhaleLoop. Their numbers are known
        only when all states are, since stacked results follow the states.
        """
        return {Ref(self.name, -1 - k): Ref(self.name, len(self.states) + k) for k in self.stacked.values()}

    def find_dtype(self) -> str:
        """Returns the dtype in which iterations compute.

        Raises:
          NotFollowed: there are several, or it is neither float32 nor float64.
        """
        types = [self.body.find_type(ref) for ref in self.kinds if self.kinds[ref] in (_Kind.TURN, _Kind.EARLY)]
        found = {t.dtype for t in types} & {*_DTYPES, "float16", "bfloat16"}
        if len(found) != 1 or not found <= set(_DTYPES):
            raise NotFollowed(
                f"the iterations compute in {', '.join(sorted(found)) or 'no floats'}, "
                "and WhaleLoop only in float32 or only in float64"
            )
        return found.pop()

    def _need_ancestors(self, ref: Ref) -> None:
        """Adds to ``states`` the loop variables that a tensor of the body is computed from and that change from one
        iteration to the next.
        """
        of = {name: i for i, name in enumerate(self.body.inputs)}
        seen: set[str] = set()
        stack, states = [ref.node], []
        while stack:
            name = stack.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in of:
                if self.kinds[Ref(name)] is _Kind.TURN:
                    states.append(of[name])
            elif self._is_turns_own(name):
                stack += [one.node for one in self.body.by_name[name].inputs]
        self._need_states(states)

    @property
    def name(self) -> str:
        """Returns the name of the operation that replaces the loop."""
        return f"{self.loop.name}/{FUSED_LOOP}"

    def _stack(self, node: Node) -> Ref:
        operands = [self._operand(ref) for ref in node.inputs]
        return stack_node(self.g, self.body, node, operands, self.turns.count)

    def _compute_early(self, ref: Ref) -> Ref:
        """Returns the values in all iterations, stacked, of a tensor that does not depend on earlier iterations; adds
        the nodes before the loop that compute them.
        """
        if ref not in self.early:
            self.early[ref] = self._stack(self.body.by_name[ref.node])
        return self.early[ref]

    def _operand(self, ref: Ref) -> Operand:
        ref = find_root(self.body, ref)
        if self.kinds[ref] is _Kind.SAME:
            return Operand(self.find_same(ref), False)
        if self.kinds[ref] is _Kind.EARLY and self._can_be_early(ref):
            return Operand(self._compute_early(ref), True)
        return Operand(self.find_stacked(ref), True)

    def _varies(self, ref: Ref) -> bool:
        return self.kind_of(ref) is not _Kind.SAME

    def _is_worth_it(self, ref: Ref) -> bool:
        """Returns True if a tensor that does not depend on earlier iterations should be computed before the loop, for
        all iterations at once: it takes a matrix product, or WhaleLoop does not support its dtype.
        """
        if not self._can_be_early(ref):
            return False
        return self._has_product(ref) or self.body.find_type(ref).dtype not in (*_DTYPES, "bool")

    def _can_be_early(self, ref: Ref) -> bool:
        ref = find_root(self.body, ref)
        node, key = self.body.by_name[ref.node], ("early", ref)
        if self.kinds[ref] is not _Kind.EARLY:
            return self.kinds[ref] is not _Kind.OTHER
        if key not in self._known:
            self._known[key] = can_stack(self.body, node, self._varies) and all(map(self._can_be_early, node.inputs))
        return self._known[key]

    def _has_product(self, ref: Ref) -> bool:
        ref = find_root(self.body, ref)
        node, key = self.body.by_name[ref.node], ("product", ref)
        if self.kinds[ref] is not _Kind.EARLY:
            return False
        if key not in self._known:
            self._known[key] = node.op in MATMULS or any(map(self._has_product, node.inputs))
        return self._known[key]

    def _is_late(self, ref: Ref) -> bool:
        """Returns True if a tensor is computed after the loop: it is a matrix product that no later iteration needs, or
        depends on one.
        """
        ref = find_root(self.body, ref)
        node = self.body.by_name[ref.node]
        if self.kinds[ref] is not _Kind.TURN or node.name in self.feeding or node.name in self.body.inputs:
            return False
        if not can_stack(self.body, node, self._varies):
            return False
        if any(self.kind_of(one) is _Kind.OTHER for one in node.inputs):
            return False
        return node.op in MATMULS or any(map(self._is_late, node.inputs))

    def _sum(self, ref: Ref) -> Ref:
        """Returns the sum of ``ref`` over all iterations, of which ``_can_sum`` is true; adds the nodes that compute
        it.
        """
        ref = find_root(self.body, ref)
        node = self.body.by_name[ref.node]
        if node.op == "MatMul":
            found = sum_product(self.g, node, [self._operand(one) for one in node.inputs])
            if found is not None:
                return found
        if node.op == "Reshape" and self._can_sum(node.inputs[0]):
            return self.g.reshape(self._sum(node.inputs[0]), require_sizes(node.outputs[0]))
        if node.op == "AddN" and all(map(self._can_sum, node.inputs)):
            total = self._sum(node.inputs[0])
            for one in node.inputs[1:]:
                total = self.g.plus(total, self._sum(one))
            return total
        summed = _find_summed_rows(self.body, node)
        if summed is not None and self.kind_of(node.inputs[0]) is not _Kind.SAME:
            whole = self.g.sum(self.find_stacked(node.inputs[0]), (0, *[axis + 1 for axis in summed]))
            return self.g.reshape(whole, require_sizes(node.outputs[0]))
        return self.g.sum(self.find_stacked(ref), (0,))

    def add_sums(self) -> dict[int, Ref]:
        """Adds the sums over iterations; returns number of a loop result -> the sum that replaces it."""
        found: dict[int, Ref] = {}
        for i, ref in self.sums.items():
            total, before = self._sum(ref), self.loop.inputs[i]
            found[i] = total if is_zero(self.graph, before) else self.g.plus(before, total)
        return found

    # -- the operation

    def emit(self) -> dict[int, Ref]:
        """Adds the operation WhaleLoop; returns number of a loop result -> the final state that replaces it.

        Raises:
          NotFollowed: WhaleLoop cannot compute something in an iteration.
        """
        if not self.states and not self.stacked:
            return {}
        body, dtype = self.body, self.find_dtype()
        slices: list[tuple[Ref, int, int]] = []
        same: list[Ref] = []

        def find_view(ref: Ref) -> View | None:
            ref = find_root(body, ref)
            t, kind = body.find_type(ref), self.kinds[ref]
            if t.dtype not in (dtype, "bool") or not t.is_static:
                raise NotFollowed(
                    f"the loop computes in {dtype}, and reads a tensor {t} of another dtype or of unknown shape"
                )
            if kind is _Kind.SAME:
                given = self.find_same(ref)
                value = body.const(ref)
                if value is None:
                    value = self._constant(given)
                if value is not None and value.size == 1:
                    return replace(make_number(float(value.reshape(()))), shape=value.shape, strides=(0,) * value.ndim)
                given = self.g.cast(given, dtype)
                if given not in same:
                    same.append(given)
                return make_view(SAME, same.index(given), t)
            if kind is _Kind.TURN and ref.node in body.inputs:
                return make_view(STATE, self.states.index(body.inputs.index(ref.node)), t)
            if kind is _Kind.SLICE or (kind is _Kind.EARLY and self._is_worth_it(ref)):
                found = find_steps(self.items_of(ref)) if kind is _Kind.SLICE else None
                whole, first, step = found or (self.find_stacked(ref), 0, 1)
                key = (self.g.cast(whole, dtype), first, step)
                if key not in slices:
                    slices.append(key)
                return make_view(SLICE, slices.index(key), t)
            return None

        code = TurnCode(body, find_view)
        goals = {i: find_root(body, body.outputs[i]) for i in self.states}
        self._write_turn(code, goals)
        lines, flops, elements = code.finish()
        states = [self.loop.inputs[i] for i in self.states]
        state_types = [self.g.type_of(ref) for ref in states]
        stacked_types = [self.g.types[ref] for ref in self.find_results()]
        packed = sum(self.g.type_of(ref).elements for ref in same)
        count = 2 * sum(t.elements for t in state_types) + elements + packed
        attrs = {
            "program": lines,
            "turns": self.turns.count,
            "first": tuple([first for _, first, _ in slices]),
            "step": tuple([step for _, _, step in slices]),
            "stacked_shapes": tuple([Shape(t.shape) for t in stacked_types]),
            "flops": flops * self.turns.count,
            "scratch_bytes": count * count_item_bytes(dtype),
            "X": len(slices),
            "W": len(same),
            "S": len(states),
            "Y": len(stacked_types),
            "T": DType(dtype),
        }
        inputs = (*[ref for ref, _, _ in slices], *same, *states)
        node = Node(self.name, FUSED_LOOP, inputs, (), attrs, (*state_types, *stacked_types), self.loop.scope)
        self.g.keep(replace(node, marks=self.loop.marks))
        return {i: Ref(self.name, k) for k, i in enumerate(self.states)}

    def _constant(self, ref: Ref) -> np.ndarray | None:
        node = self.g.nodes.get(ref.node)
        if node is None:
            return self.graph.const(ref)
        return node.attrs["value"].numpy() if node.op == "Const" else None

    def _write_turn(self, code: TurnCode, goals: dict[int, Ref]) -> None:
        body = self.body
        needed: set[str] = set()
        waiting = [*goals.values(), *self.stacked]
        while waiting:
            ref = find_root(body, waiting.pop())
            if ref.node in needed or ref.node in body.inputs:
                continue
            kind = self.kinds[ref]
            if kind is _Kind.TURN or (kind is _Kind.EARLY and not self._is_worth_it(ref)):
                needed.add(ref.node)
                waiting += find_tensors(body.by_name[ref.node])
        places = {ref: make_view(STACKED, k, body.find_type(ref)) for ref, k in self.stacked.items()}
        for i, ref in goals.items():
            places.setdefault(ref, make_view(NEXT, self.states.index(i), body.find_type(ref)))
        for node in body.nodes:
            if node.name not in needed:
                continue
            if node.op not in SUPPORTED:
                raise NotFollowed(f"WhaleLoop has no instruction for the op {node.op}")
            code.compute(node, places.get(Ref(node.name)) if len(node.outputs) == 1 else None)
        ends = [(ref, places[ref]) for ref in self.stacked]
        ends += [(ref, make_view(NEXT, self.states.index(i), body.find_type(ref))) for i, ref in goals.items()]
        for ref, to in ends:
            view = code.view(ref)
            if (view.buffer, view.number, view.first) != (to.buffer, to.number, 0):
                code.add("Copy", to, view if view.buffer == NUMBER else view.broadcast(to.shape))


def _find_summed_rows(body: Program, node: Node) -> tuple[int, ...] | None:
    """Returns the dimensions over which a node (Sum, BiasAddGrad) sums its first operand; None for other nodes."""
    rank = len(body.find_type(node.inputs[0]).shape or ()) if node.inputs else 0
    if node.op == "BiasAddGrad" and node.attrs.get("data_format", "NHWC") == "NHWC":
        return tuple(range(rank - 1))
    axes = body.const(node.inputs[1]) if node.op == "Sum" else None
    return None if axes is None else tuple(sorted({int(axis) % rank for axis in axes.reshape(-1)}))
