"""The oracle of these tests: all ranks' programs side by side against the global program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from tests.interpreter import Outcome, run
from whale.ir.layout import Shard
from whale.ir.mesh import Tiles, find_tiles, make_mesh
from whale.ir.plan import Plan, plan_from_json
from whale.ir.program import Program
from whale.partition.mesh import lower_mesh
from whale.partition.spmd import is_alike, is_surely_identical, partition_for_rank
from whale.passes.settings import PlanSettings

LIMIT = 1e-12


def feeds_of(program: Program, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Values for inputs and variables."""
    rng = np.random.default_rng(seed)
    types = {n: program.by_name[n].outputs[0] for n in program.inputs}
    inputs = {n: rng.normal(size=t.shape or ()) for n, t in types.items() if t.is_static}
    return inputs, {v.node: rng.normal(size=v.type.shape or ()) for v in program.variables}


def lowered(program: Program, plan: Plan) -> list[Program]:
    """What each rank runs: the same but for values, where the plan says that it surely is."""
    ranks = [partition_for_rank(program, plan, rank, "comm", program.name) for rank in range(plan.size)]
    if is_surely_identical(program, plan):
        assert all(is_alike(ranks[0], other) for other in ranks[1:])
    return ranks


def run_both(
    program: Program, plan: Plan, seed: int = 0, feeds: Mapping[str, np.ndarray] | None = None
) -> tuple[Outcome, Outcome]:
    """(global run, run of all ranks)."""
    inputs, variables = feeds_of(program, seed)
    inputs.update(feeds or {})
    held = [{name: own_part(plan, name, v, rank) for name, v in variables.items()} for rank in range(plan.size)]
    return run([program], inputs, variables, seed), run(lowered(program, plan), inputs, held, seed)


def own_part(plan: Plan, variable: str, value: np.ndarray, rank: int) -> np.ndarray:
    """What ``rank`` holds of a variable."""
    placement = plan.variables.get(variable)
    return value if placement is None else np.take(value, placement.list_indices(rank), axis=placement.dim)


def assert_equal_runs(
    program: Program, plan: Plan, seed: int = 0, feeds: Mapping[str, np.ndarray] | None = None
) -> Outcome:
    """Asserts that every rank fetches and stores what the global run does, and that the Plan says what was moved.

    Returns the run of all ranks.
    """
    whole, spread = run_both(program, plan, seed, feeds)
    for outputs in spread.outputs:
        for ref, expected, found in zip(program.outputs, whole.outputs[0], outputs):
            _assert_close(str(ref), expected, found, whole.largest)
    for rank in spread.ranks:
        for name, expected in whole.ranks[0].variables.items():
            mine = own_part(plan, name, expected, rank.number)
            _assert_close(f"variable {name} on rank {rank.number}", mine, rank.variables[name], whole.largest)
    printed = [rank.printed for rank in spread.ranks]
    assert len(printed[0]) == len(whole.ranks[0].printed) and not any(printed[1:]), "printed once, on the first rank"
    assert_communication_is_planned(program, plan, spread)
    return spread


def _assert_close(what: str, expected: np.ndarray, found: np.ndarray, scale: float) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype, what
    if expected.dtype == object:
        np.testing.assert_array_equal(found, expected, what)
        return
    np.testing.assert_allclose(found, expected, rtol=0, atol=LIMIT * max(1.0, scale), err_msg=what)


def assert_communication_is_planned(program: Program, plan: Plan, spread: Outcome) -> None:
    """Nothing moves but what the Plan says: each key, its bytes, once (where there are no loops)."""
    if program.functions:
        return
    expected: Counter[str] = Counter()
    for r in plan.reshards:
        if r.bytes:
            expected[f"whale/group_{r.group}" if r.group >= 0 else r.key] += r.bytes
    found: Counter[str] = Counter()
    for call in spread.calls:
        if call.bytes:
            found[call.key.rpartition("/")[0] if call.op == "WhaleSend" else call.key] += call.bytes
    assert found == expected


def assert_equal_mesh(
    program: Program, plan: Plan, settings: PlanSettings, feeds: Mapping[str, np.ndarray] | None = None
) -> Outcome:
    """``assert_equal_runs`` for a plan of two mesh axes: all ranks of all groups."""
    assert plan.inner is not None and plan_from_json(plan.to_json()) == plan
    tiles, mesh = find_tiles(plan), make_mesh(plan, range(plan.ranks))

    def held_by(rank: int, name: str, value: np.ndarray) -> np.ndarray:
        lies = tiles.get(name, Tiles())
        along = dict(zip((a.name for a in mesh.axes), mesh.find_coordinates(rank)))
        at = [along[axis] for axis in lies.axes]
        for cut, coordinate in zip(lies.list_cuts(at), at):
            value = np.take(value, cut.list_indices(coordinate), axis=cut.dim)
        return value

    inputs, variables = feeds_of(program)
    inputs.update(feeds or {})
    ranks = lower_mesh(program, plan, settings, range(settings.size), "comm", program.name)
    held = [{n: held_by(rank, n, v) for n, v in variables.items()} for rank in range(settings.size)]
    whole, spread = run([program], inputs, variables), run(ranks, inputs, held)
    for rank in spread.ranks:
        for ref, expected, found in zip(program.outputs, whole.outputs[0], spread.outputs[rank.number]):
            _assert_close(f"{ref} on rank {rank.number}", expected, found, whole.largest)
        for name, expected in whole.ranks[0].variables.items():
            mine = held_by(rank.number, name, expected)
            _assert_close(f"variable {name} on rank {rank.number}", mine, rank.variables[name], whole.largest)
    if not program.functions:
        moved = sum(call.bytes for call in spread.calls)
        # What only a rank without rows would read is not there to be sent.
        empty = any(isinstance(b.placement, Shard) and 0 in b.placement.sizes for b in plan.batch_inputs)
        assert moved <= plan.logical_bytes if empty else moved == plan.logical_bytes
    return spread
