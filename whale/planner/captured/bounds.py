"""What ways to spread a captured program take at least, by its operations: what cannot be fastest is not planned.

Speed                   a kind of rank
alone                   every rank does everything
of_pipelines            stages and micro-batches
of_divided_state        rows divided, and the optimizer's state
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from cost_model.captured.graph import MAY_BE_FUSED
from cost_model.captured.machine import Rates
from whale.ir.program import Node, Program, Ref
from whale.planner.captured.pipelines import chain, levels
from whale.planner.captured.ways import Choice, trained_weights, updates


@dataclass(frozen=True)
class Speed:
    """A kind of rank, by what it takes for operations.

    Attributes:
      seconds: of a node on the whole batch.
      start_s: what an operation takes whatever its rows.
    """

    seconds: Callable[[Node], float]
    start_s: float


def of_pipelines(
    program: Program, whole: Program, kinds: Sequence[Speed], equal_rows: bool
) -> Callable[[Choice], float]:
    """What pipelines take at least, by the operations that each micro-batch repeats.

    Of ``count`` micro-batches a stage does all, after the stages before it have sent it the first one, and they go on
    with the last one afterwards. And of ``n`` stages the slowest one does all, and the first and last wait for the
    others once; so if one micro-batch takes ``t`` in all stages together, a step takes ``t * (1 + (count - 1) / n)``.

    Args:
        whole: the program with its updates as they run.
        kinds: of each rank.
        equal_rows: all ranks of a stage have as many rows, so that it waits for its slowest one.
    """
    of_rows = {*program.inputs}
    for node in program.nodes:
        if any(ref.node in of_rows for ref in node.inputs):
            of_rows.add(node.name)
    at = levels(program)
    counted = [
        (program.by_name[name], level)
        for name, level in (at.forward | at.backward).items()
        if name in of_rows and name in whole.by_name and program.by_name[name].op not in MAY_BE_FUSED
    ]
    weights = len(chain(program))
    # Up to a weight of the chain: seconds, and how many operations take any.
    sums: dict[Speed, list[tuple[float, int]]] = {}
    for kind in dict.fromkeys(kinds):
        seconds, started = [0.0] * weights, [0] * weights
        for node, level in counted:
            taken_s = kind.seconds(node)
            seconds[level] += taken_s
            started[level] += taken_s > 0.0
        sums[kind] = list(zip(accumulate(seconds, initial=0.0), accumulate(started, initial=0)))

    def of_stage(kind: Speed, low: int, high: int, parts: int) -> float:
        (before_s, before), (until_s, until) = sums[kind][low], sums[kind][high]
        started_s = kind.start_s * (until - before)
        return started_s + max(0.0, until_s - before_s - started_s) / parts

    def least(choice: Choice) -> float:
        count, stages = choice.micro_batches, len(choice.stages)
        ends = [0, *choice.cuts, weights]
        pick = max if equal_rows else min
        each = [
            pick(of_stage(kinds[rank], low, high, count * len(group)) for rank in group)
            for low, high, group in zip(ends, ends[1:], choice.stages)
        ]
        filled = accumulate(each, initial=0.0)
        return max(sum(each) * (1 + (count - 1) / stages), *(count * one + first for one, first in zip(each, filled)))

    return least


def alone(program: Program, seconds: Callable[[Node], float]) -> float:
    """What a rank takes at least that does everything: all operations, one after the other."""
    return sum(seconds(node) for node in program.nodes if node.op not in MAY_BE_FUSED)


def of_divided_state(
    program: Program, whole: Program, seconds: Callable[[Node], float], rates: Sequence[Rates], state: Collection[str]
) -> float:
    """What ranks take at least that divide rows and the optimizer's state: all operations divided evenly, and for each
    weight whose new value is computed of such state a gather of it, and what ranks send of it and of its gradient.

    Sums travel together, but neither their parts nor gathers do (`whale.passes.exchange.fuse_all_reduces`).

    Args:
        whole: the program with its updates as they run.
        seconds: of one node on the whole batch, on the fastest rank.
        state: handles of variables that lie split.
    """
    size, start_s = len(rates), min(one.start_s for one in rates)
    each = [seconds(node) for node in whole.nodes if node.op not in MAY_BE_FUSED]
    started_s = start_s * sum(one > 0.0 for one in each)
    computed_s = started_s + max(0.0, sum(each) - started_s) / size
    if not rates[0].exchanges_compute:
        return computed_s
    of_state = set(state)
    for node in program.nodes:
        if any(ref.node in of_state for ref in node.inputs):
            of_state.add(node.name)
    sizes = trained_weights(program)
    gathered = {
        handle: sizes[handle]
        for node in program.nodes
        for handle in updates(program, node)
        if handle in sizes and handle not in state and any(r.node in of_state for r in node.inputs if r != Ref(handle))
    }
    sent_bytes = 2 * sum(gathered.values()) * (size - 1) / size
    links = [rate.link(through) for rate in rates for through in ("", "devices")]
    exchange_s, bytes_per_s = min(link.exchange_s for link in links), max(link.bytes_per_s for link in links)
    return computed_s + len(gathered) * exchange_s + sent_bytes / bytes_per_s
