"""Attacks Whale as far as one has time, and prints what did not hold.

    python -m tests.attack --ports 1 --plans 300 --inputs 20000 --faults 200 --seed 1 [--write]

--ports: rounds of the ten attacks on the launcher's port; --plans: changed plans of a script, which are refused or
train as one device; --inputs: changed files; --faults: ranks, workers, mpirun and launchers killed, stopped and worse,
at any moment of a run (``python -m tests.faults`` has ranks that call different things), from the fault ``--first`` of
those that the seed draws. ``--write`` puts the counts into the table of docs/reliability.md. Ends with code 1 if
anything was not as it must be.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
_Row = tuple[str, int, int, str]  # what, how many, with problems, figures


def ports(rounds: int) -> tuple[_Row, list[str]]:
    from tests.attack.control_port import ATTACKS, attack
    from tests.launcher.helpers import Launcher

    problems: list[str] = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="whale-attack-") as folder:
            problems += attack(Launcher(Path(folder)), ATTACKS)[0]
    return ("attacks on the launcher's port", rounds * len(ATTACKS), len(problems), "the run goes on"), problems


def plans(count: int, seed: int) -> tuple[_Row, list[str]]:
    import tensorflow as tf

    import whale as wh
    from tests.attack.plans import judged, trained

    tf.keras.backend.set_floatx("float64")

    def start(size: int, **config: object) -> None:
        wh.init({"communication.in_process_ranks": size, **config})

    found = judged(count, seed)
    with tempfile.TemporaryDirectory(prefix="whale-attack-") as folder:
        problems = found.problems + trained(Path(folder), found.legal, start)
    said = f"{found.unreadable + found.illegal} refused, {len(found.legal)} legal and trained"
    return ("changed plans of a script, two ranks", count, len(problems), said), problems


def inputs(count: int, seed: int) -> tuple[_Row, list[str]]:
    from tests.attack.inputs import Inputs

    with tempfile.TemporaryDirectory(prefix="whale-attack-") as folder:
        found = Inputs(Path(folder)).tried(count, seed)
    said = f"{found.answered} answered, {found.refused} refused, {found.slowest_s:.1f} s at most"
    return ("changed files, by the commands that read them", found.count, len(found.problems), said), found.problems


def faults(count: int, seed: int, first: int) -> tuple[_Row, list[str]]:
    from tests.attack.faults import Faults, table
    from tests.attack.faults import faults as drawn

    made, tried, problems = Faults(), [], []
    for number, fault in enumerate(drawn(first + count, seed)[first:], first):
        start_s = time.monotonic()
        outcome = made.make(fault)
        tried.append((fault, outcome))
        problems += [f"{fault}: {problem}" for problem in outcome.problems]
        print(f"{number + 1:4d}  {outcome.in_words}  run {time.monotonic() - start_s:.0f} s  {fault}", flush=True)
        print("".join(f"      WRONG: {problem}\n" for problem in outcome.problems), end="", flush=True)
    print(table(tried))
    wrong = sum(bool(outcome.problems) for _, outcome in tried)
    again = sum(outcome.restarted for _, outcome in tried)
    return ("faults in runs of 2, 4 and 8 ranks", count, wrong, f"{again} started again, with equal weights"), problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__.partition("\n")[0])
    for name in ("ports", "plans", "inputs", "faults"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if not (given.ports or given.plans or given.inputs or given.faults):
        parser.error("give --ports, --plans, --inputs or --faults")
    rows: list[_Row] = []
    wrong = 0
    start_s = time.monotonic()
    for asked, made in (
        (given.ports, lambda: ports(given.ports)),
        (given.plans, lambda: plans(given.plans, given.seed)),
        (given.inputs, lambda: inputs(given.inputs, given.seed)),
        (given.faults, lambda: faults(given.faults, given.seed, given.first)),
    ):
        if asked:
            row, problems = made()
            rows.append(row)
            wrong += len(problems)
            print(f"{row[0]}: {row[1]} tried, {row[2]} problems; {row[3]}", flush=True)
            print("".join(f"  WRONG: {problem}\n" for problem in problems), end="", flush=True)
    print(f"{wrong} problems in {time.monotonic() - start_s:.0f} s (seed {given.seed})")
    if given.write:
        write(rows)
    return int(wrong > 0)


def write(rows: list[_Row]) -> None:
    """Puts rows into the page's table, in the place of those about the same."""
    text = PAGE.read_text()
    for what, count, problems, said in rows:
        line = f"| {what} | {count:,} | {problems} | {said} |"
        text, found = re.subn(rf"^\| {re.escape(what)} \|.*$", line, text, flags=re.MULTILINE)
        if not found:
            text = text.replace("<!-- end of counts -->", f"{line}\n<!-- end of counts -->")
    PAGE.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
