"""Explains a plan to its user: why an operation has its layout, why nothing is sharded, what causes most traffic.

``explain_matches`` answers ``whale explain`` for single operations: where the layout comes from, what moves because of
it, what else is legal. ``explain_undivided`` and ``explain_wide_weights`` give advice unasked: that every rank computes
all of a program; that weights are far larger than the rows they meet, so that a step sends little but their gradients.
What a saved plan says without its program is in ``whale.ir.plan_text``.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from whale.errors import PlanError
from whale.ir.layout import B, Partial, Placement, Shard, Strategy, count_moved_bytes, divide_evenly, shard
from whale.ir.ops import ASKS_SHAPE, CONTRACTIONS, DATASET_LOOPS, ITERATOR_READS, MATMULS
from whale.ir.plan import Plan
from whale.ir.plan_text import MOST_OPS, explain_operation, find_ops, format_bytes, format_layout
from whale.ir.program import Node, Program, Ref
from whale.ir.values import Dims
from whale.passes.analysis.resharding_cost import change_cost, fraction
from whale.sharding_rules import find_rule
from whale.sharding_rules.graph import make_op_view

MOST_ALTERNATIVES = 6
SHOWN_STEPS = 5  # first steps of a chain that are shown; the last two are shown as well
_READS = ITERATOR_READS - {"MakeIterator"}  # which reads no element
_LEAST_BYTES = 16 << 20  # smaller gradients are not worth advice: they take some milliseconds to send
_LEAST_RATIO = 8  # advice is given if a gradient has this many times the bytes of rows and results, there and back
_MOST_STEPS = 8  # of arithmetic between the product that computes a gradient and its all-reduce


def explain_matches(program: Program, plan: Plan, pattern: str) -> list[str]:
    """Describes the operations whose names match a pattern: layout, the chain back to the batch, and alternatives.

    Args:
      program: the plan's expanded program (see ``whale.passes.plan_builder.expand``).
      pattern: as of ``whale explain`` (see ``whale.ir.plan_text.find_ops``).

    Returns:
      Lines of text.

    Raises:
      PlanError: no operation matches.
    """
    lines: list[str] = []
    found = [name for name in find_ops(plan, pattern) if name in program.by_name]
    for name in found[:MOST_OPS]:
        node = program.by_name[name]
        lines += [f"{name}: {node.op}" + (f", in {node.scope}" if node.scope else "")]
        lines += explain_operation(plan, name, node)
        lines += [
            "  because  " + line if i == 0 else "           " + line
            for i, line in enumerate(_chain(program, plan, name))
        ]
        lines += _alternatives(program, plan, node)
        lines.append("")
    if len(found) > MOST_OPS:
        lines.append(f"... and {len(found) - MOST_OPS} more")
    return lines


def _chain(program: Program, plan: Plan, name: str) -> list[str]:
    """Follows sharded or partial operands from the operation back to the node where the sharding begins; returns a line
    for each step.
    """
    strategies, seen = plan.strategies[""], {name}
    lines: list[str] = []
    inputs = {b.name: b for b in plan.batch_inputs}
    while True:
        node, s = program.by_name[name], strategies[name]
        following = next(
            (
                (r, p)
                for r, p in zip(node.inputs, s.inputs)
                if isinstance(p, (Shard, Partial)) and r.node in strategies and r.node not in seen
            ),
            None,
        )
        if following is None:
            if name in inputs:
                lines.append(f"{name} is the batch, {inputs[name].placement}: {inputs[name].origin}")
            elif name in plan.variables:
                lines.append(f"{name} is a variable that is kept as {plan.variables[name]} between steps")
            break
        ref, wanted = following
        made = strategies[ref.node].outputs[ref.index]
        lines.append(
            f"{ref} comes as {made}"
            + ("" if made == wanted else f", wanted as {wanted},")
            + f" from {program.by_name[ref.node].op}"
        )
        name = ref.node
        seen.add(name)
    if len(lines) > SHOWN_STEPS + 2:
        lines = [*lines[:SHOWN_STEPS], f"... {len(lines) - SHOWN_STEPS - 2} steps ...", *lines[-2:]]
    return lines or ["none of its operands is split or partial"]


def _alternatives(program: Program, plan: Plan, node: Node) -> list[str]:
    rule, strategies = find_rule(node.op), plan.strategies[""]
    chosen = strategies[node.name]
    if rule is None:
        return [f"  else     no other layout: {node.op} has no sharding rule"]
    op = make_op_view(program, node, plan.size)
    made = [strategies[r.node].outputs[r.index] if r.node in strategies else B for r in node.inputs]
    options: dict[Strategy, None] = {}
    for current in _starts(made, [program.find_type(r).shape for r in node.inputs], plan.size):
        try:
            options.update(dict.fromkeys(rule.strategies(op, current)))
        except PlanError:
            continue
    rows = []
    work = fraction(chosen.inputs + chosen.outputs)
    own = _count_moved(program, plan, node, made, chosen)
    for option in options:
        if option.inputs == chosen.inputs and option.outputs == chosen.outputs:
            continue
        sent = _count_moved(program, plan, node, made, option)
        if sent is None or own is None:
            continue
        times = fraction(option.inputs + option.outputs) / work
        rows.append((sent - own, times, option))
    rows.sort(key=lambda e: (e[0], e[1]))
    lines = []
    for more, times, option in rows[:MOST_ALTERNATIVES]:
        sent_text = f"{'+' if more >= 0 else '-'}{format_bytes(abs(more))} a step"
        lines.append(f"  else     {format_layout(option):40} {sent_text:>18}, {times:.2g} x the work on a rank")
    return lines or ["  else     no other layout that its operands can be resharded to"]


def _starts(
    made: Sequence[Placement], shapes: Iterable[tuple[int | None, ...] | None], parts: int
) -> Iterable[list[Placement]]:
    """Yields lists of operand placements with which ``whale explain`` asks a node's rule for alternative strategies: as
    produced, all replicated, and one operand sharded along one of its first four dimensions.

    Args:
      made: placements of the operands as produced.
      shapes: shapes of the operands; None: unknown rank.
      parts: number of ranks.
    """
    yield list(made)
    yield [B] * len(made)
    for i, shape in enumerate(shapes):
        for dim, size in itertools.islice(enumerate(shape or ()), 4):
            if size and size >= parts:
                one: list[Placement] = [B] * len(made)
                one[i] = shard(dim, divide_evenly(size, parts))
                yield one


def _count_moved(program: Program, plan: Plan, node: Node, made: Sequence[Placement], option: Strategy) -> int | None:
    """Returns the bytes that a step would move with strategy ``option``, for the node's operands and the readers of its
    results; None if a reshard is impossible or a shape unknown.

    Args:
      made: placements of the operands as produced.
    """
    strategies, moved = plan.strategies[""], 0
    pairs = [(program.find_type(r), source, wanted) for r, source, wanted in zip(node.inputs, made, option.inputs)]
    for index, placement in enumerate(option.outputs):
        ref = Ref(node.name, index)
        wanted_by = {
            strategies[reader.name].inputs[at]
            for reader, at in program.consumers.get(ref, ())
            if reader.name in strategies
        }
        pairs += [(node.outputs[index], placement, wanted) for wanted in wanted_by]
    for tensor, source, wanted in pairs:
        if source == wanted:
            continue
        if not tensor.is_static or change_cost(tensor, source, wanted, plan.size) == float("inf"):
            return None
        moved += count_moved_bytes(source, wanted, tensor.bytes, plan.size)
    return moved


def explain_undivided(program: Program, plan: Plan) -> str:
    """Explains why every rank computes all of a program that could be divided, and what to do; "" if the program is
    divided.

    Args:
      program: the plan's expanded program.
    """
    if plan.size == 1 or plan.stage_groups or plan.inner is not None or plan.split_flops:
        return ""
    ops = {node.op for body in (program, *program.functions.values()) for node in body.nodes}
    if ops.isdisjoint(CONTRACTIONS):  # plan.total_flops would not do: it lacks functions that datasets call
        return ""
    if "MakeIterator" in ops or ops & DATASET_LOOPS:
        why = "it loops over a dataset itself"
        next_step = "take the loop out of it: `for batch in wh.shard(dataset): step(batch)`"
    elif ops & _READS:
        why = "it reads its batches itself, from an iterator in a loop or a branch"
        next_step = (
            "pass it a batch (`for batch in wh.shard(dataset): step(batch)`), or call next(iterator) outside of loops "
            "and branches"
        )
    elif not plan.batch_inputs:
        why = "none of its arguments has rows"
        next_step = "pass it the batch as an argument, as a tensor whose dimension 0 has the rows"
    else:
        names, end = ", ".join(b.name for b in plan.batch_inputs), _find_end_of_rows(program, plan)
        why = f"nothing that it computes from its batch ({names}) can be divided along the rows"
        next_step = "see where the rows end with `whale plan` and `whale explain`; name other inputs in batch.inputs"
        if end is not None:
            why = (
                f"the rows of its batch ({names}) end at `{end.op}` ({end.name}), whose results cannot be divided "
                "along them"
            )
            next_step = (
                "compute this operation in front of the step, or for each row by itself, with static shapes; or "
                "name other inputs in batch.inputs"
            )
    return f"every rank computes the whole program `{plan.program}`, since {why}; {next_step}"


def _find_end_of_rows(program: Program, plan: Plan) -> Node | None:
    """Returns the first operation with sharded rows as operand that cannot hand them on, though matrix products or
    convolutions follow; None if there is none.
    """
    rows: dict[Ref, Placement] = {Ref(b.name, 0): b.placement for b in plan.batch_inputs}
    for node in program.nodes:
        taken = [rows.get(ref, B) for ref in node.inputs]
        if node.op in ASKS_SHAPE or all(placement is B for placement in taken):
            continue
        going_on = next(iter(_list_strategies(program, plan, node, taken)), None)
        if going_on is not None:
            kept = zip(node.list_refs(), going_on.outputs)
            rows.update({ref: placement for ref, placement in kept if isinstance(placement, Shard)})
        elif _leads_to_products(program, node):
            return node
    return None


def _list_strategies(program: Program, plan: Plan, node: Node, taken: list[Placement]) -> list[Strategy]:
    """Lists the strategies of a node that take its sharded operands in the placements ``taken``."""
    rule = find_rule(node.op)
    if rule is None:
        return []
    try:
        options = rule.strategies(make_op_view(program, node, plan.size), taken)
    except PlanError:
        return []
    return [one for one in options if all(have is B or have == want for have, want in zip(taken, one.inputs))]


def _leads_to_products(program: Program, node: Node) -> bool:
    """Returns True if the node is a matrix product or convolution, or one depends on its results."""
    left, seen = [node], {node.name}
    while left:
        one = left.pop()
        if one.op in CONTRACTIONS:
            return True
        for ref in one.list_refs():
            readers = [reader for reader, _ in program.consumers.get(ref, ()) if reader.name not in seen]
            seen.update(reader.name for reader in readers)
            left += readers
    return False


@dataclass(frozen=True, slots=True)
class WideWeights:
    """Represents the weights of one shape whose gradients are larger than what sharding their layers would send.

    Attributes:
      shape: shape of each weight.
      gradient_bytes: bytes of the gradients of all of them.
      rows_bytes: bytes of the rows and results of their matrix products, forward and backward.
    """

    shape: Dims
    gradient_bytes: int
    rows_bytes: int


def explain_wide_weights(program: Program, plan: Plan) -> str:
    """Advises to split layers whose weight gradients are most of what the ranks all-reduce; "" if they are less than
    half.

    Args:
      program: the plan's expanded program.
    """
    found = find_wide_weights(program, plan)
    sent, all_sent = sum(one.gradient_bytes for one in found), _count_summed_bytes(program, plan)
    if not found or 2 * sent < all_sent:
        return ""
    named = []
    for one in found:
        names = [v.name.removesuffix(":0") for v in program.variables if v.type.shape == one.shape]
        shape = "x".join(map(str, one.shape))
        named.append(f"{names[0]} ({shape})" if len(names) == 1 else f"weights of {shape}")
    instead = format_bytes(sum(one.rows_bytes for one in found))
    return (
        f"of {format_bytes(all_sent)} of gradients that the ranks of `{plan.program}` all-reduce in a step, "
        f"{format_bytes(sent)} are of {', '.join(named)}, but the activations of these layers are only {instead}; "
        "put the layers that use these weights under `with wh.split():`, or set mesh.auto_parallel=True: then ranks "
        "send the activations instead of the gradients, and each rank updates its part of a weight only"
    )


def find_wide_weights(program: Program, plan: Plan) -> list[WideWeights]:
    """Finds the weights, grouped by shape, whose gradients are all-reduced although they are much larger than the rows
    of their products.
    """
    if plan.size == 1 or plan.stage_groups or plan.inner is not None:
        return []
    found: defaultdict[Dims, list[int]] = defaultdict(lambda: [0, 0])
    for ref in _list_summed(program, plan):
        product, gradient_bytes = _find_product(program, ref), program.find_type(ref).bytes
        if product is None or gradient_bytes < _LEAST_BYTES:
            continue
        rows_bytes = 2 * sum(program.find_type(r).bytes for r in product.inputs)
        if gradient_bytes >= _LEAST_RATIO * rows_bytes:
            both = found[program.find_type(ref).shape or ()]
            both[0] += gradient_bytes
            both[1] += rows_bytes
    return [WideWeights(shape, *both) for shape, both in found.items()]


def _list_summed(program: Program, plan: Plan) -> list[Ref]:
    """Lists the tensors of the program (without its functions) that are all-reduced over the ranks."""
    return [
        r.ref
        for r in plan.reshards
        if not r.graph and isinstance(r.source, Partial) and r.target == B and program.find_type(r.ref).is_static
    ]


def _count_summed_bytes(program: Program, plan: Plan) -> int:
    return sum(program.find_type(ref).bytes for ref in _list_summed(program, plan))


def _find_product(program: Program, ref: Ref) -> Node | None:
    """Returns the matrix product that computes a gradient, looking back through elementwise arithmetic; None if there
    is none.
    """
    t = program.find_type(ref)
    for _ in range(_MOST_STEPS):
        node = program.by_name[ref.node]
        if node.op in MATMULS:
            return node if all(program.find_type(r).is_static for r in node.inputs) else None
        alike = [r for r in node.inputs if program.find_type(r) == t]
        if len(alike) != 1:
            return None
        (ref,) = alike
    return None
