"""Propagates placements: chooses the cheapest legal strategy for every node, through forward, backward and update
nodes.

It handles one mesh axis. Nodes are visited in topological order; a node's rule lists the strategies for its operands'
placements, and the cheapest alternative wins: bytes that have to move, work that would be done twice, and for a partial
sum the all-reduce it will need some day (a potential: it is credited when the sum is passed on, so that a region of
linear ops stays partial unless reducing early is cheaper). Where exactly partial sums are reduced is decided
afterwards, exactly, by ``whale.passes.propagation.partial_sums``.

Decision: 0068.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from whale.ir.layout import B, Placement, Shard, Strategy
from whale.ir.ops import BRANCHES, HAS_BODIES, LOOPS
from whale.ir.program import Node, Program, Ref
from whale.passes.analysis.rank_groups import RankGroups
from whale.passes.analysis.scopes import split_scope
from whale.passes.analysis.uses import find_leaving
from whale.passes.propagation.control_flow import branch, loop
from whale.passes.propagation.graph_layout import GraphLayout, fetch_placements
from whale.passes.propagation.graph_state import Axis, GraphState
from whale.passes.propagation.node_choice import NodeChoice
from whale.passes.propagation.per_rank import AS_ONE_DEVICE, Semantics
from whale.passes.propagation.reference_plan import ReferencePlan
from whale.passes.propagation.unmovable import NeededWhole, cannot_be_sent

NOTHING: Mapping[str, Strategy] = MappingProxyType({})
_NO_ROWS: Mapping[str, Placement] = MappingProxyType({})


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
    """Returns strategies for the program (key "") and each function body it calls.

    Args:
      parts: size of the mesh axis.
      batch: placement of the batch inputs, by input name; the others are global values. A node that is no input but
        yields rows of the batch may be among them.
      semantics: what is not global.
      local: batch inputs that come divided; the others come whole and are cut.
      fixed: strategies of nodes of the program that are decided already.
      gathered: variables that are split only to be kept so: what is read of them is gathered for who wants it whole.
      model: the plan of a program that is almost this one, which is kept to.

    Raises:
      PlanError: a tensor would have to be sent whose type cannot be sent.
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
    """Propagates once; ``whole`` are the tensors that have to be computed on every rank."""
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
    """The walk through one graph; bodies of loops and branches are walked on the way, by other objects of this class.

    Args:
      choice: for the nodes that neither are decided already nor are loops or branches.
      fixed, gathered: see ``propagate``.
      sliced: nodes that yield rows of the batch -> how these are divided.
      model: see ``propagate``.
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
        # An axis that divides no rows divides nothing outside of its scopes: what stands there is computed on every
        # rank, from activations that are whole.
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
            if given is not None and node.op in HAS_BODIES:
                current, given = list(given.inputs), None  # bodies are gone through all the same
            if given is not None:
                strategy = given
            elif statistics and (spread := per_rank.spread(node, [produced[r] for r in node.inputs])) is not None:
                strategy = spread
            elif node.op in LOOPS:
                strategy = loop(state, node, current, self._walk)
            elif node.op in BRANCHES:
                strategy = branch(state, node, current, self._walk)
            else:
                like = self.model.find_like(state.name, node) if self.model is not None else None
                strategy = self.choice.strategy(node, current, like)
            strategies[node.name] = strategy
            for i, placement in enumerate(strategy.outputs):
                produced[Ref(node.name, i)] = placement
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

    def _is_gathered(self, node: Node, given: bool) -> bool:
        """Tells whether a node yields a weight that is split between steps only, and gathered for each use or once for
        the step.
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
