"""Split scopes: layouts for the nodes under ``wh.split``, and for the variables that they use.

Outside of split scopes the batch is divided, by propagation. The nodes of split scopes (forward, backward and update)
may be divided along any dimension that their rules allow. Candidates spread from where the scope's weights can be cut
and from how tensors arrive at its border; an integer program (whale.passes.layout.choose) picks one option per node so
that changes of layout cost least, and among equals more of the work is divided. Two things are not left to cost: a
weight (a variable of rank 2 or more that a product or an embedding reads) is split, and what reads it takes it split;
and every product that can be divided is.

    divide    the choice: a strategy for each node, a placement for each variable
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from whale.errors import PlanError
from whale.ir.layout import B, Broadcast, FirstRank, Partial, PerRank, Placement, Split, Strategy, split
from whale.ir.ops import HAS_BODIES
from whale.ir.program import Node, Program, Ref, Variable
from whale.ir.values import UNMOVABLE, TensorType
from whale.passes.facts.cost import LOOKUPS, change_cost, compute_cost, fraction, matmul_flops
from whale.passes.facts.rank_groups import sizes_within
from whale.passes.facts.scopes import PASSED_ON, ranks_of_scope, sequence_of, split_scope
from whale.passes.layout.choose import choose
from whale.passes.layout.graph_layout import GraphLayout
from whale.passes.layout.options import Edge
from whale.passes.layout.sequence import along_sequence, check_sequences, surcharge
from whale.rules import rule_of
from whale.rules.graph import takes, view
from whale.rules.registry import LineRule

_IMAGES = frozenset({"Conv2D", "DepthwiseConv2dNative"})  # whose rows and columns may be divided
_MOST_FORMS = 12  # candidates per tensor
_WORK = 0.01  # weight of work against movement: it decides among layouts that move the same


@dataclass(frozen=True, slots=True)
class Division:
    """What was chosen: ``strategies`` of nodes (handles of split variables included), ``variables`` that lie split."""

    strategies: Mapping[str, Strategy] = field(default_factory=dict)
    variables: Mapping[str, Placement] = field(default_factory=dict)


def has_split_scopes(program: Program) -> bool:
    """Whether anything of the program stands under ``wh.split``."""
    return any("split_" in n.scope and split_scope(n.scope) for n in program.nodes)


def divide(
    program: Program,
    outside: GraphLayout,
    parts: int,
    known: Mapping[str, Placement],
    at_rest: bool,
) -> Division:
    """Strategies for the nodes of split scopes.

    Args:
      outside: how the program lies when no scope is split: tells what arrives at the scopes' borders, and is wanted.
      known: placements of variables (by handle node) that earlier programs of the run have fixed.
      at_rest: whether variables that are not known yet may lie split between steps.

    Raises:
      PlanError: nothing under a scope can be divided as asked.
    """
    held = {
        v.node: Strategy((), (known[v.node],), "as the run holds it")
        for v in program.variables
        if isinstance(known.get(v.node), Split)
    }
    if parts > 1 and has_split_scopes(program):
        division = _Chooser(program, outside, parts, known, at_rest).run()
        if any(sequence_of(n.scope) is not None for n in program.nodes):
            division = _Chooser(program, outside, parts, known, at_rest, division.strategies).run()
        return division
    return Division(held, {name: s.outputs[0] for name, s in held.items()})


class _Chooser:
    """The choice for all split scopes of a program.

    Args:
      before: the strategies chosen by what is communicated; given, scopes that name a sequence divide it.
    """

    def __init__(
        self, program: Program, outside: GraphLayout, parts: int, known: Mapping[str, Placement], at_rest: bool,
        before: Mapping[str, Strategy] | None = None,
    ):  # fmt: skip
        self.program, self.outside, self.parts, self.known, self.at_rest = program, outside, parts, known, at_rest
        self.nodes = {n.name: n for n in program.nodes if split_scope(n.scope) and self._can_choose(n)}
        split = {name for name, placement in known.items() if isinstance(placement, Split)}
        self.handles = {v.node: v for v in program.variables if v.node in split or self._belongs(v)}
        self.options: dict[str, dict[tuple, Strategy]] = {name: {} for name in (*self.handles, *self.nodes)}
        self.forms: dict[Ref, dict[Placement, None]] = {}
        self.weights = self._weights()
        everyone = frozenset(range(parts))
        self.group = {name: ranks_of_scope(n.scope) or everyone for name, n in self.nodes.items()}
        self.groups = {everyone, *self.group.values()}
        self.again, self.sequences = before is not None, dict[Ref, Split]()
        if before is not None:
            shapes = {self.handles[h].type.shape or () for uses in self.weights.values() for _, h in uses}
            self.sequences = along_sequence(program, self.nodes, self.group, parts, shapes, before)

    def run(self) -> Division:
        self._seed()
        self._spread()
        self._settle_handles()
        self._insist()
        names = list(self.options)
        number = {name: i for i, name in enumerate(names)}
        options = {name: list(self.options[name].values()) for name in names}
        chosen = choose([self._costs(name, options[name]) for name in names], self._edges(number, options))
        strategies = {name: options[name][i] for name, i in zip(names, chosen)}
        variables = {name: strategies[name].outputs[0] for name in self.handles}
        if self.again and self.weights:
            check_sequences(self.program, self.nodes.values(), self.sequences, strategies)
        return Division(strategies, {name: p for name, p in variables.items() if isinstance(p, Split)})

    # -- the nodes that are chosen for

    def _can_choose(self, node: Node) -> bool:
        """Whether the node's layout may be chosen here: it has a rule, and takes nothing but tensors and variables."""
        program, rule = self.program, rule_of(node.op)
        if rule is None or node.op in HAS_BODIES or node.op == "Placeholder":
            return False
        if node.name in program.variable_of or node.name in program.inputs:
            return False
        handles = [r.node for r in node.inputs if r.node in program.variable_of or self._communicates(r.node)]
        tensors = [program.type_of(r) for r in node.inputs if r.node not in handles]
        if any(t.dtype in UNMOVABLE for t in (*tensors, *node.outputs)):
            return False
        if node.stateful and not handles:
            return False
        return self.outside.strategies[node.name].once is False

    def _communicates(self, name: str) -> bool:
        """Whether it is the communicator of ops over another mesh axis."""
        return self.program.by_name[name].op == "WhaleCommunicator"

    def _belongs(self, variable: Variable) -> bool:
        """Whether a split scope may say how the variable lies: it is the scope's, or nothing else uses it."""
        readers = {n.name for n, _ in self.program.consumers.get(Ref(variable.node), ())}
        if split_scope(variable.scope):
            return not readers.isdisjoint(self.nodes)
        return not variable.scope and bool(readers) and readers <= self.nodes.keys()

    def _weights(self) -> dict[str, list[tuple[int, str]]]:
        """Products and lookups -> (operand that is a variable of rank 2 or more, its handle)."""
        found: dict[str, list[tuple[int, str]]] = {}
        for node in self.nodes.values():
            lookup = node.op in LOOKUPS
            if not lookup and not matmul_flops(node, [self.program.type_of(r) for r in node.inputs]):
                continue
            for i, ref in enumerate(node.inputs[:1] if lookup else node.inputs):
                handle = self._variable_behind(ref)
                if handle is not None and len(self.handles[handle].type.shape or ()) >= 2:
                    found.setdefault(node.name, []).append((i, handle))
        return found

    def _variable_behind(self, ref: Ref) -> str | None:
        node = self.program.by_name[ref.node]
        while node.name not in self.handles:
            if node.op not in PASSED_ON or not node.inputs:
                return None
            node = self.program.by_name[node.inputs[0].node]
        return node.name

    # -- candidates

    def _seed(self) -> None:
        """Where weights can be cut, and how tensors arrive."""
        weights: dict[str, dict[frozenset[int], None]] = {}
        for reader, uses in self.weights.items():
            for _, handle in uses:
                weights.setdefault(handle, {})[self.group[reader]] = None
        for name, variable in self.handles.items():
            if name in self.known:
                self._note(Ref(name), self.known[name])
            for group in weights.get(name, ()) if name not in self.known else ():
                for dim, size in enumerate(variable.type.shape or ()):
                    if size is not None and size >= len(group):
                        self._note(Ref(name), split(dim, sizes_within(size, group, self.parts)))
        for name in self.weights:
            if (cut := self._rows(name)) is not None:
                self._note(Ref(name), cut)
        for ref, cut in self.sequences.items():
            self._note(ref, cut)
        for node in self.nodes.values():
            for ref in node.inputs:
                if ref.node not in self.options:
                    self._note(ref, self.outside.place(ref))
                    self._note(ref, self.outside.produced[ref])

    def _rows(self, name: str) -> Split | None:
        """How a convolution's result lies where its scope names rows or columns, which leaves its weight whole."""
        node, scope = self.nodes[name], split_scope(self.nodes[name].scope)
        shape = node.outputs[0].shape
        if scope is None or scope[1] is None or shape is None or node.op not in _IMAGES:
            return None
        spatial = (
            range(2, len(shape)) if str(node.attrs.get("data_format")).startswith("NC") else range(1, len(shape) - 1)
        )
        at = scope[1] + len(shape) if scope[1] < 0 else scope[1]
        size = shape[at] if at in spatial else None
        group = self.group[name]
        return split(at, sizes_within(size, group, self.parts)) if size is not None and size >= len(group) else None

    def _note(self, ref: Ref, placement: Placement) -> bool:
        """Adds a candidate; False when it is none, or known already."""
        if not isinstance(placement, Split | Partial):
            return False
        placement = placement.plain if isinstance(placement, Split) else placement
        forms = self.forms.setdefault(ref, {})
        if placement in forms or len(forms) >= _MOST_FORMS:
            return False
        if isinstance(placement, Split) and not any(self._within(placement, group) for group in self.groups):
            return False
        forms[placement] = None
        return True

    def _within(self, placement: Split, group: frozenset[int]) -> bool:
        """Whether the ranks of a group have a part each, and no others."""
        return placement.smallest > 0 if len(group) == self.parts else placement.holders == group

    def _spread(self) -> None:
        """Each candidate of a tensor brings about options of the nodes around it, and these bring candidates."""
        asked: set[tuple[str, int, Placement]] = set()
        names = list(self.nodes)
        for name in names:
            self._ask(self.nodes[name], None, None)
        changed = True
        while changed:
            changed = False
            for name in names:
                node = self.nodes[name]
                tensors = [*node.inputs, *node.refs()]
                for at, ref in enumerate(tensors):
                    for placement in list(self.forms.get(ref, ())):
                        if (name, at, placement) not in asked:
                            asked.add((name, at, placement))
                            changed |= self._ask(node, at, placement)
            names.reverse()

    def _ask(self, node: Node, at: int | None, placement: Placement | None) -> bool:
        """Options of ``node`` when tensor ``at`` (operands, then outputs) lies as ``placement``; True: new forms."""
        rule = rule_of(node.op)
        assert rule is not None
        current: list[Placement] = [B] * len(node.inputs)
        wanted: list[Placement | None] = []
        if at is not None and placement is not None:
            if at < len(current):
                current[at] = placement
            elif rule.own_stream or not isinstance(placement, Split):
                return False
            else:
                wanted = [*[None] * (at - len(current)), placement]
        new = False
        for option in self._strategies(rule, node, current, wanted):
            key = (option.inputs, option.outputs)
            if key in self.options[node.name]:
                continue
            if any(not self._within(p, self.group[node.name]) for p in key[0] + key[1] if isinstance(p, Split)):
                continue
            self.options[node.name][key] = option
            for ref, p in zip((*node.inputs, *node.refs()), option.inputs + option.outputs):
                if isinstance(p, Split) or ref.node == node.name:
                    new |= self._note(ref, p)
        return new

    def _strategies(
        self, rule: LineRule, node: Node, current: list[Placement], wanted: list[Placement | None]
    ) -> Iterable[Strategy]:
        return rule.strategies(view(self.program, node, self.parts), current, wanted)

    def _settle_handles(self) -> None:
        """A variable may lie as all that read or write it can take it; their other options go."""
        for name in self.handles:
            ref = Ref(name)
            given = self.known.get(name)
            candidates: list[Placement] = [given] if given is not None else [B]
            if given is None and self.at_rest:
                candidates += [p for p in self.forms.get(ref, ()) if self._all_take(ref, p)]
            for p in candidates:
                self.options[name][(), (p,)] = Strategy((), (p,), "split scope: a variable")
            for reader, i in self.program.consumers.get(ref, ()):
                if reader.name in self.nodes:
                    self._keep(reader.name, lambda o, i=i, c=candidates: o.inputs[i] in c)  # type: ignore[misc]

    def _all_take(self, handle: Ref, placement: Placement) -> bool:
        for node, i in self.program.consumers.get(handle, ()):
            if node.name in self.nodes:
                if not any(o.inputs[i] == placement for o in self.options[node.name].values()):
                    return False
                continue
            current: list[Placement] = [B] * len(node.inputs)
            current[i] = placement
            if not takes(self.program, node, i, current, self.parts):
                return False
        return True

    def _keep(self, name: str, good: Callable[[Strategy], bool]) -> bool:
        """Keeps the options that are ``good``, if there are any."""
        kept = {key: o for key, o in self.options[name].items() if good(o)}
        if kept:
            self.options[name] = kept
        return bool(kept)

    # -- what is not left to cost

    def _insist(self) -> None:
        """Weights lie split and are read split, along the named dimension of the result where there is one."""
        divided: dict[str, bool] = {}
        first: set[str] = set()
        whole = {handle for name, uses in self.weights.items() if self._rows(name) for _, handle in uses}
        for handle in whole:
            self._keep(handle, lambda o: o.outputs[0] == B)
        for name, uses in self.weights.items():
            node = self.nodes[name]
            scope = split_scope(node.scope)
            assert scope is not None
            divided.setdefault(scope[0], False)
            if self._rows(name) is not None:
                self._along(node, uses[0][1], scope[1] or 0)
                divided[scope[0]] = True
                continue
            for i, handle in uses:
                if handle in whole:
                    continue
                taken = self._keep(name, lambda o, i=i: isinstance(o.inputs[i], Split))  # type: ignore[misc]
                if handle not in first and scope[1] is not None and node.op not in LOOKUPS:
                    self._along(node, handle, scope[1])
                    read = {o.inputs[i] for o in self.options[name].values()}
                    if self.program.type_of(node.inputs[i]).shape == self.handles[handle].type.shape:
                        self._keep(handle, lambda o, read=read: o.outputs[0] in read)  # type: ignore[misc]
                first.add(handle)
                if not taken:
                    continue
                divided[scope[0]] = True
                self._keep(handle, lambda o: isinstance(o.outputs[0], Split))
        for name, node in self.nodes.items():
            if matmul_flops(node, [self.program.type_of(r) for r in node.inputs]):
                self._keep(name, lambda o: any(isinstance(p, Split) for p in o.inputs + o.outputs))
        for path, something in divided.items():
            if not something:
                raise self._nothing(path)
        # A scope of its own around a loss has no weights, nor have runs that only initialise variables; but where a
        # batch is computed on, some scope must have.
        if not divided and any(isinstance(p, Split) for p in self.outside.produced.values()):
            raise self._nothing(next(iter(self.nodes.values())).scope if self.nodes else "wh.split")

    def _along(self, node: Node, handle: str, dim: int) -> None:
        shape = node.outputs[0].shape or ()
        at = dim + len(shape) if dim < 0 else dim
        if self._keep(node.name, lambda o: isinstance(o.outputs[0], Split) and o.outputs[0].dim == at):
            return
        size = shape[at] if 0 <= at < len(shape) else None
        parts = len(self.group[node.name])
        works = sorted({o.outputs[0].dim for o in self.options[node.name].values() if isinstance(o.outputs[0], Split)})
        raise PlanError(
            "a result cannot be split along the dimension that wh.split names",
            op=f"{node.name} ({node.op}), which reads {self.handles[handle].name}",
            given=f"dim={dim} of {list(shape)}" + (f", of size {size} over {parts} ranks" if size else ""),
            expected=f"a size of {parts} or more" if size and size < parts else f"one of dimensions {works}",
            action="name another dimension, leave dim out, or use fewer ranks",
        )

    def _nothing(self, scope: str) -> PlanError:
        parts = len(ranks_of_scope(scope) or range(self.parts))
        ranks = f"over {parts} ranks"
        rows: dict[str, str] = {}
        for name, uses in self.weights.items():
            for weight in (self.handles[handle] for _, handle in uses):
                if self.nodes[name].scope == scope:
                    said = f"{name} reads {weight.name} {list(weight.type.shape or ())} {ranks}"
                    rows.setdefault(weight.name, said)
        if not rows:
            return PlanError(
                "nothing under a split scope can be divided",
                op=scope,
                given="no product or lookup that reads a variable",
                expected="a dense, convolution, attention or embedding layer called under the scope",
                action="enter the scope where such a layer is called, or take it away",
            )
        return PlanError(
            "nothing under a split scope can be divided",
            given="; ".join(list(rows.values())[:4]),
            expected=f"weights with a dimension of size {parts} or more",
            action="use fewer ranks or larger layers, or take the scope away",
        )

    # -- costs

    def _costs(self, name: str, options: list[Strategy]) -> list[float]:
        node = self.nodes.get(name)
        if node is None:
            return [0.0 if isinstance(o.outputs[0], Split) else 1e-3 for o in options]
        types = [self.program.type_of(r) for r in node.inputs]
        flops = matmul_flops(node, types)
        touched = sum(t.bytes for t in types) + sum(t.bytes for t in node.outputs)
        if any(self._communicates(r.node) for r in node.inputs):
            return [touched * fraction(o.inputs + o.outputs) for o in options]  # each sends what it holds
        found = [_WORK * compute_cost(o, touched, flops) for o in options]
        if self.sequences:
            found = [c + surcharge(self.program, node, self.sequences, o) for c, o in zip(found, options)]
        return found

    def _edges(self, number: Mapping[str, int], options: Mapping[str, list[Strategy]]) -> list[Edge]:
        found = []
        fetched = dict(zip(self.program.outputs, self.outside.outputs))
        for producer in self.program.nodes:
            chosen = options.get(producer.name)
            for ref in producer.refs():
                uses = [(r, i) for r, i in self.program.consumers.get(ref, ()) if chosen or r.name in options]
                if not uses and not (chosen and ref in fetched):
                    continue
                if chosen is None and isinstance(self.outside.produced[ref], Broadcast):
                    if self.program.type_of(ref).dtype not in UNMOVABLE:
                        continue  # whole tensors are cut for nothing
                forms = tuple(o.outputs[ref.index] for o in chosen) if chosen else (self.outside.produced[ref],)
                readers: list[tuple[int | None, tuple[Placement, ...]]] = []
                for reader, i in uses:
                    if reader.name in options:
                        readers.append((number[reader.name], tuple(o.inputs[i] for o in options[reader.name])))
                    elif self.program.type_of(ref).dtype not in UNMOVABLE:
                        wanted = self.outside.strategies[reader.name].inputs[i]
                        readers.append((None, (B if isinstance(wanted, FirstRank | PerRank) else wanted,)))
                if ref in fetched:
                    readers.append((None, (fetched[ref],)))
                tensor = self.program.type_of(ref)
                price = partial(self._price, tensor)
                found.append(Edge(forms, number[producer.name] if chosen else None, tuple(readers), price))
        return found

    def _price(self, tensor: TensorType, source: Placement, wanted: Placement) -> float:
        if source == wanted:
            return 0.0
        if tensor.dtype in UNMOVABLE:
            return math.inf
        return change_cost(tensor, source, wanted, self.parts)
