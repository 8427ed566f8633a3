"""Propagates placements along one mesh axis: chooses the cheapest legal strategy for every node of forward, backward
and update.

Nodes are visited in topological order. A node's sharding rule lists strategies for its operands' placements, and the
cheapest one wins. Its cost is the bytes that have to move, the work that would be done twice, and for a partial sum the
all-reduce that it will need some day. This last part is a potential: it is credited when the sum is passed on, so that
a region of linear ops stays partial unless reducing early is cheaper. Where exactly partial sums are reduced is decided
afterwards by ``whale.passes.propagation.partial_sums``.

Bodies of loops and branches are propagated where they are called. A loop variable has one placement in every iteration,
found as a fixpoint; a result of a branch has one placement that all alternatives can yield. Everything is repeated
until batch statistics are consistent: per rank in both forward and backward pass, or global in both
(``settle_layouts``).

Decision: 0068.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from whale.errors import REPORT_FAULT, PlanError
from whale.ir.layout import FIRST, LEGEND, B, Partial, PerRank, Placement, RankZero, Replicate, Shard, Strategy
from whale.ir.ops import BRANCHES, HAS_BODIES, LOOPS
from whale.ir.program import Node, Program, Ref, find_called_functions
from whale.ir.values import UNMOVABLE, Func, TensorType
from whale.passes.analysis.rank_groups import RankGroups
from whale.passes.analysis.scopes import split_scope
from whale.passes.analysis.uses import find_leaving
from whale.passes.propagation.graph_layout import GraphLayout, fetch_placements
from whale.passes.propagation.graph_state import INFINITE, Axis, GraphState, NeededWhole, cannot_be_sent
from whale.passes.propagation.local_statistics import AS_ONE_DEVICE, Semantics, find_local_statistics, half_local
from whale.passes.propagation.node_choice import NodeChoice
from whale.passes.propagation.reference_plan import ReferencePlan
from whale.sharding_rules.graph import list_called_functions

NOTHING: Mapping[str, Strategy] = MappingProxyType({})
_NO_ROWS: Mapping[str, Placement] = MappingProxyType({})

# Propagates through a function body, given its name, the placements of its arguments, and for each argument whether it
# can be created in any placement at no cost.
Walk = Callable[[str, Sequence[Placement], Sequence[bool]], GraphState]


def propagate(
    program: Program,
    parts: int,
    batch: Mapping[str, Placement],
    semantics: Semantics = AS_ONE_DEVICE,
    local: Collection[str] = (),
    fixed: Mapping[str, Strategy] = NOTHING,
    gathered: Collection[str] = (),
    model: ReferencePlan | None = None,
) -> dict[str, GraphLayout]:
    """Finds a strategy for every node of a program, along one mesh axis.

    Args:
      parts: size of the mesh axis.
      batch: placements of the batch inputs, by name; other inputs are replicated. May contain names of nodes that are
        no inputs but yield rows of the batch.
      semantics: where results may differ from one device.
      local: names of the batch inputs of which a rank is passed its own rows; of others it is passed the whole and
        slices it.
      fixed: strategies of nodes of the program that are decided already, by name.
      gathered: handle nodes of variables that are sharded only between steps (ZeRO); readers find their value gathered.
      model: plan of a nearly equal program, whose strategies are kept where they fit; None: there is none.

    Returns:
      The layouts of the program (key "") and of each function body that it calls.

    Raises:
      PlanError: a tensor of a type that cannot be sent would have to be sent.
    """
    whole: set[tuple[str, Ref]] = set()
    while True:
        try:
            return _propagate(program, parts, batch, semantics, local, whole, fixed, gathered, model)
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
    whole: Collection[tuple[str, Ref]],
    fixed: Mapping[str, Strategy],
    gathered: Collection[str],
    model: ReferencePlan | None,
) -> dict[str, GraphLayout]:
    """Propagates placements through the program and its functions once; the other arguments are those of ``propagate``.

    Args:
      whole: the (graph, tensor) pairs that must be replicated, found by earlier rounds.

    Raises:
      NeededWhole: one more tensor must be replicated.
    """
    rows = {p.extent: p for p in batch.values() if type(p) is Shard}
    axis = Axis(program, parts, semantics, rows, RankGroups(program, parts, rows), whole, {})
    main = GraphState(axis, "")
    layout = main.layout
    for name in program.inputs:
        passed = batch[name] if name in local else B
        layout.strategies[name] = Strategy((), (passed,), "input")
        layout.produced[Ref(name)] = passed
        if name in batch and name not in local:
            layout.preferred[Ref(name)] = batch[name]
    sliced = {name: placement for name, placement in batch.items() if name not in program.inputs}
    Propagation(main, NodeChoice(main, fixed), fixed, gathered, sliced, model).run()
    for ref in program.outputs:
        main.need(ref, B, program.by_name[ref.node])
    layout.outputs = fetch_placements(program, layout.produced)
    return {**axis.layouts, "": layout}


class Propagation:
    """Walks through one graph and decides its strategies; walks bodies of loops and branches with further objects of
    this class.

    Args:
      choice: decides about nodes that have no fixed strategy and are neither loops nor branches.
      fixed, gathered, model: see ``propagate``.
      sliced: nodes that yield rows of the batch, though they are no inputs -> how these rows are sharded.
    """

    def __init__(
        self,
        state: GraphState,
        choice: NodeChoice,
        fixed: Mapping[str, Strategy] = NOTHING,
        gathered: Collection[str] = (),
        sliced: Mapping[str, Placement] = _NO_ROWS,
        model: ReferencePlan | None = None,
    ):
        self.state, self.choice, self.fixed, self.gathered, self.sliced = state, choice, fixed, gathered, sliced
        self.model = model
        # An axis that divides no rows divides nothing outside of split scopes: nodes there are computed on every rank,
        # from tensors that leave the scopes replicated.
        self.leaving = find_leaving(state.program) if not state.axis.rows and not state.name else frozenset[Ref]()

    def run(self) -> None:
        """Decides about every node that has no strategy yet, in topological order."""
        state, per_rank = self.state, self.state.per_rank
        produced, preferred, strategies = state.layout.produced, state.layout.preferred, state.layout.strategies
        known = per_rank.semantics.statistics
        statistics = known is not None and bool(known.statistic)
        for node in state.program.nodes:
            if node.name in strategies:
                continue
            current = state.find_operands(node)
            given = self.fixed.get(node.name)
            if given is None and self.model is not None:
                given = self.model.exact(state.program, state.name, node)
                if given is not None and not self._may_take(node, given):
                    given = None
            if given is not None and node.op in HAS_BODIES:
                current, given = list(given.inputs), None  # the bodies have to be propagated all the same
            if given is not None:
                strategy = given
            elif statistics and (spread := per_rank.spread(node, [produced[r] for r in node.inputs])) is not None:
                strategy = spread
            else:
                like = self.model.find_like(state.name, node) if self.model is not None else None
                if node.op in LOOPS:
                    strategy = _loop(state, node, current, self._walk, like)
                elif node.op in BRANCHES:
                    strategy = _branch(state, node, current, self._walk, like)
                else:
                    strategy = self.choice.strategy(node, current, like)
            strategies[node.name] = strategy
            produced.update(zip(node.list_refs(), strategy.outputs))
            if state.axis.rows or split_scope(node.scope):
                state.track_batch(node, strategy, current)
            if node.name in self.sliced and strategy.outputs == (B,):
                preferred[Ref(node.name)] = self.sliced[node.name]
            if given is None and statistics:
                preferred.update(per_rank.find_kept(node, strategy))
            if self.leaving:
                preferred.update((ref, B) for ref in node.list_refs() if ref in self.leaving)
            if self.gathered and self._is_gathered(node, given is not None):
                preferred[Ref(node.name)] = B

    def _may_take(self, node: Node, given: Strategy) -> bool:
        """Returns True if the operands that cannot be sent (lists) have the placements of ``given``, or can be created
        in them.

        An operation that yields no list, such as a list's length, does not show where its list lies.
        """
        return all(
            self.state.reshard_cost(ref, wanted) < INFINITE
            for ref, wanted in zip(node.inputs, given.inputs)
            if self.state.program.find_type(ref).dtype in UNMOVABLE
        )

    def _is_gathered(self, node: Node, given: bool) -> bool:
        """Returns True if readers find the result of ``node`` gathered: it yields a weight that is sharded only between
        steps.

        The weight is gathered either at one of its uses (an Identity marked ``gathered_at_use``), or where it is read,
        once for the step.

        Args:
          given: whether the node's strategy was decided before.
        """
        if node.op == "Identity":
            return node.marks.gathered_at_use and type(self.state.layout.strategies[node.name].outputs[0]) is Shard
        if given or node.op != "ReadVariableOp" or node.inputs[0].node not in self.gathered:
            return False
        return not any(
            reader.marks.gathered_at_use for reader, _ in self.state.program.consumers.get(Ref(node.name), ())
        )

    def _walk(self, name: str, arguments: Sequence[Placement], remakable: Sequence[bool]) -> GraphState:
        inner = GraphState(self.state.axis, name)
        for argument, placement, free in zip(inner.program.inputs, arguments, remakable):
            ref = Ref(argument)
            inner.layout.strategies[argument] = Strategy((), (placement,), "argument")
            inner.layout.produced[ref] = placement
            if free:
                inner.remakable.add(ref)
        Propagation(inner, NodeChoice(inner), model=self.model).run()
        return inner


def _loop(
    graph: GraphState, node: Node, current: Sequence[Placement], walk: Walk, like: Strategy | None = None
) -> Strategy:
    """Finds, as a fixpoint, the placement of each loop variable that its initial value can take and its body keeps.

    Args:
      graph: state of the graph that contains the loop.
      current: placements of the loop's operands.
      walk: propagates through a function body.
      like: the loop's strategy in a nearly equal program, whose partial variables stay partial; None: there is none.

    Raises:
      NeededWhole: a variable of a type that cannot be sent would have to be resharded.
      PlanError: the placements do not converge.
    """
    body, cond = node.attrs["body"], node.attrs["cond"]
    assert isinstance(body, Func) and isinstance(cond, Func)
    if any(p == FIRST for p, r in zip(current, node.inputs) if graph.program.find_type(r).dtype in UNMOVABLE):
        return _run_on_first_rank(graph, node)
    state = [B if type(p) in (RankZero, PerRank) else p for p in current]
    partial = _list_partial(like, len(state))
    state = [known if p == B and known is not None else p for p, known in zip(state, partial)]
    free = [r in graph.remakable for r in node.inputs]
    types = [graph.program.find_type(r) for r in node.inputs]
    function = graph.axis.root.functions[body.name]
    names = [
        ((graph.name, Ref(node.name, i)), (body.name, Ref(function.inputs[i])), (body.name, function.outputs[i]))
        for i in range(len(state))
    ]
    locked = [
        any(n in graph.axis.whole for n in of_one) or _is_resized(placement, out)
        for of_one, placement, out in zip(names, state, node.outputs)
    ]
    for i, ref in enumerate(node.inputs):
        if locked[i]:
            graph.need(ref, B, node)
            state[i] = B
    for _ in range(2 * len(state) + 3):
        inner = walk(body.name, state, free)
        outs = [inner.layout.place(r) for r in function.outputs]
        if any(type(o) is RankZero and p != o and t.dtype in UNMOVABLE for p, o, t in zip(state, outs, types)):
            return _run_on_first_rank(graph, node)
        joined = [
            s if lock or (o == B and s == known) else _join_turns(s, o, t.dtype, f)
            for s, o, t, f, lock, known in zip(state, outs, types, free, locked, partial)
        ]
        for i, (new, out) in enumerate(zip(joined, node.outputs)):
            if _is_resized(new, out):
                joined[i], locked[i] = B, True
        if joined == state:
            break
        for i, (old, new) in enumerate(zip(state, joined)):
            if old != new and old != B:  # changed for the second time: settle for replicated
                joined[i] = B if types[i].dtype not in UNMOVABLE else new
                locked[i] = True
        state = joined
    else:
        raise PlanError(
            "the layouts of a loop's variables do not converge",
            op=f"{node.name} ({node.op})",
            given=", ".join(map(str, state)),
            notation=LEGEND,
            expected="for each variable a placement that the body returns as it got it",
            action=REPORT_FAULT,
        )
    for ref, placement, of_one in zip(function.outputs, state, names):
        inner.need(ref, placement, node, of_one)
    inner.layout.outputs = tuple(state)
    graph.axis.layouts[body.name] = inner.layout
    condition = walk(cond.name, state, free)
    condition.layout.outputs = (B,)
    graph.axis.layouts[cond.name] = condition.layout
    return Strategy(tuple(state), tuple(state), "loop")


def _run_on_first_rank(graph: GraphState, node: Node) -> Strategy:
    """Returns the strategy of a loop or branch over what only the first rank has and cannot be sent.

    The functions that it runs are left out of the plan, also where they were walked before that was found.
    """
    for name in find_called_functions([node], graph.axis.root.functions):
        graph.axis.layouts.pop(name, None)
    kind = "loop" if node.op in LOOPS else "branch"
    return graph.on_first_rank(node, f"a {kind} over what only the first rank has")


def _list_partial(like: Strategy | None, count: int) -> list[Partial | None]:
    """Returns which of the ``count`` results of a loop or branch are partial in the strategy ``like``.

    A group of ranks on a mesh may hold a constant where the first group holds a partial sum. The result is partial all
    the same there, which costs nothing: a sum elsewhere, before or inside a body, would be one that the first group
    does not have.
    """
    known = like.outputs if like is not None and len(like.outputs) == count else (None,) * count
    return [p if isinstance(p, Partial) else None for p in known]


def _branch(
    graph: GraphState, node: Node, current: Sequence[Placement], walk: Walk, like: Strategy | None = None
) -> Strategy:
    """Propagates through each branch of a conditional; results get placements that all branches can yield.

    Args:
      graph, current, walk, like: as of ``_loop``; the first operand selects the branch.

    Raises:
      NeededWhole: a result that cannot be sent would have to be resharded.
    """
    root, functions = graph.axis.root, [f.name for f in list_called_functions(node)]
    arguments = [B if type(p) in (RankZero, PerRank) else p for p in current[1:]]
    if any(p == FIRST and graph.program.find_type(r).dtype in UNMOVABLE for p, r in zip(current, node.inputs)):
        return _run_on_first_rank(graph, node)
    free = [r in graph.remakable for r in node.inputs[1:]]
    for i, ref in enumerate(node.inputs[1:]):
        if any((name, Ref(root.functions[name].inputs[i])) in graph.axis.whole for name in functions):
            graph.need(ref, B, node)
            arguments[i] = B
    inner = [walk(name, arguments, free) for name in functions]
    outputs: list[Placement] = []
    for i, (out, known) in enumerate(zip(node.outputs, _list_partial(like, len(node.outputs)))):
        options = [b.layout.place(root.functions[n].outputs[i]) for b, n in zip(inner, functions)]
        keeps = all(o in (known, B) for o in options)
        found = known if known is not None and keeps else _join_branches(options, out.dtype)
        outputs.append(B if graph.is_whole(Ref(node.name, i)) else found)
        for body, name in zip(inner, functions):
            also = (graph.name, Ref(node.name, i))
            body.need(root.functions[name].outputs[i], outputs[i], node, (also,))
    for body, name in zip(inner, functions):
        body.layout.outputs = tuple(outputs)
        graph.axis.layouts[name] = body.layout
    return Strategy((B, *arguments), tuple(outputs), "branch")


def _is_resized(placement: Placement, variable: TensorType) -> bool:
    """Returns True if iterations may change the size of a loop variable in the dimension that ``placement`` divides.

    The parts have the sizes that the ranks had at first: what an iteration adds would be cut off.

    Args:
      variable: type of the loop's result, whose sizes are unknown where iterations change them.
    """
    if type(placement) is not Shard or variable.dtype in UNMOVABLE:
        return False
    return variable.shape is None or variable.shape[placement.dim] is None


def _join_turns(state: Placement, out: Placement, dtype: str, free: bool) -> Placement:
    """Returns the placement of a loop variable for the next round of the fixpoint.

    Args:
      state: the placement in which the body gets the variable in this round.
      out: the placement in which the body then returns it.
      dtype: dtype of the variable; some (lists, strings) cannot be resharded.
      free: whether the initial value can be created in any placement.
    """
    if state == out or type(out) is RankZero:
        return state
    if dtype in UNMOVABLE:
        return out if free and state == B else state
    if state == B:
        return out  # B -> S and B -> P cost nothing
    if out == B:
        return B if type(state) is Partial else state
    return state if type(state) is Shard else B


def _join_branches(options: Sequence[Placement], dtype: str) -> Placement:
    """Returns the placement of a conditional's result whose branches yield it in the placements ``options``."""
    first = options[0]
    if all(o == first for o in options):
        return B if type(first) is RankZero else first
    if dtype in UNMOVABLE:
        return next((o for o in options if o != B), B)
    splits = {o for o in options if type(o) is Shard}
    rest = {o for o in options if type(o) not in (Shard, Replicate)}
    if len(splits) == 1 and not rest:
        return next(iter(splits))
    partial = {o for o in options if type(o) is Partial}
    return (
        next(iter(partial))
        if len(partial) == 1 and not splits and all(type(o) in (Partial, Replicate) for o in options)
        else B
    )


def settle_layouts(
    program: Program,
    parts: int,
    batch: Mapping[str, Placement],
    local_statistics: bool,
    local_streams: bool,
    local: Collection[str] = (),
    fixed: Mapping[str, Strategy] = NOTHING,
    gathered: Collection[str] = (),
    model: ReferencePlan | None = None,
) -> dict[str, GraphLayout]:
    """Propagates a program, repeatedly if needed, until batch statistics are consistent between forward and backward
    pass.

    Moments that turn out to be local in one direction only (their gradient is written in another form) are taken of the
    whole batch in the next round.

    Args:
      local_statistics: batch statistics are of each coordinate's rows, where forward and backward pass allow it.
      local_streams: random tensors with the batch's rows are drawn by each coordinate.
      parts, batch, local, fixed, gathered, model: see ``propagate``.

    Returns:
      The layouts of the program (key "") and of each function body that it calls.

    Raises:
      PlanError: see ``propagate``.
    """
    whole: set[Ref] = set()
    while True:
        statistics = find_local_statistics(program, whole) if local_statistics and batch else None
        semantics = Semantics(statistics, local_streams)
        layouts = propagate(program, parts, batch, semantics, local, fixed, gathered, model)
        mixed = half_local(program, layouts[""], statistics) if statistics is not None else set()
        if not mixed:
            return layouts
        whole |= mixed
