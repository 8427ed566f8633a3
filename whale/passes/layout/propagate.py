"""Propagation: a strategy for every node, cheapest legal choice, forward, backward and update in one go.

One mesh axis. Nodes are visited in topological order; a node's rule lists what it may do given where its operands lie,
and the cheapest alternative wins: bytes that have to move, work that would be done twice, and for a partial sum the
all-reduce it will need some day (a potential: it is credited when the sum is passed on, so that a region of linear ops
stays partial unless reducing early is cheaper). Where exactly partial sums are reduced is decided afterwards, exactly,
by ``whale.passes.layout.partial_sums``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from whale.errors import PlanError
from whale.ir.layout import (
    FIRST,
    B,
    Broadcast,
    FirstRank,
    Partial,
    PerRank,
    Placement,
    Split,
    Strategy,
    even_sizes,
    split,
)
from whale.ir.ops import BRANCHES, LOOPS
from whale.ir.program import Node, Program, Ref
from whale.ir.values import UNMOVABLE, Func, static_shape
from whale.passes.facts.cost import change_cost, compute_cost, matmul_flops, move_cost
from whale.passes.facts.rank_groups import RowGroups
from whale.passes.layout.control_flow_placements import at_next_turn, behind_branches
from whale.passes.layout.graph_layout import GraphLayout
from whale.passes.layout.per_rank import AS_ONE_DEVICE, OwnRows, Semantics
from whale.passes.layout.unmovable import NeededWhole, cannot_be_sent
from whale.rules import rule_of
from whale.rules.base import OpView, replicated
from whale.rules.graph import USE, called_functions, handles_lists, holds_variable, view
from whale.rules.registry import LineRule

_INFINITE = float("inf")
NOTHING: Mapping[str, Strategy] = MappingProxyType({})
_MOST_ORIGINS = 4  # layouts that are remembered of what a whole tensor was made from


def propagate(
    program: Program,
    parts: int,
    batch: Mapping[str, Placement],
    semantics: Semantics = AS_ONE_DEVICE,
    local: Collection[str] = (),
    fixed: Mapping[str, Strategy] = NOTHING,
    gathered: Collection[str] = (),
) -> dict[str, GraphLayout]:
    """Strategies for the program (key "") and each function body it calls.

    Args:
      parts: size of the mesh axis.
      batch: placement of the batch inputs, by input name; the others are global values. A node that is no input but
        yields rows of the batch may be among them.
      semantics: what is not global.
      local: batch inputs that come divided; the others come whole and are cut.
      fixed: strategies of nodes of the program that are decided already.
      gathered: variables that lie split only to be kept so: what is read of them is gathered for who wants it whole.

    Raises:
      PlanError: a tensor that cannot be sent would have to be.
    """
    whole: set[tuple[str, Ref]] = set()
    while True:
        try:
            return _propagate(program, parts, batch, semantics, local, whole, fixed, gathered)
        except NeededWhole as needed:
            if needed.refs <= whole:
                raise cannot_be_sent(needed) from None
            whole |= needed.refs


def _propagate(
    program: Program,
    parts: int,
    batch: Mapping[str, Placement],
    semantics: Semantics,
    local: Collection[str],
    whole: set[tuple[str, Ref]],
    fixed: Mapping[str, Strategy],
    gathered: Collection[str],
) -> dict[str, GraphLayout]:
    """``propagate``, given which tensors have to be made whole."""
    graphs: dict[str, GraphLayout] = {}
    rows = {p.extent: p for p in batch.values() if type(p) is Split}
    groups = RowGroups(program, parts, rows)
    main = _Propagation(program, program, "", parts, graphs, whole, semantics, rows, groups, fixed, gathered)
    for name in program.inputs:
        ref = Ref(name)
        passed = batch[name] if name in local else B
        main.result.strategies[name] = Strategy((), (passed,), "input")
        main.result.produced[ref] = passed
        if name in batch and name not in local:
            main.result.preferred[ref] = batch[name]
    main.sliced = {name: placement for name, placement in batch.items() if name not in program.inputs}
    main.run()
    for ref in program.outputs:
        main.need(ref, B, program.by_name[ref.node])
    main.result.outputs = tuple(
        FIRST if main.result.produced[r] == FIRST and program.type_of(r).dtype in UNMOVABLE else B
        for r in program.outputs
    )
    graphs[""] = main.result
    return graphs


class _Propagation:
    """Propagation of one graph; bodies of loops and branches recurse."""

    def __init__(
        self,
        root: Program,
        program: Program,
        name: str,
        parts: int,
        graphs: dict[str, GraphLayout],
        whole: set[tuple[str, Ref]],
        semantics: Semantics,
        rows: Mapping[int, Split],
        groups: RowGroups,
        fixed: Mapping[str, Strategy] = NOTHING,
        gathered: Collection[str] = (),
    ):
        self.root, self.program, self.name, self.parts, self.graphs = root, program, name, parts, graphs
        self.whole, self.fixed, self.gathered = whole, fixed, gathered
        mine = semantics if name == "" else replace(semantics, statistics=None)
        self.own = OwnRows(program, parts, mine, rows, groups)
        self.result = GraphLayout()
        self.remakable: set[Ref] = set()  # tensors that may take any placement for nothing
        self.origins: dict[Ref, tuple[Split, ...]] = {}  # whole tensors made from divided ones: how these lay
        self.sliced: Mapping[str, Placement] = {}  # nodes that yield rows of the batch
        self._replicated: dict[tuple[int, int], Strategy] = {}

    # -- driver

    def run(self) -> None:
        produced, preferred = self.result.produced, self.result.preferred
        strategies = self.result.strategies
        for node in self.program.nodes:
            if node.name in strategies:
                continue
            current = [preferred.get(r) or produced[r] for r in node.inputs]
            if self.own.groups.active:
                current = [self.own.groups.placed(node.scope, p) for p in current]
            if (given := self.fixed.get(node.name)) is not None:
                strategy = given
            elif (spread := self.own.spread(node, [produced[r] for r in node.inputs])) is not None:
                strategy = spread
            elif node.op in LOOPS:
                strategy = self._loop(node, current)
            elif node.op in BRANCHES:
                strategy = self._branch(node, current)
            elif not node.stateful and all(type(p) is Broadcast for p in current) and not self._may_be_divided(node):
                strategy = self._all_broadcast(node)
            else:
                strategy = self._choose(node, current)
            strategies[node.name] = strategy
            for i, placement in enumerate(strategy.outputs):
                produced[Ref(node.name, i)] = placement
            self._track_batch(node, strategy, current)
            if node.name in self.sliced and strategy.outputs == (B,):
                preferred[Ref(node.name)] = self.sliced[node.name]
            if given is None:
                preferred.update(self.own.kept(node, strategy))
            if self.gathered and self._is_gathered(node, given is not None):
                preferred[Ref(node.name)] = B

    def _is_gathered(self, node: Node, given: bool) -> bool:
        """Whether it yields a weight that lies split only to be kept so, to who uses it: each use, or the one read."""
        if node.op == "Identity":
            return USE in node.attrs and type(self.result.strategies[node.name].outputs[0]) is Split
        if given or node.op != "ReadVariableOp" or node.inputs[0].node not in self.gathered:
            return False
        return not any(USE in reader.attrs for reader, _ in self.program.consumers.get(Ref(node.name), ()))

    def _all_broadcast(self, node: Node) -> Strategy:
        key = (len(node.inputs), len(node.outputs))
        found = self._replicated.get(key)
        if found is None:
            found = self._replicated[key] = Strategy((B,) * key[0], (B,) * key[1], "replicated")
        if rule_of(node.op) is None:
            self.result.unruled.append(node.name)
        elif getattr(rule_of(node.op), "produces_any", False):
            self.remakable.update(node.refs())
        return found

    # -- one node

    def _choose(self, node: Node, current: Sequence[Placement]) -> Strategy:
        rule = rule_of(node.op)
        op = view(self.program, node, self.parts)
        if handles_lists(node) and FIRST not in current:
            return self._of_lists(node, current)
        if any(p == FIRST and t.dtype in UNMOVABLE for p, t in zip(current, op.inputs)):
            return self._owner(node, "reads what only the first rank has")
        if rule is None:
            self.result.unruled.append(node.name)
            # Run once, an op that changes a variable would change the first rank's only; its operands are whole, so
            # run everywhere it does the same on all ranks.
            options = [replicated(op)] if not node.stateful or holds_variable(self.program, node) else []
        else:
            options = self.own.options(rule, op, current)
            if getattr(rule, "produces_any", False):
                self.remakable.update(node.refs())
        if self.whole and any(self._is_whole(r) for r in node.refs()):
            options = [
                o for o in options if not any(self._is_whole(r) and p != B for r, p in zip(node.refs(), o.outputs))
            ]
        if not options:
            why = "runs once" if rule is not None else f"stateful, and no rule for {node.op}"
            return self._owner(node, why)
        touched = sum(t.bytes for t in op.inputs) + sum(t.bytes for t in node.outputs)
        flops = matmul_flops(node, op.inputs)
        if flops:
            # Dividing the products is what the scopes ask for; a small one must not be computed on every rank
            # because its gradient would be cheaper to make twice than to move.
            options = [o for o in options if _divides(o)] or self._divided(node, rule, op) or options
        best, best_cost = None, _INFINITE
        for option in options:
            cost = self._cost(node, option, touched, flops)
            if cost < best_cost:
                best, best_cost = option, cost
        if best is None:
            return self._owner(node, "no placement that its operands can be brought to")
        return best

    def _may_be_divided(self, node: Node) -> bool:
        """Whether it is divided for its own sake: a product of something made from the batch, random rows."""
        if self.own.draws(node):
            return True
        if not any(r in self.origins for r in node.inputs):
            return False
        return matmul_flops(node, [self.program.type_of(r) for r in node.inputs]) > 0

    def _divided(self, node: Node, rule: LineRule | None, op: OpView) -> list[Strategy]:
        """Ways to divide a product whose operands are whole or partial, but made from the batch."""
        found: dict[Strategy, None] = {}
        for i, (ref, t) in enumerate(zip(node.inputs, op.inputs)):
            if rule is None or ref not in self.origins or not t.is_static:
                continue
            for dim, size in enumerate(static_shape(t)):
                as_before = next((s for s in self.origins[ref] if s.extent == size), None)
                cut = (
                    split(dim, as_before.sizes, as_before.blocks)
                    if as_before
                    else split(dim, even_sizes(size, self.parts))
                )
                current: list[Placement] = [B] * len(op.inputs)
                current[i] = cut
                found.update((o, None) for o in rule.strategies(op, current) if _divides(o))
        return list(found)

    def _of_lists(self, node: Node, current: Sequence[Placement]) -> Strategy:
        """Lists passed on, zeroed or added element by element: one placement for operands and result."""
        if all(r in self.remakable for r in node.inputs):
            self.remakable.update(node.refs())
        made = {p for r, p in zip(node.inputs, current) if r not in self.remakable} or set(current)
        wanted = next(iter(made)) if len(made) == 1 and not any(map(self._is_whole, node.refs())) else B
        for ref in node.inputs:
            self.need(ref, wanted, node)
        return Strategy(
            (wanted,) * len(node.inputs), (wanted,) * len(node.outputs), "lists keep their elements in place"
        )

    def _cost(self, node: Node, option: Strategy, touched: int, flops: int) -> float:
        cost = compute_cost(option, touched, flops)
        counted: set[tuple[Ref, Placement]] = set()
        for ref, wanted in zip(node.inputs, option.inputs):
            if (ref, wanted) in counted:
                continue
            counted.add((ref, wanted))
            cost += self.reshard_cost(ref, wanted)
            source = self.result.produced[ref]
            kept = type(self.result.preferred.get(ref)) is PerRank
            if type(wanted) is Partial and type(source) is Partial and not kept:
                cost -= self._potential(self.program.type_of(ref).bytes, source)
        for out, placement in zip(node.outputs, option.outputs):
            if type(placement) is Partial:
                cost += self._potential(out.bytes, placement)
        return cost

    def _potential(self, tensor_bytes: int, placement: Placement) -> float:
        return move_cost(placement, B, max(1, tensor_bytes), self.parts)

    def reshard_cost(self, ref: Ref, wanted: Placement) -> float:
        """Cost of having ``ref`` as ``wanted``; infinite when it cannot be had."""
        source = self.result.produced[ref]
        if source == wanted or self.result.preferred.get(ref) == wanted:
            return 0.0
        tensor = self.program.type_of(ref)
        if tensor.dtype in UNMOVABLE:
            free = ref in self.remakable or (source == B and wanted == FIRST)
            return 0.0 if free else _INFINITE
        return change_cost(tensor, source, wanted, self.parts)

    def _is_whole(self, ref: Ref) -> bool:
        return (self.name, ref) in self.whole

    def need(self, ref: Ref, wanted: Placement, reader: Node, also: Sequence[tuple[str, Ref]] = ()) -> None:
        """Raises NeededWhole when ``ref`` cannot be sent, lies otherwise than ``wanted`` and cannot be made anew."""
        source, t = self.result.produced[ref], self.program.type_of(ref)
        if source in (wanted, FIRST) or t.dtype not in UNMOVABLE or ref in self.remakable:
            return
        raise NeededWhole({(self.name, ref), *also}, reader, f"{ref} is {t}, laid out {source}")

    def _owner(self, node: Node, why: str) -> Strategy:
        """On the first rank only. Operands come broadcast: the others need not have them, but collectives are joint."""
        for ref in node.inputs:
            if self.result.produced[ref] != FIRST:
                self.need(ref, B, node)
        inputs = tuple(FIRST if self.result.produced[r] == FIRST else B for r in node.inputs)
        return Strategy(inputs, (FIRST,) * len(node.outputs), why, once=True)

    def _track_batch(self, node: Node, chosen: Strategy, current: Sequence[Placement]) -> None:
        """Slice again after ops that had to see everything: correct whatever the dimension means, and free.

        Not only right behind such an op: two halves of the batch that are joined again, or the rows that a loop
        stacked, are the batch once more.
        """
        found: dict[Split, None] = {}
        summed = any(type(p) is Partial for p in chosen.outputs)
        for ref, placement, wanted in zip(node.inputs, current, chosen.inputs):
            if type(placement) is Split and (wanted != placement or summed):
                found[placement] = None
            if type(wanted) is not Split:
                found.update(dict.fromkeys(self.origins.get(ref, ())))
        if not found:
            return
        splits = tuple(found)[:_MOST_ORIGINS]
        for ref, out, placement in zip(node.refs(), node.outputs, chosen.outputs):
            if type(placement) is Split:
                continue
            if type(placement) is Broadcast:
                self.origins[ref] = splits
            if out.dtype in UNMOVABLE or not out.is_static or not out.shape:
                continue
            for s in splits:
                dims = [d for d in (s.dim, 0) if d < len(out.shape) and out.shape[d] == s.extent]
                if dims and type(placement) is Partial:
                    self.origins[ref] = splits  # rows that were added into the batch's rows
                elif dims:
                    self.result.preferred[ref] = split(dims[0], s.sizes, s.blocks)
                if dims:
                    break

    # -- loops and branches

    def body(self, name: str, arguments: Sequence[Placement], remakable: Sequence[bool]) -> _Propagation:
        program = self.root.functions[name]
        inner = _Propagation(
            self.root, program, name, self.parts, self.graphs, self.whole, self.own.semantics, self.own.rows,
            self.own.groups,
        )  # fmt: skip
        for argument, placement, free in zip(program.inputs, arguments, remakable):
            ref = Ref(argument)
            inner.result.strategies[argument] = Strategy((), (placement,), "argument")
            inner.result.produced[ref] = placement
            if free:
                inner.remakable.add(ref)
        inner.run()
        return inner

    def _loop(self, node: Node, current: Sequence[Placement]) -> Strategy:
        """Fixpoint: the placement of each loop variable that its initial value can take and its body keeps."""
        body, cond = node.attrs["body"], node.attrs["cond"]
        assert isinstance(body, Func) and isinstance(cond, Func)
        if any(p == FIRST for p, r in zip(current, node.inputs) if self.program.type_of(r).dtype in UNMOVABLE):
            return self._owner(node, "a loop over what only the first rank has")
        state = [B if type(p) in (FirstRank, PerRank) else p for p in current]
        free = [r in self.remakable for r in node.inputs]
        types = [self.program.type_of(r) for r in node.inputs]
        function = self.root.functions[body.name]
        names = [
            ((self.name, Ref(node.name, i)), (body.name, Ref(function.inputs[i])), (body.name, function.outputs[i]))
            for i in range(len(state))
        ]
        locked = [any(n in self.whole for n in of_one) for of_one in names]
        for i, ref in enumerate(node.inputs):
            if locked[i]:
                self.need(ref, B, node)
                state[i] = B
        for _ in range(2 * len(state) + 3):
            inner = self.body(body.name, state, free)
            outs = [inner.result.place(r) for r in function.outputs]
            joined = [
                s if lock else at_next_turn(s, o, t.dtype, f)
                for s, o, t, f, lock in zip(state, outs, types, free, locked)
            ]
            if joined == state:
                break
            for i, (old, new) in enumerate(zip(state, joined)):
                if old != new and old != B:  # it changed before: B is where a contradiction ends
                    joined[i] = B if types[i].dtype not in UNMOVABLE else new
                    locked[i] = True
            state = joined
        else:
            raise PlanError(
                "the layouts of a loop's variables do not settle",
                op=f"{node.name} ({node.op})",
                given=", ".join(map(str, state)),
                expected="a placement that the body keeps",
                action="report the program; `WHALE_DUMP=dir` writes it",
            )
        for ref, placement, of_one in zip(function.outputs, state, names):
            inner.need(ref, placement, node, of_one)
        inner.result.outputs = tuple(state)
        self.graphs[body.name] = inner.result
        condition = self.body(cond.name, state, free)
        condition.result.outputs = (B,)
        self.graphs[cond.name] = condition.result
        return Strategy(tuple(state), tuple(state), "loop")

    def _branch(self, node: Node, current: Sequence[Placement]) -> Strategy:
        functions = [f.name for f in called_functions(node)]
        arguments = [B if type(p) in (FirstRank, PerRank) else p for p in current[1:]]
        if any(p == FIRST and self.program.type_of(r).dtype in UNMOVABLE for p, r in zip(current, node.inputs)):
            return self._owner(node, "a branch over what only the first rank has")
        free = [r in self.remakable for r in node.inputs[1:]]
        for i, ref in enumerate(node.inputs[1:]):
            if any((name, Ref(self.root.functions[name].inputs[i])) in self.whole for name in functions):
                self.need(ref, B, node)
                arguments[i] = B
        inner = [self.body(name, arguments, free) for name in functions]
        outputs: list[Placement] = []
        for i, out in enumerate(node.outputs):
            options = [b.result.place(self.root.functions[n].outputs[i]) for b, n in zip(inner, functions)]
            outputs.append(B if self._is_whole(Ref(node.name, i)) else behind_branches(options, out.dtype))
            for branch, name in zip(inner, functions):
                also = (self.name, Ref(node.name, i))
                branch.need(self.root.functions[name].outputs[i], outputs[i], node, (also,))
        for branch, name in zip(inner, functions):
            branch.result.outputs = tuple(outputs)
            self.graphs[name] = branch.result
        return Strategy((B, *arguments), tuple(outputs), "branch")


def _divides(option: Strategy) -> bool:
    return any(type(p) is Split for p in option.inputs + option.outputs)
