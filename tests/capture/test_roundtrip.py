"""Every program of the zoo, captured and rebuilt, computes what it computed: to the last bit.

The Keras of the process decides which programs these are; TF_USE_LEGACY_KERAS=1 runs the same tests with Keras 2.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.capture.roundtrip import NORMALISED, ProgramSession, through_program
from tests.draws import one_of
from tests.zoo.case import Case, Setting, build, flavour
from tests.zoo.catalogue import CASES

pytestmark = pytest.mark.core
_STEPS = 2
_ALSO_RAW = {"mlp", "gpt", "lstm", "masked_bilstm", "tf1_mlp", "tf1_dynamic_rnn"}  # without passes, too
_BY_XLA = {"grouped"}  # what was compiled as one function is compiled op by op: equal but for rounding (tests/oracle)
_HERE = [
    pytest.param(case, id=case.name, marks=[pytest.mark.long] if case.heavy else [])
    for case in CASES
    if flavour() in case.flavours and case.name not in _BY_XLA
]


def _run(case: Case, setting: Setting) -> tuple[list[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    program = build(case, setting)
    start = program.variables()
    results = [program.run_step(batch) for batch in program.batches(_STEPS)]
    variables = program.variables()
    program.close()
    assert any(not np.array_equal(start[k], variables[k]) for k in start), "training changed nothing"
    return results, variables


def _same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> list[str]:
    assert a.keys() == b.keys()
    return [k for k in a if not np.array_equal(a[k], b[k], equal_nan=a[k].dtype.kind == "f")]


@pytest.mark.parametrize("case", one_of(8, _HERE))
def test_rebuilt_program_is_bit_exact(case: Case) -> None:
    setting = Setting(dtype=case.dtypes[0], optimizer=case.optimizers[-1])
    expected, expected_variables = _run(case, setting)
    for passes in ((), NORMALISED) if case.name in _ALSO_RAW else (NORMALISED,):
        seen: list = []
        changed = dataclasses.replace(
            setting,
            function=through_program(passes, seen),
            session=lambda graph, p=passes, s=seen: ProgramSession(graph, p, s),
        )
        results, variables = _run(case, changed)
        assert seen, "the program was never captured"
        differing = [name for a, b in zip(expected, results) for name in _same(a, b)]
        assert not differing
        assert not _same(expected_variables, variables)
