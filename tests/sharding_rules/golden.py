"""The texts that a person reviews: one line per rule, and what the prover finds missing.

``python -m tests.sharding_rules.golden --update`` writes them anew; without the flag it prints the differences.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.sharding_rules.evaluate import evaluate
from tests.sharding_rules.prove import CASES, prove_all
from tests.sharding_rules.prover import Proof, view_of
from whale.errors import RuleError
from whale.sharding_rules import load_rules

RULES = Path(__file__).with_name("golden.txt")
MISSING = Path(__file__).with_name("missing.txt")


def rule_lines() -> list[str]:
    """One line per rule; rules that depend on the op show what they say for the first case of it."""
    examples = {c.op: c for c in reversed(CASES)}
    lines = []
    for name, rule in load_rules().items():
        text = f"{name:34} {rule.format_line()}"
        if not isinstance(rule.spec, str) and name in examples:
            case = examples[name]
            inputs = case.draw(0)
            op = view_of(case, inputs, evaluate(case.op, case.attrs, inputs), 2)
            text += f"\n{'':34}   {case.note}: {rule.write_line(op)}"
        lines.append(text)
    return lines


def missing_lines(proofs: Iterable[Proof]) -> list[str]:
    """What the rules forbid although the numbers agree, per op type."""
    found = {f"{f.case.split()[0]}: {f.strategy}" for p in proofs for f in p.findings if f.kind == "missing"}
    return sorted(found)


def differences(path: Path, lines: list[str]) -> list[str]:
    """Lines of a unified diff from the stored text to ``lines``."""
    return list(
        difflib.unified_diff(
            path.read_text().splitlines(), "\n".join(lines).splitlines(), path.name, "now", "", "", 0, ""
        )
    )


def main(flags: list[str]) -> int:
    texts = {RULES: rule_lines(), MISSING: missing_lines(prove_all())}
    if flags == ["--update"]:
        for path, lines in texts.items():
            path.write_text("".join(f"{line}\n" for line in lines))
        return 0
    if flags:
        raise RuleError(
            "an unknown flag", given=" ".join(flags), expected="--update or nothing", action="correct the call"
        )
    changed = [d for path, lines in texts.items() for d in differences(path, lines)]
    print("\n".join(changed))
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
