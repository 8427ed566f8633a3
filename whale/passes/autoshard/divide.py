"""Divides split scopes: chooses layouts for the nodes under ``wh.split``, and for the variables that they use.

Outside of split scopes the batch is sharded, by propagation. The nodes of split scopes (forward, backward and update)
may be sharded along any dimension that their rules allow. ``divide`` makes the choice, with the package's other
modules:

    region       collects the nodes and variables that the choice is about
    tables       says which embedding tables may be whole on one rank, and on which
    candidates   lists the options of each node and variable, starting from splits of weights and from tensors at the
                 scopes' borders
    required_shardings   removes options that cost must not choose: a weight (a variable of rank 2 or more that a
                 matrix product or an embedding lookup reads) is sharded, its readers take it sharded, and every product
                 that can be sharded is
    costs        prices changes of layout, and among equals prefers to divide more of the work
    choose       takes one option for each node, so that all together cost least

Programs that partition tokens by expert into tensors whose sizes are known at run time only are refused: no layout
could say which rank computes which expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from whale.errors import PlanError
from whale.ir.layout import Placement, Shard, Strategy
from whale.ir.ops import IDENTITIES, RESHAPES
from whale.ir.program import Program, Ref
from whale.passes.analysis.scopes import has_split_scopes, sequence_of
from whale.passes.autoshard.candidates import Candidates
from whale.passes.autoshard.choose import choose
from whale.passes.autoshard.costs import node_costs, tensor_forms
from whale.passes.autoshard.region import SplitRegion
from whale.passes.autoshard.required_shardings import require_shardings
from whale.passes.autoshard.sequence import along_sequence, check_sequences
from whale.passes.autoshard.tables import find_whole_tables, is_whole
from whale.passes.propagation.graph_layout import GraphLayout
from whale.passes.propagation.propagate import NOTHING

_TAKE_APART = frozenset({"DynamicPartition", "SplitV", "Slice", "StridedSlice"})


@dataclass(frozen=True, slots=True)
class Division:
    """Holds the result of ``divide``.

    Attributes:
      strategies: strategies of the nodes of split scopes, and of the handles of their variables, by name.
      variables: placements of the variables that are sharded, by handle node.
    """

    strategies: Mapping[str, Strategy] = field(default_factory=dict)
    variables: Mapping[str, Placement] = field(default_factory=dict)


def divide(
    program: Program,
    outside: GraphLayout,
    parts: int,
    known: Mapping[str, Placement],
    at_rest: bool,
    tables: bool = True,
    before: Division | None = None,
) -> Division:
    """Chooses strategies for the nodes of split scopes.

    Args:
      outside: the layout of the program if no scope is split: in which placements tensors enter the scopes, and are
        wanted from them.
      parts: number of ranks.
      known: placements of variables that programs planned earlier in the run have fixed, by handle node.
      at_rest: whether variables that are not known yet may be sharded between steps.
      tables: whether an embedding table may be whole on one rank.
      before: the division of the same program with fewer composite ops expanded. Its strategies are kept; only the
        newly expanded ops are chosen. None: everything is chosen.

    Raises:
      PlanError: nothing under a scope can be divided, or not along the dimension that the scope names.
    """
    held = {
        v.node: Strategy((), (known[v.node],), "as the run holds it")
        for v in program.variables
        if isinstance(known.get(v.node), Shard)
    }
    if parts > 1 and has_split_scopes(program):
        region = SplitRegion(program, outside, parts, known, at_rest, tables)
        _refuse_unbounded_expert_rows(region)
        if before is not None:
            ranks = {
                name: next(iter(p.holders))
                for name, p in before.variables.items()
                if isinstance(p, Shard) and is_whole(p)
            }
            return _choose_among(region, {}, ranks, before.strategies)
        division = _choose(region, {})
        if any(sequence_of(n.scope) is not None for n in program.nodes):
            shapes = {region.handles[h].type.shape or () for uses in region.weights.values() for _, h in uses}
            wanted = along_sequence(program, region.nodes, region.group, parts, shapes, division.strategies)
            division = _choose(region, wanted)
            if region.weights:
                check_sequences(program, region.nodes.values(), wanted, division.strategies)
        return division
    return Division(held, {name: s.outputs[0] for name, s in held.items()})


def _choose(region: SplitRegion, sequences: Mapping[Ref, Shard]) -> Division:
    """Chooses strategies for all split scopes.

    Tables are assigned to ranks before it is known which of them are best kept whole. Afterwards those that are whole
    are spread over the ranks again, and the choice is repeated.

    Args:
      sequences: placements that activations between products should have (see ``sequence``); {}: none.
    """
    tables = find_whole_tables(region)
    division = _choose_among(region, sequences, tables)
    whole = {name for name in tables if is_whole(division.variables.get(name))}
    if whole and len(whole) < len(tables):
        division = _choose_among(region, sequences, find_whole_tables(region, whole))
    return division


def _choose_among(
    region: SplitRegion,
    sequences: Mapping[Ref, Shard],
    tables: Mapping[str, int],
    fixed: Mapping[str, Strategy] = NOTHING,
) -> Division:
    """Returns the cheapest choice in which ``tables`` may be whole on the given ranks, and which keeps the strategies
    in ``fixed``.
    """
    candidates = Candidates(region, sequences, tables, fixed)
    require_shardings(region, candidates)
    names = list(candidates.options)
    number = {name: i for i, name in enumerate(names)}
    options = {name: list(candidates.options[name].values()) for name in names}
    costs = [[0.0] if name in fixed else node_costs(region, sequences, name, options[name], tables) for name in names]
    chosen = choose(costs, tensor_forms(region, number, options, len(tables)))
    strategies = {name: options[name][i] for name, i in zip(names, chosen)}
    variables = {name: strategies[name].outputs[0] for name in region.handles}
    strategies.update(_choose_behind_tables(region, strategies))
    return Division(strategies, {name: p for name, p in variables.items() if isinstance(p, Shard)})


def _choose_behind_tables(region: SplitRegion, strategies: Mapping[str, Strategy]) -> dict[str, Strategy]:
    """Returns strategies for nodes outside of the region that read rows looked up in a table that is whole on one rank.

    They get the strategies that they have when no scope is split, by name. Propagation alone would put these nodes, and
    all that follow them, on the table's rank.

    Args:
      strategies: the strategies chosen for the nodes of the region.
    """
    found: dict[str, Strategy] = {}
    for node in region.nodes.values():
        for ref, placement in zip(node.list_refs(), strategies[node.name].outputs):
            for reader, i in region.program.consumers.get(ref, ()) if is_whole(placement) else ():
                outside = region.outside.strategies[reader.name]
                if reader.name not in strategies and not reader.stateful and isinstance(outside.inputs[i], Shard):
                    found[reader.name] = outside
    return found


def _refuse_unbounded_expert_rows(region: SplitRegion) -> None:
    """Refuses mixtures of experts whose tokens are partitioned into tensors of dynamic size, one for each expert's own
    weight.

    In such a program no layout says which rank has an expert: every rank would compute every expert, for all tokens.

    Raises:
      PlanError: products with split weights read two or more dynamically sized parts of one tensor.
    """
    parts: dict[Ref, dict[Ref, str]] = {}
    for name, uses in region.weights.items():
        weights = {i for i, _ in uses}
        for i, ref in enumerate(region.nodes[name].inputs):
            part = None if i in weights else _part_behind(region, ref)
            if part is not None:
                table = _origin(region, region.program.by_name[part.node].inputs[0])
                parts.setdefault(table, {}).setdefault(part, name)
    for table, found in parts.items():
        if len(found) > 1:
            part, product = next(iter(found.items()))
            by = region.program.by_name[part.node]
            raise PlanError(
                "tokens that a program splits by expert cannot be sent to the experts' ranks",
                op=f"{by.name} ({by.op})",
                given=f"rows of {table} in {len(found)} parts whose sizes are known only at run time; {product} and "
                "others multiply each part by a weight of its own under wh.split",
                expected="the experts' weights as one tensor [experts, ...], and their tokens as one tensor "
                "[experts, capacity, width], whose capacity may be known only at run time",
                action="use wh.layers.MoE(experts, hidden, capacity_factor=None), which drops no token, or "
                "tf.scatter_nd and tf.gather_nd as in docs/guides/giant.md",
            )


def _part_behind(region: SplitRegion, ref: Ref) -> Ref | None:
    """Finds the part of a partitioned tensor from which a tensor of dynamic size is computed.

    Follows the tensor back to an op (DynamicPartition, slice) that takes a dynamic number of rows out of a tensor of
    known size. Returns this op's result; None if there is no such op.
    """
    program = region.program
    while None in (program.find_type(ref).shape or ())[:1]:
        node = program.by_name[ref.node]
        apart = node.op in _TAKE_APART
        data = node.inputs[:1] if apart else node.inputs
        unknown = [r for r in data if None in (program.find_type(r).shape or ())[:1]]
        if not unknown:
            return ref if apart else None
        ref = unknown[0]
    return None


def _origin(region: SplitRegion, ref: Ref) -> Ref:
    while (node := region.program.by_name[ref.node]).op in IDENTITIES | RESHAPES and node.inputs:
        ref = node.inputs[0]
    return ref
