"""Presents the plan of a step as a networkx graph, for users' analysis and drawing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from cost_model.kernels.op_work import estimate_work
from whale.ir.plan import Plan
from whale.ir.program import Node, Program

if TYPE_CHECKING:
    import networkx


@dataclass(frozen=True)
class StepPlan(Plan):
    """The plan of a step, with the step's operations beside it.

    Attributes:
      step: the normalised program that the plan is for, with global shapes.
    """

    step: Program = field(default_factory=lambda: Program("", ()))

    def graph(self) -> networkx.DiGraph:
        """Returns the step's operations, and the tensors that they hand on, as a ``networkx.DiGraph``.

        Nodes are names of operations. Their attributes: ``op`` (its type), ``scope`` (the scopes it was built under),
        ``flops`` (of a step, on one device), ``shapes`` and ``dtypes`` of its results, ``layouts`` (for each mesh axis,
        those of its results: "S(0)[4,4]" sharded along dimension 0, "B" replicated, "P(sum)" partial, "O" on the first
        rank only) and ``moved_bytes`` (what all ranks together send to give its results other layouts).

        Edges lead from an operation to one that reads its results. Their attributes: ``bytes`` of these tensors, and
        ``resharded``: the changes of layout before they are read, for example ["data: P(sum) -> B"], of which one may
        serve several readers. Edges of order alone have 0 bytes.

        Bodies of loops and branches are not part of it; their operations are one node each, as in the program.
        """
        import networkx  # takes half a second, and no step of a run needs it

        plans = _list_axes(self)
        nodes = self.step.by_name
        graph = networkx.DiGraph(name=self.program, ranks=self.ranks)
        moved = _count_moved_bytes(plans.values())
        for node in self.step.nodes:
            inputs = [self.step.find_type(ref) for ref in node.inputs]
            graph.add_node(
                node.name,
                op=node.op,
                scope=node.scope,
                flops=estimate_work(node, inputs).flops,
                shapes=[one.shape for one in node.outputs],
                dtypes=[one.dtype for one in node.outputs],
                layouts={axis: _list_layouts(plan, node) for axis, plan in plans.items()},
                moved_bytes=moved.get(node.name, 0),
            )
        for node in self.step.nodes:
            for before in node.controls:
                if before in nodes and not graph.has_edge(before, node.name):
                    graph.add_edge(before, node.name, bytes=0, resharded=[])
            for place, ref in enumerate(node.inputs):
                if not graph.has_edge(ref.node, node.name):
                    graph.add_edge(ref.node, node.name, bytes=0, resharded=[])
                edge = graph.edges[ref.node, node.name]
                edge["bytes"] += self.step.find_type(ref).bytes
                for axis, plan in plans.items():
                    strategy = plan.strategies.get("", {}).get(node.name)
                    wanted = strategy and strategy.inputs[place]
                    change = plan.reshard_of.get(("", ref, wanted)) if wanted else None
                    if change is not None:
                        edge["resharded"].append(f"{axis}: {change.source} -> {change.target}")
        return graph


def add_step(plan: Plan, step: Program) -> StepPlan:
    """Returns the plan with the program that it is for."""
    own: dict[str, Any] = {one.name: getattr(plan, one.name) for one in fields(Plan)}
    return StepPlan(**own, step=step)


def _list_axes(plan: Plan) -> dict[str, Plan]:
    """Returns the plan of each mesh axis by the axis' name, from the outermost in."""
    found: dict[str, Plan] = {}
    one: Plan | None = plan
    while one is not None:
        found[one.axis or ("data" if not found else f"axis{len(found)}")] = one
        one = one.inner
    return found


def _count_moved_bytes(plans: Iterable[Plan]) -> Counter[str]:
    """Counts the bytes that are sent of each operation's results, by its name."""
    counts: Counter[str] = Counter()
    for plan in plans:
        for change in plan.reshards:
            if not change.graph:
                counts[change.ref.node] += change.bytes * plan.repeats.get(change.key, 1)
        counts.update(plan.routed)
    return counts


def _list_layouts(plan: Plan, node: Node) -> list[str]:
    strategy = plan.strategies.get("", {}).get(node.name)
    return [] if strategy is None else [str(placement) for placement in strategy.outputs]
