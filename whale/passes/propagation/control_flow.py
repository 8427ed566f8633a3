"""Finds the placements of the arguments and results of the bodies of loops and conditionals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from whale.errors import PlanError
from whale.ir.layout import FIRST, B, Partial, PerRank, Placement, RankZero, Replicate, Shard, Strategy
from whale.ir.program import Node, Ref
from whale.ir.values import UNMOVABLE, Func
from whale.passes.propagation.graph_state import GraphState
from whale.sharding_rules.graph import list_called_functions

# Propagates through a function body: its name, how its arguments lie, which may take any placement for nothing.
Walk = Callable[[str, Sequence[Placement], Sequence[bool]], GraphState]


def loop(graph: GraphState, node: Node, current: Sequence[Placement], walk: Walk) -> Strategy:
    """Finds, as a fixpoint, the placement of each loop variable that its initial value can take and its body keeps.

    Args:
      graph: that the loop is in; current: the placements of its operands there; walk: the way through a body.

    Raises:
      NeededWhole: a variable that cannot be sent would have to be brought elsewhere.
      PlanError: the placements do not settle.
    """
    body, cond = node.attrs["body"], node.attrs["cond"]
    assert isinstance(body, Func) and isinstance(cond, Func)
    if any(p == FIRST for p, r in zip(current, node.inputs) if graph.program.find_type(r).dtype in UNMOVABLE):
        return graph.on_first_rank(node, "a loop over what only the first rank has")
    state = [B if type(p) in (RankZero, PerRank) else p for p in current]
    free = [r in graph.remakable for r in node.inputs]
    types = [graph.program.find_type(r) for r in node.inputs]
    function = graph.axis.root.functions[body.name]
    names = [
        ((graph.name, Ref(node.name, i)), (body.name, Ref(function.inputs[i])), (body.name, function.outputs[i]))
        for i in range(len(state))
    ]
    locked = [any(n in graph.axis.whole for n in of_one) for of_one in names]
    for i, ref in enumerate(node.inputs):
        if locked[i]:
            graph.need(ref, B, node)
            state[i] = B
    for _ in range(2 * len(state) + 3):
        inner = walk(body.name, state, free)
        outs = [inner.layout.place(r) for r in function.outputs]
        joined = [
            s if lock else join_turns(s, o, t.dtype, f) for s, o, t, f, lock in zip(state, outs, types, free, locked)
        ]
        if joined == state:
            break
        for i, (old, new) in enumerate(zip(state, joined)):
            if old != new and old != B:  # it changed before: B is where a contradiction ends
                joined[i] = B if types[i].dtype not in UNMOVABLE else new
                locked[i] = True
        state = joined
    else:
        raise PlanError(
            "the layouts of a loop's variables do not converge",
            op=f"{node.name} ({node.op})",
            given=", ".join(map(str, state)),
            expected="a placement that the body keeps",
            action="report the program; `WHALE_DEBUG_DUMP=dir` writes it",
        )
    for ref, placement, of_one in zip(function.outputs, state, names):
        inner.need(ref, placement, node, of_one)
    inner.layout.outputs = tuple(state)
    graph.axis.layouts[body.name] = inner.layout
    condition = walk(cond.name, state, free)
    condition.layout.outputs = (B,)
    graph.axis.layouts[cond.name] = condition.layout
    return Strategy(tuple(state), tuple(state), "loop")


def branch(graph: GraphState, node: Node, current: Sequence[Placement], walk: Walk) -> Strategy:
    """Propagates through each branch with the operands as they are placed; results get placements that all branches can
    give.

    Args:
      graph, current, walk: as of ``loop``; the first operand selects the branch.

    Raises:
      NeededWhole: a result that cannot be sent would have to be resharded.
    """
    root, functions = graph.axis.root, [f.name for f in list_called_functions(node)]
    arguments = [B if type(p) in (RankZero, PerRank) else p for p in current[1:]]
    if any(p == FIRST and graph.program.find_type(r).dtype in UNMOVABLE for p, r in zip(current, node.inputs)):
        return graph.on_first_rank(node, "a branch over what only the first rank has")
    free = [r in graph.remakable for r in node.inputs[1:]]
    for i, ref in enumerate(node.inputs[1:]):
        if any((name, Ref(root.functions[name].inputs[i])) in graph.axis.whole for name in functions):
            graph.need(ref, B, node)
            arguments[i] = B
    inner = [walk(name, arguments, free) for name in functions]
    outputs: list[Placement] = []
    for i, out in enumerate(node.outputs):
        options = [b.layout.place(root.functions[n].outputs[i]) for b, n in zip(inner, functions)]
        outputs.append(B if graph.is_whole(Ref(node.name, i)) else join_branches(options, out.dtype))
        for body, name in zip(inner, functions):
            also = (graph.name, Ref(node.name, i))
            body.need(root.functions[name].outputs[i], outputs[i], node, (also,))
    for body, name in zip(inner, functions):
        body.layout.outputs = tuple(outputs)
        graph.axis.layouts[name] = body.layout
    return Strategy((B, *arguments), tuple(outputs), "branch")


def join_turns(state: Placement, out: Placement, dtype: str, free: bool) -> Placement:
    """Returns the placement of a loop variable in the next iteration when it enters as ``state`` and the body yields
    ``out``.
    """
    if state == out or type(out) is RankZero:
        return state
    if dtype in UNMOVABLE:
        return out if free and state == B else state
    if state == B:
        return out  # B -> S and B -> P cost nothing
    if out == B:
        return B if type(state) is Partial else state
    return state if type(state) is Shard else B


def join_branches(options: Sequence[Placement], dtype: str) -> Placement:
    """Returns the placement in which a result leaves a conditional whose branches yield it as ``options``."""
    first = options[0]
    if all(o == first for o in options):
        return B if type(first) is RankZero else first
    if dtype in UNMOVABLE:
        return next((o for o in options if o != B), B)
    splits = {o for o in options if type(o) is Shard}
    rest = {o for o in options if type(o) not in (Shard, Replicate)}
    if len(splits) == 1 and not rest:
        return next(iter(splits))
    partial = {o for o in options if type(o) is Partial}
    return (
        next(iter(partial))
        if len(partial) == 1 and not splits and all(type(o) in (Partial, Replicate) for o in options)
        else B
    )
