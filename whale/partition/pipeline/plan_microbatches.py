"""Plans micro-batches by treating time as one more mesh axis, whose coordinates run one after the other.

The program of a rank, already lowered for the axes of ranks, is planned over ``micro_batches`` coordinates as over
ranks. Along this axis a shard (``S``) is a slice of rows, a partial sum (``P``) is accumulated, and a replicated tensor
(``B``) is computed once. The nodes fall into three regions:

    before   nodes that do not depend on the micro-batch: reads of variables, constants
    each     nodes that are computed once for each micro-batch
    after    nodes that need all of them: reductions over ranks, updates, metrics

Each micro-batch runs once: there is no second round. So a node of ``each`` that reads a sum over all micro-batches
needs a way out, of which there are two. If the sum depends on inputs only (such as the number of tokens that a mask
leaves), it is computed on the whole batch, before the micro-batches. Otherwise the reader is computed on the whole
batch, after the micro-batches, provided that no update depends on it (the deviation of a metric), or that no matrix
product does (gradient rows that an optimizer clips by their norm). In all other cases planning fails with an error.

``untie_microbatches`` first removes control edges and operands that needlessly tie micro-batches to each other. A rank
without rows takes part in the communication of micro-batches as often as the ranks with rows.

Decisions: 0028, 0085, 0095.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from whale.errors import AcrossMicroBatchesError, PlanError
from whale.ir.collector import suspend_garbage_collection
from whale.ir.layout import FIRST, B, Partial, PerRank, Placement, Replicate, Shard, Strategy, divide_evenly, shard
from whale.ir.marks import NO_MARKS
from whale.ir.ops import COLLECTIVES, CONTRACTIONS, EXCHANGES, HAS_BODIES, READS
from whale.ir.plan import BatchInput, Plan, Reshard
from whale.ir.program import Node, Program, Ref, make_const
from whale.ir.values import UNMOVABLE, DType, TensorType, find_numpy_dtype, require_static_shape
from whale.passes.analysis.scopes import has_split_scopes, ranks_of_scope, with_paths, with_ranks
from whale.passes.propagation.graph_layout import GraphLayout
from whale.passes.propagation.partial_sums import reduce_partial_sums
from whale.passes.propagation.propagate import settle_layouts
from whale.passes.propagation.reference_plan import ReferencePlan
from whale.passes.resharding.reshards import explicit_reshards, make_in_place
from whale.passes.verify.check import check
from whale.sharding_rules.graph import list_called_functions

BEFORE, EACH, AFTER = "before", "each", "after"
_LIKE = {"OnesLike": 1, "ZerosLike": 0}
_LOOKS = READS | {"VarHandleOp", "WhaleCommunicator"}  # stateful ops without effects; these two only yield handles


def time_plan(
    program: Program, micro_batches: int, rows: Mapping[str, Shard], streams: bool = False, statistics: bool = False
) -> tuple[Plan, dict[str, str]]:
    """Plans a rank's program over the time axis: an axis whose ``micro_batches`` coordinates run one after the other.

    Args:
      program: as ``untie_microbatches`` returns it.
      rows: name of each node that yields rows of the batch -> how micro-batches cut its result. Such nodes are inputs,
        slices of inputs, and receives of rows from other stages.
      streams: True if each micro-batch draws its own part of a random tensor with the batch's rows; False if the whole
        tensor is drawn before the micro-batches.
      statistics: True if each micro-batch takes batch statistics of its own rows.

    Returns:
      (the plan; node -> region: "before", "each" or "after").

    Raises:
      PlanError: a value of all micro-batches is needed before the last one is finished.
    """
    fixed = {
        name: Strategy((B,) * len(program.by_name[name].inputs), (cut,), "rows of a micro-batch")
        for name, cut in rows.items()
        if program.by_name[name].op == "WhaleRecv"
    }
    no_rows = {
        g: _find_strategies_without_rows(body, micro_batches) for g, body in {"": program, **program.functions}.items()
    }
    devices = tuple(f"micro-batch {i}" for i in range(micro_batches))
    inputs = tuple(BatchInput(name, cut, "micro-batches") for name, cut in rows.items())
    with suspend_garbage_collection():
        while True:
            layouts = _layouts(program, micro_batches, rows, statistics, streams, fixed, ReferencePlan(no_rows))
            plan = Plan(
                program=program.name,
                fingerprint="",
                size=micro_batches,
                devices=devices,
                batch_inputs=inputs,
                strategies={g: layout.strategies for g, layout in layouts.items()},
                returned={g: layout.outputs for g, layout in layouts.items()},
                reshards=explicit_reshards(program, layouts, micro_batches),
                microbatched=True,
            )
            corrected = _choose_sums_once(program, plan)
            level = {} if corrected else _levels(program, plan)
            corrected = corrected or _corrections(program, plan, level)
            if not corrected:
                check(program, plan)
                return plan, {name: (BEFORE, EACH, AFTER)[at] for name, at in level.items()}
            fixed.update(corrected)
            for body in [b for name in corrected for b in _list_bodies(program, program.by_name[name])]:
                no_rows.pop(body, None)  # a loop that is computed once communicates once


def _layouts(
    program: Program,
    parts: int,
    rows: Mapping[str, Shard],
    statistics: bool,
    streams: bool,
    fixed: Mapping[str, Strategy],
    no_rows: ReferencePlan,
) -> dict[str, GraphLayout]:
    result = {}
    layouts = settle_layouts(program, parts, rows, statistics, streams, fixed=fixed, model=no_rows)
    for graph, layout in layouts.items():
        body = program if graph == "" else program.functions[graph]
        result[graph] = make_in_place(body, reduce_partial_sums(body, _replicate_once(layout), parts), parts)
    return result


def _replicate_once(layout: GraphLayout) -> GraphLayout:
    """Replaces first-rank placements (``O``) by replicated ones in a layout over time.

    A node that exists only at the first coordinate, and one whose value is equal at all, are both computed once per
    step.
    """

    def replicate(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
        return tuple(B if p == FIRST else p for p in placements)

    strategies = {
        name: Strategy(replicate(s.inputs), replicate(s.outputs), s.why) if s.once or FIRST in s.inputs else s
        for name, s in layout.strategies.items()
    }
    produced = {ref: B if p == FIRST else p for ref, p in layout.produced.items()}
    return GraphLayout(strategies, produced, layout.preferred, replicate(layout.outputs), layout.unruled)


def _crosses(r: Reshard) -> bool:
    """Returns True if the reshard, along the time axis, needs results of all micro-batches."""
    if isinstance(r.source, Replicate):
        return False
    return not (isinstance(r.source, Shard | PerRank) and isinstance(r.target, Partial | PerRank)) and not (
        isinstance(r.source, Partial) and isinstance(r.target, PerRank)
    )


def _level_of(plan: Plan, level: Mapping[str, int], ref: Ref, wanted: Placement) -> int:
    """Returns the level (see ``_levels``) at which the tensor ``ref`` is available in placement ``wanted``."""
    if plan.strategies[""][ref.node].outputs[ref.index] == wanted:
        return level[ref.node]
    r = plan.reshard_of["", ref, wanted]
    base = _level_of(plan, level, ref, r.source)
    return base + base % 2 if _crosses(r) else base


def _is_each(strategy: Strategy) -> bool:
    return any(not isinstance(p, Replicate) for p in strategy.inputs + strategy.outputs)


def _levels(program: Program, plan: Plan) -> dict[str, int]:
    """Returns the level of each node: 0 before the micro-batches, 1 in each of them, 2 after all of them.

    Level 3 would be a second round of micro-batches, and so on: odd levels run per micro-batch, even ones once per
    step.
    """
    strategies, level = plan.strategies[""], dict[str, int]()
    leading: set[str] = set()  # nodes on which something that each micro-batch computes depends
    for node in reversed(program.nodes):
        if node.name in leading or _is_each(strategies[node.name]):
            leading.update(r.node for r in node.inputs)
    for node in program.nodes:
        strategy = strategies[node.name]
        # A recomputed node has the level of its operands: its control edges are from gradients of its own micro-batch.
        waits_for = () if node.marks.recomputed else node.controls
        base = max((level[c] for c in waits_for), default=0)
        for ref, wanted in zip(node.inputs, strategy.inputs):
            base = max(base, _level_of(plan, level, ref, wanted))
        # On a rank without rows, sums are equal in each micro-batch; they run once, as on the ranks with rows.
        once = node.op in COLLECTIVES and node.name not in leading
        if _is_each(strategy) or base % 2 == 0 or once or has_effects(program, node):
            level[node.name] = base + (base % 2 != _is_each(strategy))
        else:
            # Equal in each micro-batch, and still computed in each: a loop's counter, a weight gathered at its use.
            level[node.name] = base
    return level


def _choose_sums_once(program: Program, plan: Plan) -> dict[str, Strategy]:
    """Returns strategies that make exchanges of sums over micro-batches run once, after the last micro-batch, by node
    name.

    Without them each micro-batch would all-reduce its own partial sum.
    """
    found: dict[str, Strategy] = {}
    for node in program.nodes:
        if node.op in EXCHANGES and any(
            isinstance(p, Partial | PerRank) for p in plan.strategies[""][node.name].inputs
        ):
            found[node.name] = _once(node, "moved once, after the last micro-batch")
    return found


def _corrections(program: Program, plan: Plan, level: Mapping[str, int]) -> dict[str, Strategy]:
    """Returns strategies by which some nodes run once per step, so that each micro-batch runs once; {} if nothing is to
    change.

    ``time_plan`` plans again with these strategies.

    Raises:
      PlanError: a micro-batch needs a value of all micro-batches, and no strategy avoids that.
    """
    strategies = plan.strategies[""]
    found: dict[str, Strategy] = {}
    updating, leading = _leading_to_updates(program), _leading_to_products(program)
    for node in program.nodes:
        if level[node.name] == 1 and node.op in HAS_BODIES and (summed := _find_sum_inside(plan, node)) is not None:
            if node.name in leading and any(
                isinstance(p, Shard | PerRank) for p in strategies[node.name].inputs + strategies[node.name].outputs
            ):
                raise _second_round(node, f"contains {summed}, which is summed over the whole batch", plan.size)
            found[node.name] = _once(node, "of what is summed inside: an update under a condition, an assertion")
        if level[node.name] != 3:
            continue
        if not any(
            isinstance(p, Shard | PerRank) for p in strategies[node.name].inputs + strategies[node.name].outputs
        ):
            found[node.name] = _once(node, "linear in what is summed before")
            continue
        if (
            node.inputs
            and (node.outputs or node.op in HAS_BODIES)
            and (_takes_whole(strategies[node.name]) or all(_is_whole(r, strategies, found) for r in node.inputs))
        ):
            found[node.name] = _once(node, "of what is whole, or computed once")
            continue
        if node.op not in HAS_BODIES and _has_no_rows(node, strategies, found):
            found[node.name] = _once(node, "of sums, which happen to be as large as the batch")
            continue
        if node.name not in updating and node.op not in HAS_BODIES:
            found[node.name] = _once(node, "only looked at, after the last micro-batch")
            continue
        before: dict[str, Strategy] = {}
        try:
            for ref in _find_sums_before(program, plan, level, node):
                before.update(_on_whole_batch(program, strategies, ref, node, plan.size))
        except AcrossMicroBatchesError:
            if node.name in leading:
                raise
            before = {node.name: _once(node, "of what an update is, after the last micro-batch")}
        found.update(before)
    return found


def _leading_to_products(program: Program) -> set[str]:
    """Returns the nodes on which a matrix product or convolution of the step depends, and these products themselves.

    What an optimizer computes from gradients is not among them, so it may run after the micro-batches.
    """
    found: set[str] = set()
    for node in reversed(program.nodes):
        if node.name in found or _has_products(program, node):
            found.update([node.name, *(r.node for r in node.inputs)])
    return found


def _has_products(program: Program, node: Node) -> bool:
    bodies = [program.functions[f.name] for f in list_called_functions(node)] if node.op in HAS_BODIES else []
    return node.op in CONTRACTIONS or any(_has_products(program, inner) for body in bodies for inner in body.nodes)


def _takes_whole(strategy: Strategy) -> bool:
    """Returns True if all operands of a node are replicated in time, so that running it once costs nothing extra.

    Planning has sharded only the result of such a node. An example is the gradient of a table that happens to have as
    many rows as the batch has words.
    """
    return all(isinstance(p, Replicate) for p in strategy.inputs)


def _is_whole(ref: Ref, strategies: Mapping[str, Strategy], once: Collection[str]) -> bool:
    return ref.node in once or strategies[ref.node].outputs[ref.index] == B


def _has_no_rows(node: Node, strategies: Mapping[str, Strategy], once: Collection[str]) -> bool:
    """Returns True if none of a node's operands has rows of the batch, so that the node can run once per step.

    Args:
      once: names of nodes for which it is already decided that they run once.
    """
    made = (strategies[r.node].outputs[r.index] for r in node.inputs if r.node not in once)
    return not any(isinstance(p, Shard | PerRank) for p in made)


def _leading_to_updates(program: Program) -> set[str]:
    """Returns the nodes on which some effect of the program depends, such as an update or a printed message.

    Other nodes are only fetched, as metrics are, and may run after the micro-batches.
    """
    found: set[str] = set()
    stack = list(program.effects)
    while stack:
        name = stack.pop()
        if name not in found:
            found.add(name)
            stack += [r.node for r in program.by_name[name].inputs]
            stack += program.by_name[name].controls
    return found


def _once(node: Node, why: str) -> Strategy:
    return Strategy((B,) * len(node.inputs), (B,) * len(node.outputs), why)


def _find_sums_before(program: Program, plan: Plan, level: Mapping[str, int], node: Node) -> list[Ref]:
    """Returns the sums over all micro-batches on which ``node``, which would run in a second round, waits."""
    strategies = plan.strategies[""]
    found, seen, stack = dict[Ref, None](), {node.name}, [node]
    while stack:
        reader = stack.pop()
        for ref, wanted in zip(reader.inputs, strategies[reader.name].inputs):
            if level[ref.node] == 1 and _level_of(plan, level, ref, wanted) == 2:
                found[ref] = None
            elif level[ref.node] in (2, 3) and ref.node not in seen:
                seen.add(ref.node)
                stack.append(program.by_name[ref.node])
        for name in () if reader.marks.recomputed else reader.controls:  # what it waits for may be late by a sum, too
            if level[name] in (2, 3) and name not in seen and not has_effects(program, program.by_name[name]):
                seen.add(name)
                stack.append(program.by_name[name])
    if not found:
        after = ", ".join(c for c in node.controls if level[c] > 1) or "a node that runs once, at the end"
        raise _second_round(node, f"has to run after {after}", plan.size)
    return list(found)


def _on_whole_batch(
    program: Program, strategies: Mapping[str, Strategy], ref: Ref, reader: Node, parts: int
) -> dict[str, Strategy]:
    """Returns strategies that compute ``ref``, and all nodes before it, on the whole batch before the first
    micro-batch.

    Args:
      reader: the node that reads ``ref`` in each micro-batch, for the error.
      parts: number of micro-batches, for the error.

    Raises:
      PlanError: ``ref`` depends on more than inputs and variables that the step does not write, or on rows of another
        stage.
    """
    found: dict[str, Strategy] = {}
    stack, seen = [ref.node], {ref.node}
    while stack:
        node = program.by_name[stack.pop()]
        if node.op == "WhaleCommunicator":
            continue  # exchanges that depend on inputs only can run before the micro-batches
        strategy = strategies[node.name]
        carries = any(program.find_type(r).dtype in UNMOVABLE for r in node.inputs) or any(
            t.dtype in UNMOVABLE for t in node.outputs
        )
        kept = node.op == "ReadVariableOp" and _is_kept(program, node.inputs[0])
        # Another stage sends its rows as it computes them, micro-batch by micro-batch.
        arriving = node.op == "WhaleRecv" and _is_each(strategy)
        if arriving or (node.op not in EXCHANGES and not kept and (node.stateful or carries or node.op in HAS_BODIES)):
            made = program.by_name[ref.node]
            _refuse_joined_rows(program, ref, parts)
            raise _second_round(
                reader, f"reads {ref} ({made.op}) of the whole batch, which depends on {node.name} ({node.op})", parts
            )
        if _is_each(strategy):
            found[node.name] = _once(node, "of the whole batch, before the micro-batches")
        for operand in () if kept else node.inputs:
            if operand.node not in seen:
                seen.add(operand.node)
                stack.append(operand.node)
    return found


def _is_kept(program: Program, handle: Ref) -> bool:
    """Returns True if no node of the step can write the variable, so that its value is known before the first
    micro-batch.
    """
    return all(reader.op in READS for reader, _ in program.consumers.get(handle, ()))


def _refuse_joined_rows(program: Program, ref: Ref, parts: int) -> None:
    """Raises PlanError if ranks gather rows of ``ref`` because a ``wh.split`` scope covers only some of the layers."""
    if not has_split_scopes(program):
        return  # without scopes, the gather is there because the operation itself needs all rows
    for reader, _ in program.consumers.get(ref, ()):
        if reader.op in ("WhaleAllGather", "WhaleAllToAll"):
            wants = _that_wants(program, reader)
            raise PlanError(
                "ranks would have to gather rows of a micro-batch where a scope that shards tensors begins or ends",
                op=f"{wants.name} ({wants.op})",
                given=f"{parts} micro-batches; each rank has other rows of {ref}, and the operation needs all of them",
                expected=f"rows of each rank in multiples of {parts}, the number of micro-batches; or a wh.split scope "
                "around the whole model; or no such scope",
                action="change the batch size, batch.shares or pipeline.micro_batches",
            )


def _that_wants(program: Program, node: Node) -> Node:
    """Returns the operation of the user's program for which lowering added ``node``."""
    while node.name.startswith("whale/"):
        found = next((reader for ref in node.list_refs() for reader, _ in program.consumers.get(ref, ())), None)
        if found is None:
            break
        node = found
    return node


def _find_sum_inside(plan: Plan, node: Node) -> Ref | None:
    """Returns a tensor inside a loop or branch that is summed over all micro-batches, which is impossible there; else
    None.
    """
    bodies = {func.name for func in list_called_functions(node)}
    return next((r.ref for r in plan.reshards if r.graph in bodies and _crosses(r)), None)


def _second_round(node: Node, given: str, parts: int) -> AcrossMicroBatchesError:
    return AcrossMicroBatchesError(
        "a value of all micro-batches is needed before the last one is finished",
        op=f"{node.name} ({node.op})",
        given=f"{parts} micro-batches; the operation {given}",
        expected="until the gradients are summed, values that each micro-batch computes by itself",
        action="set pipeline.micro_batches=1; if it is a batch statistic that each micro-batch may take of its own "
        "rows, set batch.norm_statistics=micro-batch",
    )


def untie_microbatches(program: Program) -> Program:
    """Removes control edges and operands that needlessly tie a micro-batch to the others.

    Removed are control edges of nodes without side effects, unless they wait for a side effect; control edges from
    assertions, except to nodes with side effects; and the operand of ZerosLike and OnesLike, if its shape is static.
    Recomputed nodes keep their control edges, which delay them until the backward pass. Scopes lose the ranks that they
    name, since the work is already divided over ranks.
    """
    if any(ranks_of_scope(node.scope) is not None for node in program.nodes):
        program = with_paths(program, lambda path: "/".join(with_ranks(part, ()) for part in path.split("/")))
    nodes: list[Node] = []
    behind_effects: set[str] = set()
    asserted: set[str] = set()  # assertions and nodes computed from them alone; only updates keep waiting for these
    waits: dict[str, tuple[str, ...]] = {}  # NoOp -> the nodes it waits for, for which its successors then wait
    for node in program.nodes:
        if node.controls:
            controls = tuple(dict.fromkeys(c for name in node.controls for c in waits.get(name, (name,))))
            node = replace(node, controls=controls)
        if node.op == "NoOp":
            waits[node.name] = node.controls
        does = has_effects(program, node)
        if (does and _asserts(program, node)) or (node.inputs and all(r.node in asserted for r in node.inputs)):
            asserted.add(node.name)
        if not does and not asserted.isdisjoint(node.controls):
            node = replace(node, controls=tuple(c for c in node.controls if c not in asserted))
        if node.controls and not node.stateful and not node.marks.recomputed:
            # The control edges that order the gathers of weights only need to hold within each micro-batch.
            kept = () if node.marks.gathered_at_use else tuple(c for c in node.controls if c in behind_effects)
            node = replace(node, controls=kept)
        if does or not behind_effects.isdisjoint([*(r.node for r in node.inputs), *node.controls]):
            behind_effects.add(node.name)
        if _is_nothing(node):
            node = make_const(
                node.name, np.zeros(require_static_shape(node.outputs[0]), find_numpy_dtype(node.outputs[0].dtype))
            )
        if node.op in _LIKE and node.outputs[0].is_static and node.outputs[0].dtype not in UNMOVABLE:
            (t,) = node.outputs
            value = np.full((), _LIKE[node.op], find_numpy_dtype(t.dtype))
            names = f"{node.name}/whale_dims", f"{node.name}/whale_value"
            nodes += [make_const(names[0], np.array(t.shape, np.int32)), make_const(names[1], value)]
            attrs = {"T": DType(t.dtype), "index_type": DType("int32")}
            filled = Ref(names[0]), Ref(names[1])
            node = replace(node, op="Fill", inputs=filled, attrs=attrs, controls=(), marks=NO_MARKS)
        nodes.append(node)
    return program.replace_nodes(tuple(nodes))


def _is_nothing(node: Node) -> bool:
    """Returns True if a node's result has no rows, as on a rank without rows, so that a constant can replace it."""
    if node.stateful or node.op in ("Const", "Placeholder") or len(node.outputs) != 1:
        return False
    t = node.outputs[0]
    return t.is_static and t.dtype not in UNMOVABLE and require_static_shape(t)[:1] == (0,)


def has_effects(program: Program, node: Node) -> bool:
    """Returns True if a node has side effects; a loop or branch that only reads variables has none."""
    if not node.stateful or node.op in _LOOKS or node.op in EXCHANGES:
        return False
    bodies = [program.functions[f.name] for f in list_called_functions(node)] if node.op in HAS_BODIES else []
    return not bodies or any(has_effects(program, inside) for body in bodies for inside in body.nodes)


def _asserts(program: Program, node: Node) -> bool:
    """Returns True if a node's only effect is to fail if a condition is false, as an Assert or a branch with one
    does.
    """
    if node.op == "Assert" or node.op not in HAS_BODIES:
        return node.op == "Assert"
    bodies = [program.functions[f.name] for f in list_called_functions(node)]
    return all(
        _asserts(program, inside) or not has_effects(program, inside) for body in bodies for inside in body.nodes
    )


def _find_strategies_without_rows(program: Program, micro_batches: int) -> dict[str, Strategy]:
    """Returns strategies for the collectives of rows on a rank that has no rows itself, by node name.

    With them the collectives run once per micro-batch, as on the ranks with rows. Without rows, planning would run them
    once per step, and the other ranks would wait forever.
    """
    found: dict[str, Strategy] = {}
    known: set[str] = set()  # constants, what is computed from them, and empty results of collectives
    for node in program.nodes:
        of_known = node.inputs and not node.stateful and all(r.node in known for r in node.inputs)
        if node.op == "Const" or of_known or (node.op in COLLECTIVES and all(map(_has_no_elements, node.outputs))):
            known.add(node.name)
        dim, runs = node.marks.runs or (0, 0)
        operands = node.inputs[1:]
        if (
            node.op in COLLECTIVES
            and runs == micro_batches
            and all(r.node in known or _has_no_elements(program.find_type(r)) for r in operands)
        ):
            types = [*map(program.find_type, operands), *node.outputs]
            # The division is computed per tensor, since the dimension of runs may be empty where there are no rows.
            cuts = [shard(dim, divide_evenly(require_static_shape(t)[dim], runs)) for t in types]
            found[node.name] = Strategy((B, *cuts[: len(operands)]), tuple(cuts[len(operands) :]), "no rows")
    return found


def _list_bodies(program: Program, node: Node) -> list[str]:
    """Returns the names of the functions that a loop or branch runs, including nested ones."""
    names = [f.name for f in list_called_functions(node)] if node.op in HAS_BODIES else []
    return [
        *names,
        *(b for name in names for inner in program.functions[name].nodes for b in _list_bodies(program, inner)),
    ]


def _has_no_elements(t: TensorType) -> bool:
    return t.is_static and 0 in require_static_shape(t)
