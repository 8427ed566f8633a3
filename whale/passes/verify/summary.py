"""Summarises a plan for its user: how much of the work is divided, what costs more than it should, what differs from
one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cost_model.kernels.loop_counts import count_executions
from whale.ir.layout import PerRank, Shard
from whale.ir.ops import CONTRACTIONS
from whale.ir.plan import Reshard
from whale.ir.program import Program
from whale.passes.analysis.resharding_cost import count_matmul_flops
from whale.passes.normalize.decompose import is_composite
from whale.passes.propagation.graph_layout import GraphLayout
from whale.sharding_rules import find_rule
from whale.sharding_rules.graph import make_op_view


def exceptions(program: Program, layout: GraphLayout) -> tuple[str, ...]:
    """Describes how the results of the run differ from those of one device: local batch statistics, and random tensors
    that each rank draws.

    Args:
      layout: of the program itself, without its functions.

    Returns:
      One sentence for each difference; () if there is none.
    """
    statistics = [
        n for n in program.nodes if is_composite(n) and any(type(layout.produced[r]) is PerRank for r in n.list_refs())
    ]
    means = [r for r, p in layout.preferred.items() if type(p) is PerRank]
    drawn = [
        n
        for n in program.nodes
        if (rule := find_rule(n.op)) is not None
        and rule.local_stream
        and any(type(p) is Shard for p in layout.strategies[n.name].outputs)
    ]
    fused = sum("Grad" not in n.op for n in statistics)
    found = []
    if means or fused:
        found.append(
            f"batch statistics of each rank's own rows in {fused + len(means) // 2} normalisations"
            " (batch.norm_statistics=batch: of the whole batch)"
        )
    if drawn:
        found.append(
            f"{len(drawn)} random tensors drawn by each rank for its own rows (batch.random=global: as one device)"
        )
    return tuple(found)


def count_routed(program: Program, layouts: Mapping[str, GraphLayout], parts: int) -> dict[str, int]:
    """Maps nodes that exchange rows of an embedding table by their ids to the bytes they are expected to move (an
    estimate, since ids are known only in a step).
    """
    found = {}
    for graph, layout in layouts.items():
        body = program if graph == "" else program.functions[graph]
        for node in body.nodes:
            rule = find_rule(node.op)
            if rule is not None and rule.routes:
                moved = rule.count_exchanged_bytes(make_op_view(body, node, parts), layout.strategies[node.name])
                if moved:
                    found[f"{graph}/{node.name}" if graph else node.name] = moved
    return found


def split_and_total_flops(program: Program, layouts: Mapping[str, GraphLayout]) -> tuple[int, int]:
    """Returns the FLOPs of matrix products and convolutions that are divided over ranks, and of all of them.

    The body of a loop counts once for each iteration; once in all if their number is unknown.
    """
    divided = total = 0
    often = count_executions(program)
    for graph, layout in layouts.items():
        body = program if graph == "" else program.functions[graph]
        for node in body.nodes:
            if node.op not in CONTRACTIONS:
                continue
            flops = count_matmul_flops(node, [body.find_type(r) for r in node.inputs]) * (often[graph] if graph else 1)
            strategy = layout.strategies[node.name]
            total += flops
            if any(isinstance(p, Shard) for p in strategy.inputs + strategy.outputs):
                divided += flops
    return divided, total


def count_unruled(program: Program, layouts: Mapping[str, GraphLayout], reshards: Iterable[Reshard]) -> dict[str, int]:
    """Maps nodes whose op has no sharding rule ("name (Op)") to the logical bytes moved to replicate their operands."""
    reshards = tuple(reshards)
    result: dict[str, int] = {}
    for graph, layout in layouts.items():
        body = program if graph == "" else program.functions[graph]
        moved = {r.ref: r.bytes for r in reshards if r.graph == graph}
        for name in layout.unruled:
            node = body.by_name[name]
            result[f"{graph}/{name} ({node.op})".lstrip("/")] = sum(moved.get(r, 0) for r in node.inputs)
    return result
