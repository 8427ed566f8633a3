"""The checker: proves, independently of how a plan was found, that it is legal for a program.

It reads only the program, the rules and the plan: every node has a strategy that its rule allows, every operand is
available in the placement that the strategy wants (as produced, or by a reshard of the plan), every reshard starts
from a form that exists, groups hold nothing that waits for another member.
"""

from __future__ import annotations

from whale.errors import PlanError
from whale.ir.layout import B, O, Partial, Placement, Split, Strategy
from whale.ir.plan import Plan
from whale.ir.program import Node, Program, Ref
from whale.ir.values import UNMOVABLE
from whale.rules import rule_of
from whale.rules.graph import BRANCHES, LOOPS, handles_lists, recreatable, view


def check(program: Program, plan: Plan) -> None:
    """Raises PlanError, naming node and difference, unless ``plan`` is legal for ``program``."""
    for graph, strategies in plan.strategies.items():
        body = program if graph == "" else program.functions.get(graph)
        if body is None:
            raise PlanError("the plan speaks of a function that the program lacks", given=graph,
                            expected=", ".join(program.functions) or "no functions", action="make the plan again")  # fmt: skip
        _check_graph(body, graph, strategies, plan)
    _check_groups(plan)


def _fail(node: Node, given: object, expected: object) -> PlanError:
    return PlanError("the plan is not legal", op=f"{node.name} ({node.op})", given=given, expected=expected,
                     action="make the plan again with `whale plan`")  # fmt: skip


def _check_graph(program: Program, graph: str, strategies, plan: Plan) -> None:
    produced: dict[Ref, Placement] = {}
    for node in program.nodes:
        strategy = strategies.get(node.name)
        if strategy is None:
            raise _fail(node, "no strategy", "one strategy per node")
        if len(strategy.inputs) != len(node.inputs) or len(strategy.outputs) != len(node.outputs):
            raise _fail(node, strategy, f"{len(node.inputs)} operands and {len(node.outputs)} outputs")
        for ref, placement in zip(node.inputs, strategy.inputs):
            _check_available(program, graph, node, ref, placement, produced, plan)
        _check_legal(program, node, strategy, plan.size)
        for ref, placement in zip(node.refs(), strategy.outputs):
            shape = program.type_of(ref).shape
            if isinstance(placement, Split) and program.type_of(ref).dtype not in UNMOVABLE:
                if shape is None or placement.dim >= len(shape) or shape[placement.dim] != sum(placement.sizes):
                    raise _fail(node, f"{ref} {program.type_of(ref)} laid out {placement}", "sizes that add up")
            produced[ref] = placement
    returned = plan.returned.get(graph, ())
    if len(returned) != len(program.outputs):
        raise PlanError("the plan is not legal", op=graph or program.name, given=f"{len(returned)} output placements",
                        expected=f"{len(program.outputs)}", action="make the plan again with `whale plan`")  # fmt: skip
    for ref, placement in zip(program.outputs, returned):
        _check_available(program, graph, program.by_name[ref.node], ref, placement, produced, plan)


def _check_available(program, graph, node, ref, wanted, produced, plan) -> None:
    seen: set[Placement] = set()
    while produced[ref] != wanted:
        if wanted in seen:
            raise _fail(node, f"{ref} as {wanted}", "reshards without a circle")
        seen.add(wanted)
        r = plan.reshard_of.get((graph, ref, wanted))
        if r is None:
            raise _fail(node, f"operand {ref} is {produced[ref]}", f"{wanted}, or a reshard to it")
        if program.type_of(ref).dtype in UNMOVABLE and wanted != O and not (
            recreatable(program, ref) or program.by_name[ref.node].op == "Placeholder"
        ):
            raise _fail(node, f"a reshard of {program.type_of(ref)} to {wanted}", "a tensor that can be sent")
        wanted = r.source


def _check_legal(program: Program, node: Node, strategy: Strategy, parts: int) -> None:
    if node.op in LOOPS:
        if strategy.inputs != strategy.outputs and not strategy.once:
            raise _fail(node, strategy, "loop variables that keep their placement")
        return
    if node.op in BRANCHES or node.op == "Placeholder":
        return
    whole = all(p == B for p in strategy.inputs + strategy.outputs)
    if strategy.once:
        if not all(p == O for p in strategy.outputs) or not all(p in (B, O) for p in strategy.inputs):
            raise _fail(node, strategy, "B or O operands and O results on the first rank")
        return
    if handles_lists(node):
        if len(set(strategy.inputs + strategy.outputs)) > 1:
            raise _fail(node, strategy, "lists whose elements lie alike")
        return
    rule = rule_of(node.op)
    if whole and (not node.stateful or rule is None):
        if node.stateful:
            raise _fail(node, strategy, "a stateful op without a rule on the first rank only")
        return
    if rule is None:
        raise _fail(node, strategy, "replicated: the op has no rule")
    options = rule.strategies(view(program, node, parts), strategy.inputs)
    if not any(o.inputs == strategy.inputs and o.outputs == strategy.outputs for o in options):
        raise _fail(node, strategy, "; ".join(map(str, options)) or "the first rank only")


def _check_groups(plan: Plan) -> None:
    for number, members in plan.groups.items():
        kinds = {(m.graph, m.source, m.target) for m in members}
        if len(kinds) != 1 or not isinstance(members[0].source, Partial):
            raise PlanError("a fused collective mixes unlike reshards", given=f"group {number}: {sorted(map(str, kinds))}",
                            expected="all-reduces of one kind in one graph", action="make the plan again")  # fmt: skip
