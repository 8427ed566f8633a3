"""Chooses a strategy for one node: the cheapest that its sharding rule allows, given the placements of its operands.

Decision: 0017.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType

from whale.ir.layout import FIRST, B, Partial, PerRank, Placement, Replicate, Shard, Strategy, divide_evenly, shard
from whale.ir.ops import CONTRACTIONS, FUSED_UPDATE, VIEWS
from whale.ir.program import Node, Ref
from whale.ir.values import UNMOVABLE, require_static_shape
from whale.passes.analysis.resharding_cost import LATENCY, compute_cost, count_matmul_flops, exchange_cost, move_cost
from whale.passes.propagation.graph_state import INFINITE, GraphState
from whale.passes.propagation.reference_plan import same_kind
from whale.sharding_rules import find_rule
from whale.sharding_rules.base import OpView, replicate_all
from whale.sharding_rules.embedding import Rows
from whale.sharding_rules.graph import can_take, has_variable_handle, is_list_op, make_op_view
from whale.sharding_rules.registry import LineRule

_WHOLE = frozenset({Replicate})
_MOST_IN_KEY = 4  # choices for nodes with more operands are not cached: such nodes are rarely alike
_MOST_STEPS = 4  # nodes that are followed from a result to a reader with a fixed strategy


class NodeChoice:
    """Chooses strategies for the nodes of one graph, except for nodes with fixed strategies, loops and branches."""

    def __init__(self, state: GraphState, fixed: Mapping[str, Strategy] = MappingProxyType({})):
        """Prepares the choice for one graph.

        Args:
          fixed: strategies of nodes that are decided already, by name; nodes before them prefer the placements they
            want.
        """
        self.state, self.fixed = state, fixed
        self._replicated: dict[tuple[int, int], Strategy] = {}
        self._chosen: dict[Hashable, Strategy] = {}
        self._unmovable: dict[int, tuple[bool, ...] | None] = {}

    def strategy(self, node: Node, current: Sequence[Placement], like: Strategy | None = None) -> Strategy:
        """Returns the strategy of a node whose operands have the placements ``current``.

        Args:
          like: the node's strategy in a reference plan; strategies that differ from it only in sizes are preferred.
            None: there is none.

        Raises:
          NeededWhole: an operand cannot be sent to where the node needs it.
        """
        if node.marks.of_first_rank:
            return self.state.on_first_rank(node, "the first rank's value is that of all")
        if node.marks.on_first_rank:
            return self.state.on_first_rank(node, "uses an object that all ranks share")
        whole = not node.stateful and _WHOLE.issuperset(map(type, current))
        if whole and (not self._may_be_divided(node) if like is None else _is_whole(like)):
            return self.replicate(node)
        key = self._key(node) if like is None else None
        if key is None:
            return self.choose(node, current, like)
        found = self._chosen.get(key)
        if found is None:
            found = self._chosen[key] = self.choose(node, current)
        return found

    def _key(self, node: Node) -> Hashable | None:
        """Returns a cache key for the choice of a node's strategy if it depends on the node's kind and on operand
        placements only; else None.

        The gradients and updates of many variables are alike, and need the choice only once.
        """
        state = self.state
        if state.axis.whole or state.axis.groups.active:
            return None
        kind, inputs = state.program.kind_of[node.name], node.inputs
        if kind not in self._unmovable:
            self._unmovable[kind] = self._find_unmovable(node)
        unmovable = self._unmovable[kind]
        if unmovable is None or len(set(inputs)) < len(inputs):
            return None
        produced, preferred = state.layout.produced, state.layout.preferred
        key: list[object] = [kind]
        for ref, stays in zip(inputs, unmovable):
            key += (produced[ref], preferred.get(ref), stays and ref in state.remakable)
        return tuple(key)

    def _find_unmovable(self, node: Node) -> tuple[bool, ...] | None:
        """Returns, for each operand of a node, whether its dtype cannot be sent; None if the choice for nodes of its
        kind depends on more than the placements of operands.
        """
        rule = find_rule(node.op)
        if (
            rule is None
            or rule.routes is not None
            or rule.local_stream
            or rule.produces_any
            or node.op in CONTRACTIONS
            or node.marks.owned_rows
            or is_list_op(node)
            or (len(node.inputs) > _MOST_IN_KEY and node.op != FUSED_UPDATE)
        ):
            return None
        return tuple([self.state.program.find_type(ref).dtype in UNMOVABLE for ref in node.inputs])

    def replicate(self, node: Node) -> Strategy:
        """Returns the strategy that replicates a node whose operands are all replicated; notes nodes without a rule."""
        key = (len(node.inputs), len(node.outputs))
        found = self._replicated.get(key)
        if found is None:
            found = self._replicated[key] = Strategy((B,) * key[0], (B,) * key[1], "replicated")
        rule = find_rule(node.op)
        if rule is None:
            self.state.layout.unruled.append(node.name)
        elif rule.produces_any:
            self.state.remakable.update(node.list_refs())
        return found

    def choose(self, node: Node, current: Sequence[Placement], like: Strategy | None = None) -> Strategy:
        """Returns the cheapest strategy that the node's rule allows; if none is possible, the node runs on the first
        rank.

        An op without a rule is replicated, unless it is stateful. Arguments as of ``strategy``.
        """
        rule = find_rule(node.op)
        op = make_op_view(self.state.program, node, self.state.parts)
        if rule is not None and node.marks.on_every_rank:
            return replicate_all(op)
        if is_list_op(node) and FIRST not in current:
            return self._choose_for_lists(node, current)
        if any(p == FIRST and t.dtype in UNMOVABLE for p, t in zip(current, op.inputs)):
            return self.state.on_first_rank(node, "reads what only the first rank has")
        if rule is None:
            self.state.layout.unruled.append(node.name)
            # An op that updates a variable must not run on the first rank only, whose copy alone would change. Its
            # operands are replicated, so that on every rank it does the same.
            anywhere = not node.stateful or node.marks.on_every_rank or has_variable_handle(self.state.program, node)
            options = [replicate_all(op)] if anywhere else []
        else:
            options = self.state.per_rank.options(rule, op, current)
            if getattr(rule, "produces_any", False):
                self.state.remakable.update(node.list_refs())
        options = self._leave_whole(node, options)
        if not options:
            why = "runs once" if rule is not None else f"stateful, and no rule for {node.op}"
            return self.state.on_first_rank(node, why)
        touched = sum(t.bytes for t in op.inputs) + sum(t.bytes for t in node.outputs)
        flops = count_matmul_flops(node, op.inputs)
        if rule is not None and like is None and not node.stateful:
            options = [*options, *self._leave_whole(node, self._split_by_rows(rule, op, current, options))]
            if rule.routes is not None:
                exchanging = self._leave_whole(node, self._exchange_rows(rule, rule.routes, op, current))
                options += [o for o in exchanging if o not in options]
                if not rule.routes.table_type(op).is_static:
                    # The table's shape is unknown, and so are the bytes of the others, which move the whole table.
                    options = [o for o in options if rule.is_exchanging_rows(op, o)] or options
        if like is not None:
            divided = self._divide_product(node, rule, op) if flops else []
            if rule is not None:
                divided += rule.strategies(op, _as_in(like, op, current))
            options = [o for o in (*options, *self._leave_whole(node, divided)) if same_kind(o, like)] or options
        elif flops:
            # Prefer strategies that divide matrix products, as scopes ask for: by cost alone a small product would
            # be replicated, if computing its gradient twice is cheaper than moving it.
            divided = self._leave_whole(node, self._divide_product(node, rule, op))
            options = [o for o in options if _divides(o)] or divided or options
        best, best_cost = None, INFINITE
        for option in options:
            cost = self.cost(node, option, touched, flops)
            if rule is not None:
                cost += exchange_cost(rule.count_exchanged_bytes(op, option), self.state.parts, bool(node.outputs))
            if cost < best_cost:
                best, best_cost = option, cost
        if best is None:
            return self.state.on_first_rank(node, "no placement that its operands can be brought to")
        return best

    def _leave_whole(self, node: Node, options: Iterable[Strategy]) -> list[Strategy]:
        """Returns those of a node's strategies that replicate the results that must be replicated (``Axis.whole``)."""
        if not self.state.axis.whole:
            return list(options)
        whole = [i for i, ref in enumerate(node.list_refs()) if self.state.is_whole(ref)]
        return [o for o in options if all(o.outputs[i] == B for i in whole)]

    def _may_be_divided(self, node: Node) -> bool:
        """Returns True if a node with replicated operands should be sharded all the same: a product of tensors computed
        from the batch, or random rows.
        """
        if self.state.per_rank.draws(node):
            return True
        if self.state.origins.keys().isdisjoint(node.inputs):
            return False
        return count_matmul_flops(node, [self.state.program.find_type(r) for r in node.inputs]) > 0

    def _split_by_rows(
        self, rule: LineRule, op: OpView, current: Sequence[Placement], options: Sequence[Strategy]
    ) -> list[Strategy]:
        """Returns strategies that reshard an operand from another dimension to rows.

        Such operands come from split scopes: an all-to-all to rows moves less than an all-gather. Nothing is added for
        an operand that an option takes as it is without yielding partial sums.
        """
        found: dict[Strategy, None] = {}
        for i, (p, t) in enumerate(zip(current, op.inputs)):
            if type(p) is not Shard or not p.dim or not t.is_static or t.dtype in UNMOVABLE:
                continue
            if any(o.inputs[i] == p and Partial not in map(type, o.outputs) for o in options):
                continue
            cut = self._rows_cut(require_static_shape(t)[0])
            if cut.smallest:
                found.update((o, None) for o in rule.strategies(op, [*current[:i], cut, *current[i + 1 :]]))
        return [o for o in found if o not in options]

    def _exchange_rows(
        self, rule: LineRule, rows: Rows, op: OpView, current: Sequence[Placement]
    ) -> dict[Strategy, None]:
        """Returns strategies that exchange rows of an embedding table by their ids, besides those for the operands' own
        placements.

        Replicated ids are sharded as other readers of the ids want them, as readers want the looked-up rows, or as the
        batch. If the result is the table itself, it gets the placements in which it is wanted.
        """
        found: dict[Strategy, None] = {}
        ids = op.inputs[rows.ids]
        if not ids.is_static or not ids.shape:
            return found
        wanted, cuts = self._find_wanted(op), {current[rows.ids]: None}
        if isinstance(current[rows.ids], Replicate):
            strategies = self.state.layout.strategies
            for reader, i in self.state.program.consumers.get(op.node.inputs[rows.ids], ()):
                if reader.name in strategies:
                    cuts[strategies[reader.name].inputs[i]] = None
            cuts.update(wanted if rows.values is None else {})
            if (even := self._rows_cut(ids.shape[0] or 0)).smallest:
                cuts[even] = None
        for cut in cuts:
            lie = [*current[: rows.ids], cut, *current[rows.ids + 1 :]]
            for result in wanted if rows.table is None else (None,):
                found.update((o, None) for o in rule.strategies(op, lie, (result,)) if rule.is_exchanging_rows(op, o))
        return found

    def _find_wanted(self, op: OpView) -> dict[Placement, None]:
        """Returns the placements in which nodes with fixed strategies want the node's result, also through views and
        elementwise arithmetic, and the batch's placement if the result has the batch's rows.
        """
        found = self._find_wanted_by_readers(Ref(op.node.name))
        shape = op.outputs[0].shape or ()
        at = next((i for i, n in enumerate(shape) if n != 1), 0)  # skip leading dimensions of size 1
        rows = self.state.axis.rows.get(shape[at] or 0) if shape else None
        return found if rows is None else {**found, shard(at, rows.sizes, rows.blocks): None}

    def _find_wanted_by_readers(self, ref: Ref, steps: int = _MOST_STEPS) -> dict[Placement, None]:
        found: dict[Placement, None] = {}
        t = self.state.program.find_type(ref)
        for reader, i in self.state.program.consumers.get(ref, ()):
            if reader.name in self.fixed:
                found[self.fixed[reader.name].inputs[i]] = None
                continue
            view, alike = reader.op in VIEWS and i == 0, len(reader.outputs) == 1 and reader.outputs[0] == t
            if not steps or not t.shape or not (view or (alike and not reader.stateful)):
                continue
            for p in self._find_wanted_by_readers(Ref(reader.name), steps - 1):
                if type(p) is not Shard or p.dim != 0 or not p.extent or (t.shape[0] or 0) % p.extent:
                    continue
                if view:  # a reshape merges or splits leading dimensions: scale the sizes
                    found[shard(0, tuple(n * (t.shape[0] or 0) // p.extent for n in p.sizes), p.blocks)] = None
                elif can_take(self.state.program, reader, i, [p if k == i else B for k in range(len(reader.inputs))],
                              self.state.parts):  # fmt: skip
                    found[p] = None
        return found

    def _rows_cut(self, rows: int) -> Shard:
        """Shards ``rows`` rows in proportion to the batch if one number is a multiple of the other; else evenly."""
        for s in self.state.axis.rows.values():
            more, less = (rows // s.extent, 1) if rows >= s.extent > 0 else (1, max(1, s.extent // max(rows, 1)))
            if rows * less == s.extent * more and not any(n % less for n in s.sizes):
                return shard(0, tuple(n * more // less for n in s.sizes), s.blocks)
        return shard(0, divide_evenly(rows, self.state.parts))

    def _divide_product(self, node: Node, rule: LineRule | None, op: OpView) -> list[Strategy]:
        """Returns strategies that shard a matrix product with replicated operands, of which some were computed from the
        batch: they are sliced like the tensors they were computed from.
        """
        found: dict[Strategy, None] = {}
        for i, (ref, t) in enumerate(zip(node.inputs, op.inputs)):
            if rule is None or ref not in self.state.origins or not t.is_static:
                continue
            for dim, size in enumerate(require_static_shape(t)):
                cut = self._cut_as(self.state.origins[ref], dim, size)
                current: list[Placement] = [B] * len(op.inputs)
                current[i] = cut
                found.update((o, None) for o in rule.strategies(op, current) if _divides(o))
        return list(found)

    def _cut_as(self, origins: Iterable[Shard], dim: int, size: int) -> Shard:
        """Returns a split of dimension ``dim`` like that of the tensors ``origins`` the operand was computed from.

        In order of preference: as the same dimension was split, by a multiple of the batch's rows in runs, as another
        dimension of the same size was split, evenly.
        """
        alike = sorted((s for s in origins if s.extent == size), key=lambda s: s.dim != dim)
        if alike and alike[0].dim == dim:
            return shard(dim, alike[0].sizes, alike[0].blocks)
        for s in self.state.axis.rows.values():
            if s.blocks > 1 and s.dim == dim and s.extent and size % s.extent == 0:
                return shard(dim, tuple(n * size // s.extent for n in s.sizes), s.blocks)
        return (
            shard(dim, alike[0].sizes, alike[0].blocks) if alike else shard(dim, divide_evenly(size, self.state.parts))
        )

    def _choose_for_lists(self, node: Node, current: Sequence[Placement]) -> Strategy:
        """Returns the strategy of a node that passes on, zeroes or adds TensorLists: the same placement for all
        operands and results.
        """
        if all(r in self.state.remakable for r in node.inputs):
            self.state.remakable.update(node.list_refs())
        made = {p for r, p in zip(node.inputs, current) if r not in self.state.remakable} or set(current)
        wanted = next(iter(made)) if len(made) == 1 and not any(map(self.state.is_whole, node.list_refs())) else B
        for ref in node.inputs:
            self.state.need(ref, wanted, node)
        return Strategy(
            (wanted,) * len(node.inputs), (wanted,) * len(node.outputs), "lists keep their elements in place"
        )

    def cost(self, node: Node, option: Strategy, touched: int, flops: int) -> float:
        """Returns the cost of a strategy: the work of the busiest rank, the operands' reshards, and the all-reduce that
        partial results will need.

        The all-reduce of an operand that stays partial is credited, since it was counted at its producer. Of a single
        row it costs less than to gather that row: else a batch of one row would be gathered where larger ones are
        summed, and in micro-batches loops and branches cannot gather.

        Args:
          touched: bytes of operands and results.
          flops: FLOPs of the node, if it is a product; else 0.
        """
        cost = compute_cost(option, touched, flops)
        counted: set[tuple[Ref, Placement]] = set()
        for ref, wanted in zip(node.inputs, option.inputs):
            if (ref, wanted) in counted:
                continue
            counted.add((ref, wanted))
            cost += self.state.reshard_cost(ref, wanted)
            source = self.state.layout.produced[ref]
            kept = type(self.state.layout.preferred.get(ref)) is PerRank
            if type(wanted) is Partial and type(source) is Partial and not kept:
                cost -= self._potential(self.state.program.find_type(ref).bytes, source)
        single = any(type(p) is Shard and p.extent == 1 for p in option.inputs)
        for out, placement in zip(node.outputs, option.outputs):
            if type(placement) is Partial:
                potential = self._potential(out.bytes, placement)
                cost += min(potential, LATENCY) if single else potential
        return cost

    def _potential(self, tensor_bytes: int, placement: Placement) -> float:
        return move_cost(placement, B, max(1, tensor_bytes), self.state.parts)


def _as_in(like: Strategy, op: OpView, current: Sequence[Placement]) -> list[Placement]:
    """Returns the operand placements of the reference strategy ``like`` where they fit the operands' sizes, the current
    placements elsewhere.
    """
    found = list(current)
    for i, (p, t) in enumerate(zip(like.inputs, op.inputs)):
        if type(p) is not Shard or (t.shape is not None and p.dim < len(t.shape) and t.shape[p.dim] == p.extent):
            found[i] = p
    return found


def _is_whole(option: Strategy) -> bool:
    return all(type(p) is Replicate for p in option.inputs + option.outputs)


def _divides(option: Strategy) -> bool:
    return any(type(p) is Shard for p in option.inputs + option.outputs)
