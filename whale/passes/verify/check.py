"""Proves that a plan is legal for a program, independently of how the plan was found.

``check`` reads only the program, the sharding rules and the plan. It proves that

* every node has a strategy that its op's rule allows,
* every operand is available in the placement that the strategy wants: as produced, or by a reshard of the plan,
* every reshard starts from a placement that the tensor has, and states the right number of bytes,
* loops and branches pass operands and results in the placements that their bodies take and return,
* no fused collective waits for its own result.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

import numpy as np

from whale.errors import REPORT_FAULT, PlanError
from whale.ir.layout import FIRST, LEGEND, P_SUM, B, Partial, PerRank, Placement, RankZero, Replicate, Shard, Strategy
from whale.ir.ops import BRANCHES, HAS_BODIES, LOOPS, OBJECT_UPDATES, UPDATES
from whale.ir.plan import Plan
from whale.ir.program import Node, Program, Ref, Variable
from whale.ir.values import UNMOVABLE
from whale.passes.resharding.fuse_all_reduces import is_all_gather, is_all_reduce, is_of_whole_table
from whale.passes.resharding.horovod import horovod_can
from whale.passes.resharding.wire_dtype import can_narrow, reshard_bytes
from whale.sharding_rules import find_rule
from whale.sharding_rules.base import adapt_to_per_rank, replace_per_rank
from whale.sharding_rules.embedding import is_with_owners
from whale.sharding_rules.graph import (
    has_variable_handle,
    is_list_op,
    is_recreatable,
    list_called_functions,
    make_op_view,
)
from whale.sharding_rules.nn.attention import RINGS, count_ring_bytes
from whale.sharding_rules.nn.norm import make_per_rank_moments

_AGAIN = f"make the plan again with `whale plan`; if Whale has just made it, {REPORT_FAULT}"


def check(program: Program, plan: Plan) -> None:
    """Proves that ``plan`` is legal for ``program``, from these and the sharding rules alone.

    Args:
      program: the program of the plan, its composite ops expanded (see ``whale.passes.plan_builder.expand``).

    Raises:
      PlanError: the plan is not legal; names the node, what the plan gives, and what was expected.
    """
    for graph in plan.strategies:
        if graph and graph not in program.functions:
            raise PlanError(
                "the plan refers to a function that the program lacks",
                given=graph,
                action=_AGAIN,
                expected=f"one of the program's functions: {', '.join(program.functions) or 'it has none'}",
            )
    _check_reshards(program, plan)
    local = {b.name: b.placement for b in plan.batch_inputs if b.local}
    _check_graph(program, program, "", tuple(local.get(name, B) for name in program.inputs), plan)
    _check_groups(program, plan)


def _fail(node: Node, given: object, expected: object) -> PlanError:
    return PlanError(
        "the plan is not legal",
        op=f"{node.name} ({node.op})",
        given=given,
        expected=expected,
        notation=LEGEND,
        action=_AGAIN,
    )


def _check_graph(root: Program, program: Program, graph: str, arguments: Sequence[Placement], plan: Plan) -> None:
    strategies = plan.strategies.get(graph)
    if strategies is None:
        raise PlanError(
            "the plan lacks a graph",
            given=", ".join(map(repr, plan.strategies)) or "no graphs",
            expected=f"strategies for {graph!r}, which every rank runs",
            action=_AGAIN,
        )
    produced: dict[Ref, Placement] = {}
    given = dict(zip(program.inputs, arguments))
    handles = program.variable_of if graph == "" else {}
    known: set[Hashable] = set()
    for node in program.nodes:
        strategy = strategies.get(node.name)
        if strategy is None:
            raise _fail(
                node, "a plan without a strategy for this operation", "a strategy for every node of the program"
            )
        if len(strategy.inputs) != len(node.inputs) or len(strategy.outputs) != len(node.outputs):
            raise _fail(node, strategy, f"placements of {len(node.inputs)} operands and {len(node.outputs)} outputs")
        handle = node.name in handles
        if handle or node.op == "Placeholder":
            passed = given.get(node.name) or (plan.variables.get(node.name, B) if graph == "" else B)
            if strategy.outputs != (passed,):
                raise _fail(node, strategy, f"{passed}, the placement in which it is passed in")
            if handle:
                _check_variable(handles[node.name], node, passed, plan.size)
        for ref, placement in zip(node.inputs, strategy.inputs) if node.inputs else ():
            if produced[ref] is not placement:
                _check_available(program, graph, node, ref, placement, produced, plan)
        if not handle:
            _check_legal(program, node, strategy, plan, known)
        if PerRank in map(type, strategy.inputs):
            _check_contributed(program, graph, node, plan)
        refs = node.list_refs()
        produced.update(zip(refs, strategy.outputs))
        for ref, placement in zip(refs, strategy.outputs) if Shard in map(type, strategy.outputs) else ():
            if type(placement) is Shard:
                _check_sizes(program, node, ref, placement, plan.size)
        if node.op in HAS_BODIES and not strategy.once:
            _check_bodies(root, node, strategy, plan)
    returned = plan.returned.get(graph, ())
    if len(returned) != len(program.outputs):
        raise PlanError(
            "the plan is not legal",
            op=graph or program.name,
            given=f"{len(returned)} placements of outputs",
            expected=f"{len(program.outputs)}, one for each output",
            action=_AGAIN,
        )
    for ref, placement in zip(program.outputs, returned):
        _check_available(program, graph, program.by_name[ref.node], ref, placement, produced, plan)


def _check_variable(variable: Variable, node: Node, placement: Placement, parts: int) -> None:
    """Checks that a variable is replicated, or sharded into one part per rank with sizes that add up (a part may be
    empty: that of a rank outside the group that its scope names).
    """
    if placement == B:
        return
    shape = variable.type.shape or ()
    fits = isinstance(placement, Shard) and placement.dim < len(shape) and shape[placement.dim] == placement.extent
    if not fits or len(placement.sizes) != parts or placement.smallest < 0:  # type: ignore[union-attr]
        expected = f"B (replicated), or a split of one of its dimensions into {parts} parts that add up to its size"
        raise _fail(node, f"the variable {variable.name} ({variable.type}) in the placement {placement}", expected)


def _check_bodies(root: Program, node: Node, strategy: Strategy, plan: Plan) -> None:
    """Checks that the placements of a loop's or branch's operands and results match those of its function bodies."""
    functions = [f.name for f in list_called_functions(node)]
    loop = node.op in LOOPS
    for name in functions:
        arguments = strategy.inputs if loop else strategy.inputs[1:]
        _check_graph(root, root.functions[name], name, arguments, plan)
        expected = (B,) if loop and name == functions[0] else strategy.outputs
        if plan.returned[name] != expected:
            given = f"the function {name}, which the operation calls, returns {' '.join(map(str, plan.returned[name]))}"
            raise _fail(node, given, f"results in the placements {' '.join(map(str, expected))}")


def _check_sizes(program: Program, node: Node, ref: Ref, placement: Placement, parts: int) -> None:
    """Checks that a sharded tensor has one size per rank, and that the sizes add up to its dimension (not for lists,
    whose elements' dimensions are unknown).
    """
    if not isinstance(placement, Shard):
        return
    t = program.find_type(ref)
    if len(placement.sizes) != parts or placement.smallest < 0:
        raise _fail(node, f"{ref} in the placement {placement}", f"{parts} sizes (one for each rank), none below 0")
    if t.dtype in UNMOVABLE:
        return
    # A size that TensorFlow does not know is known from the placement: rules hand it on from operands to results.
    if t.shape is not None and (
        placement.dim >= len(t.shape) or t.shape[placement.dim] not in (None, placement.extent)
    ):
        raise _fail(node, f"{ref} ({t}) in the placement {placement}", "sizes that add up to a dimension of the tensor")


def _check_available(program: Program, graph: str, node: Node, ref: Ref, wanted: Placement,
                     produced: Mapping[Ref, Placement], plan: Plan) -> None:  # fmt: skip
    seen: set[Placement] = set()
    while produced[ref] != wanted:
        if wanted in seen:
            given = f"reshards of {ref} to {wanted} that start from {wanted} again"
            raise _fail(node, given, f"reshards that start from {produced[ref]}, in which the tensor is produced")
        seen.add(wanted)
        _check_sizes(program, node, ref, wanted, plan.size)
        r = plan.reshard_of.get((graph, ref, wanted))
        if r is None:
            raise _fail(
                node,
                f"the operand {ref}, which is produced in the placement {produced[ref]}",
                f"the placement {wanted}, or a reshard of the operand to it",
            )
        if (
            program.find_type(ref).dtype in UNMOVABLE
            and wanted != FIRST
            and not (is_recreatable(program, ref) or program.by_name[ref.node].op == "Placeholder")
        ):
            given = f"a reshard of {ref}, {program.find_type(ref)}, to {wanted}"
            raise _fail(node, given, "no reshard: tensors of this dtype cannot be sent between ranks")
        wanted = r.source


def _check_reshards(program: Program, plan: Plan) -> None:
    """Checks that each reshard has an existing tensor and a unique key, is a change that lowering can carry out, and
    states the right bytes.
    """
    keys: set[str] = set()
    for r in plan.reshards:
        body = program if r.graph == "" else program.functions.get(r.graph)
        node = body.by_name.get(r.ref.node) if body is not None else None
        if body is None or node is None or r.ref.index >= len(node.outputs):
            raise PlanError(
                "the plan reshards a tensor that the program lacks",
                action=_AGAIN,
                given=f"tensor {r.ref} of {r.graph or program.name}",
                expected="an output of a node of that program or function",
            )
        if r.key in keys:
            raise _fail(node, f"two reshards with the key {r.key!r}", "keys that are unique")
        keys.add(r.key)
        direct = type(r.source) in (Replicate, RankZero) or not isinstance(r.target, RankZero)
        if is_with_owners(node, r.ref.index, r.source) or is_with_owners(node, r.ref.index, r.target):
            given = f"a reshard of {r.ref} from {r.source} to {r.target}"
            raise _fail(node, given, "no reshard: these rows stay on the ranks that own them")
        if not direct or (isinstance(r.source, Partial) and isinstance(r.target, Partial)):
            given = f"a reshard of {r.ref} from {r.source} to {r.target}"
            raise _fail(node, given, f"two reshards: to replicated (B), and from that to {r.target}")
        if r.backend != "whale" and not (r.backend == "horovod" and horovod_can(program, r)):
            given = f"a reshard of {r.ref} from {r.source} to {r.target} through the backend {r.backend!r}"
            raise _fail(
                node, given, "the backend 'whale', or 'horovod' for an all-reduce sum that is not in a loop or branch"
            )
        if r.wire_dtype and not can_narrow(program, r):
            given = f"a reshard of {r.ref} from {r.source} to {r.target}, sent as {r.wire_dtype}"
            raise _fail(node, given, "the tensor's own dtype; only float32 sums outside of loops are sent in another")
        ring = body.by_name.get(r.key)
        if r.source == r.target and ring is not None and ring.op in RINGS:
            moved = count_ring_bytes(body, ring, plan.strategies[r.graph][ring.name])
        else:
            moved = reshard_bytes(r, node.outputs[r.ref.index], plan.size)
        if r.bytes != moved:
            raise _fail(
                node,
                f"a reshard of {r.ref} from {r.source} to {r.target} that moves {r.bytes} bytes",
                f"one that moves {moved} bytes",
            )


def _check_contributed(program: Program, graph: str, node: Node, plan: Plan) -> None:
    """Checks that the partial sums which ``node`` combines with per-rank values are sums of each rank's own
    contribution.

    A per-rank value ("own") stands for a sum over ranks that has not been computed. A partial sum that was reduced on
    the way and split up again no longer consists of the ranks' own contributions, and the result would be wrong.
    """
    strategies, seen = plan.strategies[graph], set()
    stack = list(zip(node.inputs, strategies[node.name].inputs))
    while stack:
        ref, placement = stack.pop()
        if (ref, placement) in seen or not isinstance(placement, PerRank | Partial):
            continue
        seen.add((ref, placement))
        made = program.by_name[ref.node]
        before = plan.reshard_of.get((graph, ref, placement))
        value = program.const(ref)
        if placement == P_SUM and value is not None and not np.any(value):
            continue  # zeros (dropout's gradient has them) are nobody's contribution
        if before is not None and not {type(before.source), type(placement)} <= {PerRank, Partial}:
            given = f"{ref} resharded from {before.source} to {placement} on the way to {node.name}"
            raise _fail(made, given, "no reduction before it is combined with values that differ between ranks")
        if (
            before is not None
            and Partial in (type(before.source), type(placement))
            and P_SUM not in (before.source, placement)
        ):
            given = f"{ref} resharded from {before.source} to {placement}"
            raise _fail(made, given, "partial sums, P(sum): values that differ between ranks are combined by sums only")
        if isinstance(strategies[made.name].outputs[ref.index], Partial):
            stack += zip(made.inputs, strategies[made.name].inputs)


def _check_legal(program: Program, node: Node, strategy: Strategy, plan: Plan, known: set[Hashable]) -> None:
    """Checks that the node's rule allows its strategy.

    Args:
      known: keys of strategies found legal in this graph before, which are skipped; a check adds its own. The updates
        of many variables are alike, so most checks are saved.
    """
    if (key := _what_is_legal(program, node, strategy)) is None:
        _check_strategy(program, node, strategy, plan)
    elif key not in known:
        _check_strategy(program, node, strategy, plan)
        known.add(key)


def _what_is_legal(program: Program, node: Node, strategy: Strategy) -> Hashable | None:
    """Returns a key for the cache of legal strategies: nodes with equal keys are all legal or all illegal. Returns None
    if legality depends on more than the node's kind and the strategy.

    Strategies are compared by identity: the plan keeps them alive.
    """
    rule = find_rule(node.op)
    if rule is None or rule.routes is not None or node.marks.owned_rows or PerRank in map(type, strategy.inputs):
        return None
    return program.kind_of[node.name], id(strategy)


def _check_strategy(program: Program, node: Node, strategy: Strategy, plan: Plan) -> None:
    parts = plan.size
    if node.op in LOOPS:
        if strategy.inputs != strategy.outputs and not strategy.once:
            raise _fail(node, strategy, "loop variables with the same placement before and after an iteration")
        return
    if node.op in BRANCHES or node.op == "Placeholder":
        return
    whole = all(p == B for p in strategy.inputs + strategy.outputs)
    if strategy.once:
        if not all(p == FIRST for p in strategy.outputs) or not all(p in (B, FIRST) for p in strategy.inputs):
            raise _fail(node, strategy, "results on the first rank only (O), and operands replicated (B) or likewise O")
        everywhere = node.stateful and not node.marks.on_first_rank and FIRST not in strategy.inputs
        if everywhere and _runs_everywhere(program, node, strategy, parts):
            raise _fail(
                node,
                f"{strategy}, on the first rank only",
                "a run on every rank: what the operation changes is on all of them",
            )
        if parts > 1:
            _check_changes_every_copy(program, node)
        return
    if node.marks.on_first_rank and parts > 1 and not plan.microbatched:
        raise _fail(node, strategy, "a run on the first rank only (O): all ranks share what the operation uses")
    if is_list_op(node):
        if len(set(strategy.inputs + strategy.outputs)) > 1:
            raise _fail(node, strategy, "the same placement for all lists that the op reads and returns")
        return
    rule = find_rule(node.op)
    if whole and (not node.stateful or rule is None or node.marks.on_every_rank):
        # Along the axis of micro-batches a replicated node runs once, before or after the micro-batches.
        everywhere = node.marks.on_every_rank or plan.microbatched
        if node.stateful and not everywhere and not has_variable_handle(program, node):
            raise _fail(
                node, strategy, "a run on the first rank only (O), since the op is stateful and has no sharding rule"
            )
        return
    if rule is None:
        raise _fail(node, strategy, "replicated (B) for all operands and results: the op has no sharding rule")
    op = make_op_view(program, node, parts)
    options = rule.strategies(
        op, [replace_per_rank(p) for p in strategy.inputs], [replace_per_rank(p) for p in strategy.outputs]
    )
    if any(isinstance(p, PerRank) for p in strategy.inputs + strategy.outputs) and not node.stateful:
        moments = make_per_rank_moments(op, strategy.inputs[0]) if strategy.inputs else None
        options = [found for o in options if (found := adapt_to_per_rank(o, strategy.inputs))]
        options += [moments] if moments else []
    if not any(o.inputs == strategy.inputs and o.outputs == strategy.outputs for o in options):
        raise _fail(node, strategy, "; ".join(map(str, options)) or "a run on the first rank only (O)")


def _check_changes_every_copy(program: Program, node: Node) -> None:
    """Checks that a node that runs on the first rank only changes nothing of which each rank has a copy.

    Raises:
      PlanError: the node updates a variable, or a table or queue of each process.
    """
    variable = node.op in UPDATES and has_variable_handle(program, node)
    if not variable and not (node.op in OBJECT_UPDATES and node.marks.on_every_rank):
        return
    given = [f"{r} ({t})" for r in node.inputs if (t := program.find_type(r)).dtype in UNMOVABLE - {"resource"}]
    raise PlanError(
        "an operation changes what every rank has a copy of, with a value that only the first rank has",
        op=f"{node.name} ({node.op})",
        given=", ".join(given) or "operands on the first rank",
        expected="operands that can be sent to the other ranks: strings cannot",
        action="run the ranks as processes (`whale run`), which read strings of tables and queues each from its own, "
        "or assign the strings outside of the step",
    )


def _runs_everywhere(program: Program, node: Node, strategy: Strategy, parts: int) -> bool:
    """Returns True if a stateful op has to run on all ranks: its rule allows a strategy, or, without a rule, it uses a
    variable's handle.
    """
    rule = find_rule(node.op)
    if rule is None:
        return has_variable_handle(program, node)
    return bool(rule.strategies(make_op_view(program, node, parts), strategy.inputs))


def _check_groups(program: Program, plan: Plan) -> None:
    for number, members in plan.groups.items():
        body = program if members[0].graph == "" else program.functions[members[0].graph]
        one_graph = len({m.graph for m in members}) == 1
        wholes = all(map(is_all_reduce, members)) or all(map(is_all_gather, members))
        alike = {
            (m.source if wholes else "parts", body.find_type(m.ref).dtype, m.backend, m.wire_dtype)
            for m in members
            if one_graph
        }
        given = f"group {number}: {', '.join(f'{m.ref} {m.source} -> {m.target}' for m in members)}"
        if len(alike) != 1 or not (wholes or all(map(is_of_whole_table, members))):
            raise PlanError(
                "a fused collective mixes different kinds of reshards",
                given=given,
                expected="all-reduces or all-gathers of one kind, or parts of tensors, of one dtype and backend in one "
                "graph",
                action=_AGAIN,
            )
    for graph in {m.graph for members in plan.groups.values() for m in members}:
        _check_order(program if graph == "" else program.functions[graph], graph, plan)


def _check_order(program: Program, graph: str, plan: Plan) -> None:
    """Checks that no fused collective waits, through other nodes, for its own result."""
    strategies = plan.strategies[graph]

    moved = {r.ref for r in plan.reshards if r.graph == graph}

    def find_waited_for(ref: Ref, placement: Placement) -> str | int:
        """Returns what an operand waits for: the name of its producer, or the number of the fused collective that
        reduces it.
        """
        if ref not in moved:
            return ref.node
        r = plan.reshard_of.get((graph, ref, placement))
        while r is not None and r.group < 0:
            r = plan.reshard_of.get((graph, ref, r.source))
        return ref.node if r is None else r.group

    left = {number: {m.ref.node for m in members} for number, members in plan.groups.items()}
    groups_of: dict[str | int, list[int]] = {}
    for number, names in left.items():
        for name in names:
            groups_of.setdefault(name, []).append(number)
    waits: dict[str | int, set[str | int]] = {}
    done: set[str | int] = set()
    waiting: dict[str | int, list[str | int]] = {}
    for node in program.nodes:
        if not node.inputs and not node.controls and node.name not in groups_of and node.name not in waiting:
            waits[node.name] = set()
            done.add(node.name)
            continue
        operands = zip(node.inputs, strategies[node.name].inputs)
        waits[node.name] = {find_waited_for(r, p) for r, p in operands}.union(node.controls)
        ready: list[str | int] = [node.name]
        while ready:
            one = ready.pop()
            missing = next((other for other in waits.get(one, ()) if other not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(one)
                continue
            done.add(one)
            ready += waiting.pop(one, ())
            for number in groups_of.get(one, ()):
                left[number].discard(str(one))
                ready += () if left[number] else (number,)
    if not waiting:
        return
    for number, members in plan.groups.items():
        if members[0].graph == graph:
            waits[number] = {m.ref.node for m in members}
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        circle = error.args[1]
        number = next(x for x in circle if isinstance(x, int))
        path = " -> ".join(f"group {x}" if isinstance(x, int) else str(x) for x in reversed(circle))
        raise PlanError("a fused collective waits for its own result", given=path, action=_AGAIN,
                        expected=f"members of group {number} that do not depend on each other") from error  # fmt: skip
