"""Implements ZeRO: shards optimizer state between steps, although the computation is data-parallel.

Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020; for the time of
updates, Xu et al., "Automatic cross-replica sharding of weight update in data-parallel training", 2020.

Here ZeRO is a matter of layouts. If the state of an update is sharded, propagation finds that the gradient is wanted
sharded (a reduce-scatter instead of an all-reduce), that the update is computed on a shard, and that a replicated
weight needs the shards of all ranks (an all-gather). An update that is one op (``ResourceApplyAdam``) takes weight and
state in one layout, so such a weight is sharded as well, and gathered where it is read.

By the costs of single nodes alone, propagation would gather the state as readily as scatter the gradient. So the nodes
of an update that every rank would run redundantly get the state's layout here:

    state_at_rest       which variables are sharded between steps, and how
    update_strategies   which nodes of the updates are computed on shards

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
    """Returns the placements of the variables that ZeRO shards between steps, by handle node.

    Args:
      parts: number of ranks that share the state.
      min_bytes: smaller variables stay replicated: moving their shards takes longer than updating them.
      taken: handle nodes of variables whose layout a split scope decides.
      known: placements that earlier programs of the run have fixed, by handle node; variables updated together with one
        get the same.
      weights: whether weights are sharded as well (ZeRO-3).
      avoid: handle node -> dimensions that later axes of the mesh shard.

    Raises:
      PlanError: a weight that should be sharded cannot be.
    """
    variables = {v.node: v for v in program.variables if v.node not in taken}
    if not any(is_model(program, node) for node in program.nodes):
        return {}  # without a model (such as a program that initialises variables) it is unknown which ones are state
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
    """Returns the names of nodes from which the model or a returned tensor is computed; variables that are not among
    them are optimizer state.

    Lookups do not count as part of the model here: state may be looked up too, and state with one number per row of a
    table cannot be sharded, since ids of the whole batch need all rows.
    """
    fetched = {ref.node for ref in program.outputs}
    return leading_to(program, lambda n: n.name in fetched or (is_model(program, n) and n.op not in LOOKUPS))


def find_gathered_type(program: Program, handle: Ref, min_bytes: int) -> TensorType | None:
    """Returns the type of a variable that may be sharded as a weight and gathered where it is read; None if it is no
    floating-point variable of ``min_bytes`` or more.
    """
    variable = program.variable_of.get(handle.node)
    if variable is None or not _is_number(variable):
        return None
    t = variable.type
    return t if t.is_static and t.shape and t.bytes >= min_bytes else None


def _is_number(variable: Variable) -> bool:
    return "float" in variable.type.dtype


def _refuse_whole(uses: Mapping[str, Sequence[Use]], group: Sequence[Variable], parts: int, min_bytes: int) -> None:
    """Raises PlanError if a weight is used in a way that rules out every split of its dimensions, such as an update
    inside a loop.

    Accepted, and replicated, are weights too small to be sharded, weights without a dimension of one index or more per
    rank, and variables that steps write at indices (buffers, such as queues).

    Args:
      uses: handle node -> the nodes that use the variable.
      group: the weights that could not be sharded, which one op updates together.
    """
    for variable in group:
        t = variable.type
        cuts = [shard(d, divide_evenly(n, parts)) for d, n in enumerate(t.shape or ()) if n is not None and n >= parts]
        if not t.is_static or t.bytes < min_bytes:
            continue
        if any(use.node.op in _BY_INDEX for use in uses[variable.node]):
            continue  # a buffer, such as a queue or a bank of features, or a table with fewer columns than ranks
        for use in uses[variable.node] if cuts else ():
            if not any(_can_take(use, variable.node, cut, parts) for cut in cuts):
                node = use.node
                raise PlanError(
                    "a weight cannot be sharded between steps",
                    op=f"{node.name} ({node.op}), which uses {variable.name} {list(t.shape or ())}",
                    given="memory.zero=3",
                    expected="reads and lookups, and updates of the whole variable outside of loops",
                    action="update the variable outside of the loop, raise memory.zero_min_bytes, or set memory.zero=2",
                )


def _group_updated_together(uses: Mapping[str, Sequence[Use]]) -> Iterable[list[str]]:
    """Groups variables that one op updates together, which therefore need the same layout; every variable is in one
    group.
    """
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
    """Returns the split that all variables of a group (one op updates them together) support, along the first dimension
    that allows one; None: they stay replicated.

    Args:
      uses: handle node -> the nodes that use the variable.
      variables: the group.
      parts: number of ranks that share the state.
      min_bytes: a group without a larger variable stays replicated.
      known: handle node -> placement that an earlier program of the run has fixed.
      later: dimensions that later mesh axes shard, which are avoided: collectives along one axis then do not involve
        the other.
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
    """Returns True if an op accepts a variable, and all that it updates together with it, as ``placement``.

    An update by row owners cannot be sharded by rows here: outside of split scopes, each rank has the ids of the whole
    batch.
    """
    if use.node.marks.owned_rows and placement.dim == 0:
        return False
    lying: list[Placement] = [placement if name else B for name in use.handles]
    return all(can_take(use.graph, use.node, i, lying, parts) for i, name in enumerate(use.handles) if name == handle)


def update_strategies(
    program: Program, whole: GraphLayout, state: Mapping[str, Placement], parts: int
) -> dict[str, Strategy]:
    """Returns strategies for the nodes that compute updates of sharded state, and of the weights computed from it, by
    name.

    Args:
      whole: the layout with no state sharded and partial sums reduced. Nodes that every rank runs redundantly there can
        be computed on shards instead; if a gradient is still a partial sum there, its reduction becomes a
        reduce-scatter.
      state: handle node -> placement of each sharded variable.
    """
    return _Updates(program, whole, state, parts).run()


class _Updates:
    """Shards the nodes of updates: walks from the optimizer state to its readers, and to the producers and readers of
    these, element by element.
    """

    def __init__(self, program: Program, whole: GraphLayout, state: Mapping[str, Placement], parts: int):
        self.program, self.whole, self.state, self.parts = program, whole, state, parts
        self.chosen: dict[str, Strategy] = {}
        self.parted: dict[Ref, Placement] = {}  # tensors that are sharded, by the choices so far
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
                if node.outputs and not at_rest:  # a weight: readers in the model gather it, its update does not
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
        """Shards the producer of a tensor of which only a shard is needed, if every rank would compute all of it
        redundantly.
        """
        node = self.program.by_name[ref.node]
        if not self._is_alike(node):
            return
        wanted = [self.parted.get(r) for r in node.list_refs()]
        current = [self.parted.get(r, B) for r in node.inputs]
        option = self._option(node, current, None, wanted, ref.index)
        if option is not None:
            self._take(node, option)

    def _reader(self, node: Node, operand: int) -> None:
        """Shards a node that reads shards; a sum over a sharded tensor becomes a partial sum."""
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
        """Returns the first strategy that the node's rule allows for a given placement of one tensor; None if there is
        none.

        Args:
          current: placements of the operands.
          operand: number of the operand that must keep its placement in ``current``; None: ``output`` must get its
            placement in ``wanted``.
          wanted: placements of the results; None: any will do.
          output: number of a result.
        """
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
        """Returns True if every rank would run the node redundantly on whole tensors, and no strategy was chosen for it
        yet.

        Random tensors are left out: of a shard, each rank would draw other numbers than one device. So are the ends of
        lists, whose elements lie as loops leave them, and cannot be sent.
        """
        strategy, rule = self.whole.strategies[node.name], find_rule(node.op)
        lists = (t.dtype == "variant" for t in (*map(self.program.find_type, node.inputs), *node.outputs))
        return (
            node.name not in self.chosen
            and not (rule is not None and rule.local_stream)
            and bool(node.inputs)
            and not node.stateful
            and node.op not in HAS_BODIES
            and not any(lists)
            and all(isinstance(p, Replicate) for p in strategy.inputs + strategy.outputs)
        )
