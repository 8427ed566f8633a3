"""Presents the plan of a step as a networkx graph, for analysis and drawing by users."""

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
    """The plan of a step together with the step's program; `wh.plan` returns it.

    Attributes:
      step: the normalised program that the plan is for, with global shapes.
    """

    step: Program = field(default_factory=lambda: Program("", ()))

    def graph(self) -> networkx.DiGraph:
        """Returns a ``networkx.DiGraph`` of the step's operations and the tensors between them.

        Nodes are names of operations, with these attributes:
          op: the operation's type, such as "MatMul".
          scope: the scopes of `wh.split` and others that it was built under.
          flops: FLOPs of the operation in a step, as on one device.
          shapes, dtypes: global shapes and types of its results.
          layouts: for each mesh axis, the layouts of its results: "S(0)[4,4]" sharded along dimension 0, "B"
            replicated, "P(sum)" a partial sum, "O" on the first rank only.
          moved_bytes: what all ranks together send to reshard its results.

        An edge leads from an operation to one that reads its results, with these attributes:
          bytes: size of these tensors; 0 for a control dependency.
          resharded: the reshards between the two, such as ["data: P(sum) -> B"]; one reshard may serve several readers.

        A loop or a branch is one node; operations of its body are not in the graph.
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
    """Returns the plan together with the program that it is for."""
    own: dict[str, Any] = {one.name: getattr(plan, one.name) for one in fields(Plan)}
    return StepPlan(**own, step=step)


def _list_axes(plan: Plan) -> dict[str, Plan]:
    """Returns {mesh axis: plan} from the outermost axis to the innermost."""
    found: dict[str, Plan] = {}
    one: Plan | None = plan
    while one is not None:
        found[one.axis or ("data" if not found else f"axis{len(found)}")] = one
        one = one.inner
    return found


def _count_moved_bytes(plans: Iterable[Plan]) -> Counter[str]:
    """Returns {operation: bytes} that ranks send to reshard the operation's results."""
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
