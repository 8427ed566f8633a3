"""Random training steps, layouts and meshes: all ranks together compute what one device computes.

120 programs here; ``python -m tests.partition.test_training_programs --count 20000 --seed 7`` runs others.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.interpreter import run
from tests.partition.compare import assert_equal_mesh, assert_equal_runs, feeds_of
from tests.partition.random_programs import random_layouts
from tests.partition.training_programs import ROWS, training_step
from tests.programs import layouts_of, plan_of
from whale.errors import PlanError
from whale.ir.layout import Placement, shard
from whale.ir.mesh import Axis
from whale.ir.plan import BatchInput
from whale.ir.program import Program
from whale.partition.mesh import plan_program
from whale.passes.pass_manager import make_plan
from whale.passes.plan_builder import expand
from whale.passes.settings import PlanSettings

KINDS = ("cheapest", "any", "split", "groups")


@settings(max_examples=120)
@given(st.integers(0, 2**31))
def test_training_steps_on_random_meshes(seed: int) -> None:
    assume(not check_step(seed).startswith("refused"))


def check_step(seed: int) -> str:
    """Plans, lowers and runs one program, which follows from ``seed``; what was done."""
    draw = random.Random(seed)
    kind = draw.choice(KINDS)
    program = training_step(draw.getrandbits(32), scoped=kind in ("split", "groups"))
    parts = draw.randint(2, 4)
    if kind in ("cheapest", "any"):
        placed = _rows(program, parts, draw)
        if kind == "any":
            layouts = random_layouts(program, parts, placed, draw.getrandbits(32))
        else:
            layouts = layouts_of(program, parts, placed, reduced=draw.random() < 0.7)
        assert_equal_runs(program, plan_of(program, layouts, parts, placed, draw.choice([0, 200, 1 << 20])))
        return kind
    try:
        if kind == "split":
            batch = tuple(BatchInput(n, p, "test") for n, p in _rows(program, parts, draw).items())
            settings = PlanSettings(parts).but(batch__inputs=batch, split__state_only=draw.random() >= 0.8)
            plan = make_plan(program, settings)
            assert_equal_runs(expand(program, plan.expanded, settings), plan)
            return f"{kind}, variables {'split' if plan.variables else 'whole'}"
        mesh = draw.choice([(4, 2), (6, 2), (6, 3), (8, 4)])
        settings = PlanSettings(mesh[0], mesh=(Axis("tensor", mesh[1]),))
        plan = plan_program(program, settings)
    except PlanError as error:
        if str(error).startswith("nothing under a split scope"):
            return "refused: nothing to split"
        raise
    if plan.inner is None:
        return "no scope was drawn"
    assert_equal_mesh(program, plan, settings)
    return kind


def _rows(program: Program, parts: int, draw: random.Random) -> dict[str, Placement]:
    """The inputs' rows in shares of any sizes, empty ones too."""
    marks = sorted(draw.randint(0, ROWS) for _ in range(parts - 1))
    sizes = tuple(b - a for a, b in zip([0, *marks], [*marks, ROWS]))
    return {name: shard(0, sizes) for name in program.inputs}


def test_steps_are_differentiated_rightly() -> None:
    """The updates of a step are -0.1 times the slope of its loss."""
    for seed in range(4):
        program = training_step(seed)
        assert sum(n.op not in ("Const", "Placeholder", "VarHandleOp") for n in program.nodes) >= 40
        inputs, variables = feeds_of(program, seed)
        after = run([program], inputs, variables).ranks[0].variables
        rng = np.random.default_rng(seed)
        direction = {name: rng.normal(size=v.shape) for name, v in variables.items()}
        losses = [
            float(run([program], inputs, {n: v + step * direction[n] for n, v in variables.items()}).outputs[0][0])
            for step in (1e-5, -1e-5)
        ]
        slope = sum(float(((variables[n] - after[n]) / 0.1 * direction[n]).sum()) for n in variables)
        np.testing.assert_allclose((losses[0] - losses[1]) / 2e-5, slope, rtol=1e-5, atol=1e-7)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    done: Counter[str] = Counter()
    wrong = 0
    for seed in range(options.seed, options.seed + options.count):
        try:
            done[check_step(seed)] += 1
        except Exception as problem:  # the others go on
            wrong += 1
            print(f"seed {seed}: {type(problem).__name__}: {problem}", flush=True)
    for what, count in sorted(done.items()):
        print(f"{count:6d}  {what}")
    print(f"{options.count:6d} programs from seed {options.seed}, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
