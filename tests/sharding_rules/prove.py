"""Prints what the prover finds: ``python -m tests.sharding_rules.prove [op ...]``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.sharding_rules import samples_math, samples_nn, samples_shape
from tests.sharding_rules.evaluate import evaluate
from tests.sharding_rules.prover import Case, Proof, prove

CASES: tuple[Case, ...] = (*samples_math.CASES, *samples_nn.CASES, *samples_shape.CASES)


def prove_all(cases: Sequence[Case] = CASES) -> list[Proof]:
    """The proof of every case."""
    return [prove(c, evaluate) for c in cases]


def main(ops: Sequence[str]) -> int:
    cases = [c for c in CASES if not ops or c.op in ops]
    untested = sorted(set(ops) - {c.op for c in cases})
    if untested:
        print(f"no case for {', '.join(untested)}: add one to tests/sharding_rules/samples_*.py, or correct the name")
        return 1
    proofs = prove_all(cases)
    findings = [f for p in proofs for f in p.findings]
    for kind in ("wrong", "missing"):
        for finding in findings:
            if finding.kind == kind:
                print(f"{kind:8}{finding}")
    wrong = sum(f.kind == "wrong" for f in findings)
    print(
        f"{len({c.op for c in cases})} op types, {len(cases)} cases, "
        f"{sum(p.strategies for p in proofs)} strategies run: "
        f"{wrong} wrong, {len(findings) - wrong} missing"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
