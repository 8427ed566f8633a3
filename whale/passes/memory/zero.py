"""ZeRO: splits the optimizer's state between steps, although the computation is data parallel.

Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020; for the update's
time, Xu et al., "Automatic cross-replica sharding of weight update in data-parallel training", 2020. Here it is a
matter of layouts: where the state of an update is split, propagation finds that the gradient is wanted split (a
reduce-scatter in place of an all-reduce), that the update is computed on a part, and that a replicated weight
takes the parts of all ranks (an all-gather). An update that is one op (``ResourceApplyAdam``) takes its weight and
its state in one layout, so such a weight is split as well, and is gathered where it is read.

Left to the costs of single nodes, propagation would gather the state as readily as it scatters the gradient. So the
nodes of an update that every rank would run alike, whole, get the state's layout here.

    state_at_rest       which variables are split, and how
    update_strategies   which nodes of the updates are computed in parts

Decision: 0031.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType

from whale.errors import PlanError
from whale.ir.layout import B, Partial, Placement, Replicate, Shard, Strategy, divide_evenly, shard
from whale.ir.ops import HAS_BODIES, LOOKUPS, SCATTERS
from whale.ir.program import Node, Program, Ref, Variable
from whale.ir.values import UNMOVABLE, TensorType
from whale.passes.analysis.uses import is_model, leading_to, only_state
from whale.passes.propagation.graph_layout import GraphLayout
from whale.sharding_rules import find_rule
from whale.sharding_rules.graph import Use, can_take, iterate_variable_uses, make_op_view

_BY_INDEX = SCATTERS | {"ResourceStridedSliceAssign"}


def state_at_rest(
    program: Program,
    parts: int,
    min_bytes: int,
    taken: Collection[str],
    known: Mapping[str, Placement],
    weights: bool = False,
    avoid: Mapping[str, frozenset[int]] = MappingProxyType({}),
) -> dict[str, Shard]:
    """Returns the placements of the variables that are split between steps, by handle node.

    Args:
      parts: ranks that share the state.
      min_bytes: variables below that size stay whole: moving their parts takes longer than updating them.
      taken: variables whose layout something else decides.
      known: placements that earlier programs of the run have fixed; what is updated with one is placed like it.
      weights: whether the variables that a model reads are split as well.
      avoid: dimensions of variables along which later axes of the mesh divide them.

    Raises:
      PlanError: a weight that is to be split cannot be.
    """
    variables = {v.node: v for v in program.variables if v.node not in taken}
    if not any(is_model(program, node) for node in program.nodes):
        return {}  # a run that sets variables to their first values, say: it does not show which ones are state
    state = only_state(program)
    found: dict[str, Shard] = {}
    uses: dict[str, list[Use]] = {name: [] for name in variables}
    for use in iterate_variable_uses(program):
        for name in {name for name in use.handles if name in variables}:
            uses[name].append(use)
    for group in _group_updated_together(uses):
        if all(name in known for name in group):
            continue
        is_weight = weights and all(_is_number(variables[name]) for name in group)
        if not is_weight and not any(name not in known and name in state for name in group):
            continue
        if all(n.op == "VarIsInitializedOp" for name in group for n, _ in program.consumers.get(Ref(name), ())):
            continue
        later = {dim for name in group for dim in avoid.get(name, ())}
        placement = _common(uses, [variables[name] for name in group], parts, min_bytes, known, later)
        if placement is not None:
            found.update((name, placement) for name in group if name not in known)
        elif is_weight and not later:
            read = _read_by_layers(program)
            of_layers = [variables[name] for name in group if name not in known and name in read]
            _refuse_whole(uses, of_layers, parts, min_bytes)
    return found


def _read_by_layers(program: Program) -> set[str]:
    """Returns the nodes from which a layer or a fetched tensor is computed; all others are optimizer state.

    State may be looked up too: a number for each row of a table has no other dimension, and ids of the whole batch need
    all.
    """
    fetched = {ref.node for ref in program.outputs}
    return leading_to(program, lambda n: n.name in fetched or (is_model(program, n) and n.op not in LOOKUPS))


def find_gathered_type(program: Program, handle: Ref, min_bytes: int) -> TensorType | None:
    """Returns the type of a variable that may be split as a weight and gathered where it is read; None if it may
    not.
    """
    variable = program.variable_of.get(handle.node)
    if variable is None or not _is_number(variable):
        return None
    t = variable.type
    return t if t.is_static and t.shape and t.bytes >= min_bytes else None


def _is_number(variable: Variable) -> bool:
    return "float" in variable.type.dtype


def _refuse_whole(uses: Mapping[str, Sequence[Use]], group: Sequence[Variable], parts: int, min_bytes: int) -> None:
    """Raises PlanError for a weight with a divisible dimension that is used in a way that does not allow splitting
    it; buffers, which steps write at indices, stay whole.
    """
    for variable in group:
        t = variable.type
        cuts = [shard(d, divide_evenly(n, parts)) for d, n in enumerate(t.shape or ()) if n is not None and n >= parts]
        if not t.is_static or t.bytes < min_bytes:
            continue
        if any(use.node.op in _BY_INDEX for use in uses[variable.node]):
            continue  # a buffer, as a queue or a bank of features, or a table too narrow for a column on each rank
        for use in uses[variable.node] if cuts else ():
            if not any(_can_take(use, variable.node, cut, parts) for cut in cuts):
                node = use.node
                raise PlanError(
                    "a weight cannot be sharded between steps",
                    op=f"{node.name} ({node.op}), which uses {variable.name} {list(t.shape or ())}",
                    given="memory.zero=3",
                    expected="reads and lookups, and updates of the whole variable outside of loops",
                    action="update the variable behind the loop, raise memory.zero_min_bytes, or set memory.zero=2",
                )


def _group_updated_together(uses: Mapping[str, Sequence[Use]]) -> Iterable[list[str]]:
    """Groups variables that one op updates, and which therefore need one layout."""
    group_of = {name: [name] for name in uses}
    for use in chain.from_iterable(uses.values()):
        handles = [name for name in use.handles if name in uses]
        for other in handles[1:]:
            first, second = group_of[handles[0]], group_of[other]
            if first is not second:
                first += second
                group_of.update((name, first) for name in second)
    return {id(group): group for group in group_of.values()}.values()


def _common(
    uses: Mapping[str, Sequence[Use]],
    variables: list[Variable],
    parts: int,
    min_bytes: int,
    known: Mapping[str, Placement],
    later: Collection[int],
) -> Shard | None:
    """Returns the split that all variables support, along the first dimension that allows one; None: they stay
    replicated.

    Dimensions that ``later`` axes divide are avoided: collectives along one axis then do not involve the other.
    """
    given = {known[v.node] for v in variables if v.node in known}
    if len(given) > 1 or B in given:
        return None
    types = [v.type for v in variables]
    if any(not t.is_static or t.dtype in UNMOVABLE or t.shape != types[0].shape for t in types):
        return None
    if not given and max(t.bytes for t in types) < min_bytes:
        return None
    shape = types[0].shape or ()
    cuts = [
        shard(dim, divide_evenly(size, parts)) for dim, size in enumerate(shape) if size is not None and size >= parts
    ]
    for cut in cuts:
        if cut.dim in later:
            continue
        if given <= {cut} and all(_can_take(use, v.node, cut, parts) for v in variables for use in uses[v.node]):
            return cut
    return None


def _can_take(use: Use, handle: str, placement: Shard, parts: int) -> bool:
    """Tells whether an op can take a variable, and all that it updates together with it, as ``placement``.

    Rows go to where a table has them under split scopes alone: here ids are those of the whole batch.
    """
    if use.node.marks.owned_rows and placement.dim == 0:
        return False
    lying: list[Placement] = [placement if name else B for name in use.handles]
    return all(can_take(use.graph, use.node, i, lying, parts) for i, name in enumerate(use.handles) if name == handle)


def update_strategies(
    program: Program, whole: GraphLayout, state: Mapping[str, Placement], parts: int
) -> dict[str, Strategy]:
    """Returns strategies for the nodes that compute updates of split state, and of the weights that come of it.

    Args:
      whole: the layout when no state is split, partial sums reduced: what every rank computes alike there is
        what can be computed in parts instead; where a gradient is still a partial sum, its reduction scatters it.
      state: handle node -> placement.
    """
    return _Updates(program, whole, state, parts).run()


class _Updates:
    """Walks from the optimizer state to its producers and readers, element by element."""

    def __init__(self, program: Program, whole: GraphLayout, state: Mapping[str, Placement], parts: int):
        self.program, self.whole, self.state, self.parts = program, whole, state, parts
        self.chosen: dict[str, Strategy] = {}
        self.parted: dict[Ref, Placement] = {}  # tensors of which each rank has a part
        self.waiting: list[Ref] = []

    def run(self) -> dict[str, Strategy]:
        state = only_state(self.program)
        for handle in self.state:
            at_rest = handle in state
            for node, operand in self.program.consumers.get(Ref(handle), ()):
                current = [self.state.get(r.node, B) for r in node.inputs]
                option = self._option(node, current, operand)
                if option is None:
                    continue
                if node.outputs and not at_rest:  # a weight: who uses it in the model gathers it, its update does not
                    value = Ref(node.name)
                    self.parted[value] = option.outputs[0]
                    for reader, position in self.program.consumers.get(value, ()):
                        if reader.name in state:
                            self._reader(reader, position)
                else:
                    self._take(node, option)
        while self.waiting:
            ref = self.waiting.pop()
            self._maker(ref)
            for reader, operand in self.program.consumers.get(ref, ()):
                self._reader(reader, operand)
        return self.chosen

    def _maker(self, ref: Ref) -> None:
        """Makes the producer of a tensor compute only a part, where every rank would compute all of it redundantly."""
        node = self.program.by_name[ref.node]
        if not self._is_alike(node):
            return
        wanted = [self.parted.get(r) for r in node.list_refs()]
        current = [self.parted.get(r, B) for r in node.inputs]
        option = self._option(node, current, None, wanted, ref.index)
        if option is not None:
            self._take(node, option)

    def _reader(self, node: Node, operand: int) -> None:
        """Splits nodes that read only parts, and turns their sums into partial sums."""
        if not node.outputs or not self._is_alike(node):
            return
        option = self._option(node, [self.parted.get(r, B) for r in node.inputs], operand)
        if option is not None and all(isinstance(p, Shard | Partial) for p in option.outputs):
            self._take(node, option)

    def _take(self, node: Node, option: Strategy) -> None:
        self.chosen[node.name] = option
        for ref, placement in zip((*node.inputs, *node.list_refs()), option.inputs + option.outputs):
            if isinstance(placement, Shard) and ref not in self.parted and ref.node not in self.state:
                self.parted[ref] = placement
                self.waiting.append(ref)

    def _option(
        self,
        node: Node,
        current: list[Placement],
        operand: int | None,
        wanted: Sequence[Placement | None] = (),
        output: int = 0,
    ) -> Strategy | None:
        """Returns the first strategy of the node that has the operand, or the output, in the wanted placement."""
        rule = find_rule(node.op)
        if rule is None:
            return None
        for option in rule.strategies(make_op_view(self.program, node, self.parts), current, wanted):
            if operand is not None and option.inputs[operand] == current[operand]:
                return option
            if operand is None and option.outputs[output] == wanted[output]:
                return option
        return None

    def _is_alike(self, node: Node) -> bool:
        """Tells whether every rank would run the node redundantly on whole tensors, and no strategy was chosen for it
        yet.

        Random tensors stay whole: of a part each rank would draw other numbers than one device.
        """
        strategy, rule = self.whole.strategies[node.name], find_rule(node.op)
        return (
            node.name not in self.chosen
            and not (rule is not None and rule.local_stream)
            and bool(node.inputs)
            and not node.stateful
            and node.op not in HAS_BODIES
            and all(isinstance(p, Replicate) for p in strategy.inputs + strategy.outputs)
        )
