"""Lists the candidate strategies of the nodes and variables of split scopes.

The list starts from splits of weights and from the placements in which tensors enter the scopes. Each placement of a
tensor adds the strategies of its producer and readers that use it, and their other operands and results give more
placements, until nothing new is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from whale.ir.layout import B, Partial, Placement, Shard, Strategy, shard
from whale.ir.program import Node, Ref
from whale.ir.values import require_static_shape
from whale.passes.analysis.rank_groups import sizes_within
from whale.passes.analysis.scopes import context_of
from whale.passes.autoshard.region import SplitRegion
from whale.sharding_rules import find_rule
from whale.sharding_rules.embedding import Rows
from whale.sharding_rules.graph import can_take, make_op_view

_MOST_FORMS = 12  # candidate placements per tensor


class Candidates:
    """Collects the candidate strategies of nodes and variables, and the tensor placements that they come from.

    Attributes:
      options: node or variable handle -> (placements of operands, of results) -> the strategy.
      forms: tensor -> the placements that it may have besides being replicated.
    """

    def __init__(
        self, region: SplitRegion, sequences: Mapping[Ref, Shard], tables: Mapping[str, int],
        fixed: Mapping[str, Strategy],
    ):  # fmt: skip
        """Lists the candidates of all nodes and variables of ``region``.

        Args:
          sequences: wanted placements of activations between products (see ``whale.passes.autoshard.sequence``).
          tables: handles of embedding tables that may be whole on one rank -> the rank (see
            ``whale.passes.autoshard.tables``).
          fixed: strategies of nodes and handles that are decided: their only option.
        """
        self.region, self.sequences, self.tables = region, sequences, tables
        self.options: dict[str, dict[tuple, Strategy]] = {name: {} for name in (*region.handles, *region.nodes)}
        self.forms: dict[Ref, dict[Placement, None]] = {}
        self._around: dict[Ref, list[str]] = {}  # tensor -> the nodes of the region that produce or read it
        self._waiting: set[str] = set()  # nodes around tensors that have new candidate placements
        self._fixed = {name: fixed[name] for name in self.options if name in fixed}
        self._asked = {name: node for name, node in region.nodes.items() if name not in fixed}
        self._views = {name: make_op_view(region.program, node, region.parts) for name, node in self._asked.items()}
        self._few: set[frozenset[int]] = set()  # sets of ranks, smaller than a group, that may hold experts or a table
        self._seed()
        self._settle_fixed()
        self._spread()
        self._settle_handles()

    def keep(self, name: str, good: Callable[[Strategy], bool]) -> bool:
        """Keeps only the options of a node or handle for which ``good`` returns True; returns False, and keeps all, if
        there are none.
        """
        kept = {key: o for key, o in self.options[name].items() if good(o)}
        if kept:
            self.options[name] = kept
        return bool(kept)

    def _settle_fixed(self) -> None:
        for name, option in self._fixed.items():
            self.options[name][option.inputs, option.outputs] = option
            if (node := self.region.nodes.get(name)) is None:
                self._note(Ref(name), option.outputs[0])
                continue
            for ref, placement in zip((*node.inputs, *node.list_refs()), option.inputs + option.outputs):
                self._note(ref, placement)

    def _seed(self) -> None:
        """Adds the first candidates: splits of weights, and the placements of tensors that enter the scopes."""
        weights: dict[str, dict[frozenset[int], None]] = {}
        for reader, uses in self.region.weights.items():
            for _, handle in uses:
                weights.setdefault(handle, {})[self.region.group[reader]] = None
        for name, variable in self.region.handles.items():
            if name in self.region.known:
                given = self.region.known[name]
                if isinstance(given, Shard) and given.smallest == 0:
                    self._few.add(given.holders)
                self._note(Ref(name), given)
            # What has to be whole in any case is so in each program of the run; its readers take slices in each.
            free = name not in self.region.known or (self.region.known[name] == B and self._is_kept_whole(name))
            for group in weights.get(name, ()) if free else ():
                for dim, size in enumerate(variable.type.shape or ()):
                    if size is not None and size >= len(group):
                        self._note(Ref(name), shard(dim, sizes_within(size, group, self.region.parts)))
                    elif size is not None and size > 1 and dim == 0 and len(variable.type.shape or ()) > 2:
                        # Weights [experts, ...] with fewer experts than ranks: some ranks get one each.
                        few = shard(dim, sizes_within(size, frozenset(sorted(group)[:size]), self.region.parts))
                        self._few.add(few.holders)
                        self._note(Ref(name), few)
        for name, uses in self.region.weights.items():
            for _, handle in uses:
                if handle in self.tables and not self.region.nodes[name].marks.owned_rows:
                    self._seed_whole(self.region.nodes[name], handle)
        for name, node in self.region.nodes.items():
            if context_of(node.scope) is not None and name not in self.region.read and self.region.flops(node):
                self._seed_result(node)  # such as the heads of an attention
        for name in self.region.weights:
            if (cut := self.region.cut_of_image(name)) is not None:
                self._note(Ref(name), cut)
        for ref, cut in (*self.sequences.items(), *self.region.context.items()):
            self._note(ref, cut)
        for node in self.region.nodes.values():
            for ref in node.inputs:
                if ref.node not in self.options:
                    self._note(ref, self.region.outside.place(ref))
                    self._note(ref, self.region.outside.produced[ref])

    def _seed_whole(self, lookup: Node, handle: str) -> None:
        """Adds the candidates that place an embedding table, and the ids of ``lookup``, on the one rank that ``tables``
        names.
        """
        alone = frozenset({self.tables[handle]})
        self._few.add(alone)
        for ref, t in (
            (Ref(handle), self.region.handles[handle].type),
            (lookup.inputs[1], self.region.program.find_type(lookup.inputs[1])),
        ):
            self._note(ref, shard(0, sizes_within(require_static_shape(t)[0], alone, self.region.parts)))

    def _seed_result(self, node: Node) -> None:
        """Adds splits of a node's result along each dimension except 0: rows are divided by micro-batches already."""
        group = self.region.group[node.name]
        for dim, size in enumerate(node.outputs[0].shape or ()):
            if dim > 0 and size is not None and size >= len(group):
                self._note(Ref(node.name), shard(dim, sizes_within(size, group, self.region.parts)))

    def _note(self, ref: Ref, placement: Placement) -> None:
        """Adds a candidate placement of a tensor, and notes that the nodes around the tensor have to be asked for
        strategies with it.

        Nothing is added if the placement is known or does not fit the ranks of a scope, or if the tensor has too many
        candidates.
        """
        if not isinstance(placement, Shard | Partial):
            return
        placement = placement.without_halo if isinstance(placement, Shard) else placement
        forms = self.forms.setdefault(ref, {})
        if placement in forms or len(forms) >= _MOST_FORMS:
            return
        if isinstance(placement, Shard) and not any(self._is_within(placement, group) for group in self.region.groups):
            return
        forms[placement] = None
        self._waiting.update(self._around.get(ref, ()))

    def _is_within(self, placement: Shard, group: frozenset[int]) -> bool:
        """Returns True if ``placement`` gives a part to every rank of ``group``, and to no other rank.

        If a dimension has fewer indices than the group has ranks, such as experts, a part for some of its ranks is
        enough.
        """
        if placement.holders in self._few and placement.holders < group:
            return True
        return placement.smallest > 0 if len(group) == self.region.parts else placement.holders == group

    def _spread(self) -> None:
        """Propagates candidates until nothing is new: a tensor's placement adds strategies of the nodes around it, and
        these add placements of other tensors.
        """
        names = list(self._asked)
        asked: dict[str, set[tuple[int, Placement]]] = {name: set() for name in names}
        around = {name: [*node.inputs, *node.list_refs()] for name, node in self._asked.items()}
        for name in names:
            for ref in around[name]:
                self._around.setdefault(ref, []).append(name)
        self._waiting.update(names)
        for name in names:
            self._ask(self.region.nodes[name], None, None)
        while self._waiting:
            for name in names:
                if name not in self._waiting:
                    continue
                self._waiting.discard(name)
                node, before = self.region.nodes[name], asked[name]
                for at, ref in enumerate(around[name]):
                    for placement in list(self.forms.get(ref, ())):
                        if (at, placement) not in before:
                            before.add((at, placement))
                            self._ask(node, at, placement)
            names.reverse()

    def _ask(self, node: Node, at: int | None, placement: Placement | None) -> None:
        """Adds the strategies that a node's rule allows if one of its tensors has ``placement``.

        Args:
          at: number of the tensor, operands first, then results; None: all are replicated.
        """
        rule = find_rule(node.op)
        assert rule is not None
        current: list[Placement] = [B] * len(node.inputs)
        wanted: list[Placement | None] = []
        if at is not None and placement is not None:
            if at < len(current):
                current[at] = placement
            elif rule.local_stream or not isinstance(placement, Shard):
                return
            else:
                wanted = [*[None] * (at - len(current)), placement]
        op, options, group = self._views[node.name], self.options[node.name], self.region.group[node.name]
        found = rule.strategies(op, current, wanted)
        if rule.routes and at is not None and placement is not None:
            for more, results in self._pairs(node, rule.routes, at, placement):
                found += rule.strategies(op, more, results)
        for option in found:
            key = (option.inputs, option.outputs)
            if key in options:
                continue
            if any(not self._is_within(p, group) for p in key[0] + key[1] if isinstance(p, Shard)):
                continue
            options[key] = option
            for ref, p in zip((*node.inputs, *node.list_refs()), option.inputs + option.outputs):
                if isinstance(p, Shard) or ref.node == node.name:
                    self._note(ref, p)

    def _pairs(
        self, node: Node, rows: Rows, at: int, placement: Placement
    ) -> Iterator[tuple[list[Placement], list[Placement | None]]]:
        """Yields pairs of placements that let a lookup or update exchange rows between ranks: a table (or rows) and ids
        that are both sharded.

        Each pair combines ``placement`` with one candidate placement of the other tensor.

        Args:
          node: the lookup or update.
          rows: which operands of the node are table, ids and rows.
          at: number of the tensor that has got ``placement``: operands first, then results.

        Yields:
          (placements of the operands, placements of the results or None where any will do), for the node's rule.
        """
        around, result = [*node.inputs, *node.list_refs()], len(node.inputs)
        table, belong = (result if i is None else i for i in (rows.table, rows.values))
        for other in (rows.ids, belong) if at == table else (table,):
            if other >= len(around) or other == at:
                continue
            for form in self.forms.get(around[other], ()):
                lie: list[Placement | None] = [None] * len(around)
                lie[at], lie[other] = placement, form
                yield [p or B for p in lie[:result]], lie[result:]

    def _settle_handles(self) -> None:
        """Gives each variable the placements that all its readers and writers can use, and drops the readers' options
        with others.
        """
        for name in self.region.handles:
            if name in self._fixed:
                continue
            ref = Ref(name)
            given = self.region.known.get(name)
            candidates: list[Placement] = [given] if given is not None else [B]
            if given is None and self.region.at_rest:
                candidates += [p for p in self.forms.get(ref, ()) if self._can_all_take(ref, p)]
            for p in candidates:
                self.options[name][(), (p,)] = Strategy((), (p,), "split scope: a variable")
            for reader, i in self.region.program.consumers.get(ref, ()):
                if reader.name in self.region.nodes:
                    self.keep(reader.name, lambda o, i=i, c=candidates: o.inputs[i] in c)  # type: ignore[misc]

    def _can_all_take(self, handle: Ref, placement: Placement) -> bool:
        for node, i in self.region.program.consumers.get(handle, ()):
            if node.name in self.region.nodes:
                if not any(o.inputs[i] == placement for o in self.options[node.name].values()):
                    return False
            elif not self._can_take(node, i, placement):
                return False
        return True

    def _can_take(self, node: Node, operand: int, placement: Placement) -> bool:
        current: list[Placement] = [B] * len(node.inputs)
        current[operand] = placement
        return can_take(self.region.program, node, operand, current, self.region.parts)

    def _is_kept_whole(self, handle: str) -> bool:
        """Returns True if a node outside the scopes, such as a branch that updates the variable, takes no split of
        it.
        """
        everyone = frozenset(range(self.region.parts))
        sizes = enumerate(self.region.handles[handle].type.shape or ())
        cuts = [shard(dim, sizes_within(size, everyone, self.region.parts)) for dim, size in sizes if size]
        outside = self.region.program.consumers.get(Ref(handle), ())
        return any(
            node.name not in self.region.nodes and not any(self._can_take(node, i, cut) for cut in cuts)
            for node, i in outside
        )
