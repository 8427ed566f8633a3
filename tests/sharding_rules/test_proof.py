"""Every rule that has a case, proved: the op whole against the op on simulated shards."""

from __future__ import annotations

import pytest

from tests.sharding_rules.evaluate import tf
from tests.sharding_rules.golden import MISSING, RULES, differences, missing_lines, rule_lines
from tests.sharding_rules.prove import CASES, prove_all
from tests.sharding_rules.prover import Proof, prove
from tests.sharding_rules.sampling import F, case


@pytest.fixture(scope="module")
def proofs() -> list[Proof]:
    return prove_all()


def test_no_rule_is_wrong(proofs: list[Proof]):
    assert [str(f) for p in proofs for f in p.findings if f.kind == "wrong"] == []


def test_many_ops_and_strategies_were_run(proofs: list[Proof]):
    assert len({c.op for c in CASES}) >= 200
    assert sum(p.strategies for p in proofs) > 5000


def test_missing_strategies_are_the_known_ones(proofs: list[Proof]):
    if tf.__version__.split(".")[:2] == ["2", "21"]:
        assert differences(MISSING, missing_lines(proofs)) == []
    else:  # kernels of another release may refuse, or accept, other shards
        assert len(set(missing_lines(proofs)) - set(MISSING.read_text().splitlines())) < 10


def test_rules_read_as_reviewed():
    assert differences(RULES, rule_lines()) == [], "if that is meant: python -m tests.sharding_rules.golden --update"


def test_the_prover_finds_a_wrong_and_a_missing_rule():
    def shifted(op: str, attrs: object, inputs: list) -> list:
        return [inputs[0] - inputs[0].mean()]

    def unequal(op: str, attrs: object, inputs: list) -> list:
        return [inputs[0] * 2]

    wrong = prove(case("Relu", F(8, 3)), shifted)
    assert any(f.kind == "wrong" and f.strategy.startswith("S(0)") for f in wrong.findings)
    assert any(
        f.kind == "missing" and f.strategy == "P(sum) -> P(sum)" for f in prove(case("Relu", F(8, 3)), unequal).findings
    )
