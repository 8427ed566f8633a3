"""Makes the long draws one after the other, with a new seed each day, and says how long each took.

python -m tests.all_draws                     # an evening's: less than two hours on two cores that do nothing else
python -m tests.all_draws --seed 20261129     # those of another day
python -m tests.all_draws --times 4           # four times as many
python -m tests.all_draws --only oracle hosts
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.hosts.hosts import find_obstacle


@dataclass(frozen=True, slots=True)
class Size:
    """Says how much is drawn.

    Attributes:
        seed: what the draws follow from.
        times: how many times as much as in an evening.
    """

    seed: int
    times: float = 1.0

    def count(self, count: int) -> int:
        """Returns how many, where ``count`` fit into an evening."""
        return max(1, round(count * self.times))

    def part(self, parts: int) -> tuple[int, int]:
        """Returns (number from 0, of how many parts) of a table of which one of ``parts`` fits into an evening."""
        of = max(1, round(parts / self.times))
        return self.seed % of, of


@dataclass(frozen=True, slots=True)
class Draw:
    """Names a program of tests/ that draws, and what it is given.

    Attributes:
        program: below `tests`, as `python -m` has it.
        arguments: of a size; tables that are made whole have none.
        obstacle: returns why it cannot be made here, "" if it can.
    """

    program: str
    arguments: Callable[[Size], str] = lambda size: ""
    obstacle: Callable[[], str] = lambda: ""

    def command(self, size: Size) -> list[str]:
        """Returns what Python is given."""
        return ["-m", f"tests.{self.program}", *self.arguments(size).split()]


def _part_of_pairs(size: Size) -> str:
    part, parts = size.part(20)
    return f"--part {part} {parts}"


def _part_of_pipelines(size: Size) -> str:
    part, parts = size.part(3)
    return f"--part {part + 1}/{parts}"


# Sizes for some seven minutes each, and less where a whole table takes less.
DRAWS = (
    Draw("partition.test_training_programs", lambda s: f"--count {s.count(6000)} --seed {s.seed}"),
    Draw("oracle", lambda s: f"--draw {s.count(250)} --seed {s.seed}"),
    Draw("combinations", _part_of_pairs),
    Draw("combinations", lambda s: f"--size 3 --triples {s.count(100)} --seed {s.seed}"),
    Draw("pipelines", _part_of_pipelines),
    Draw("pipelines", lambda s: f"--draw {s.count(50)} --seed {s.seed}"),
    Draw("unknown_sizes", lambda s: f"--count {s.count(150)} --first {s.seed % 900 * 1000}"),
    Draw("keras_fit", lambda s: f"--ranks {2 + 2 * (s.seed % 2)}"),
    Draw("guides"),
    Draw("tf1"),
    Draw("elastic", lambda s: f"--count {s.count(50)} --seed {s.seed}"),
    Draw("hosts", lambda s: f"--count {s.count(30)} --seed {s.seed}", find_obstacle),
    Draw("faults", lambda s: f"--count {s.count(60)} --seed {s.seed}"),
    Draw("attack", lambda s: f"--ports 1 --plans {s.count(300)} --inputs {s.count(15000)} --seed {s.seed}"),
    Draw("attack", lambda s: f"--faults {s.count(50)} --seed {s.seed}"),
    Draw("checkpoints.kill", lambda s: f"--count {s.count(50)} --seed {s.seed}"),
    Draw("checkpoints.kill", lambda s: f"--store --count {s.count(30)} --seed {s.seed}"),
    # Programs below number 1,000,000: what comes after may race in TensorFlow itself.
    Draw("streams", lambda s: f"--kind orders --count {s.count(120)} --first {s.seed % 900 * 1000}"),
    Draw("streams", lambda s: f"--kind draws --count {s.count(120)} --first {s.seed % 900 * 1000}"),
)


def main(given: Sequence[str] | None = None) -> int:
    """Returns exit code 1 if one of them found something."""
    parser = argparse.ArgumentParser(prog="python -m tests.all_draws", description=__doc__.partition("\n")[0])
    today = int(datetime.date.today().strftime("%Y%m%d"))
    parser.add_argument("--seed", type=int, default=today, help=f"of all of them; today {today}")
    parser.add_argument("--times", type=float, default=1.0, help="how many times as much as in an evening")
    parser.add_argument("--only", nargs="+", choices=sorted({draw.program for draw in DRAWS}), help="these programs")
    asked = parser.parse_args(given)
    size = Size(asked.seed, asked.times)
    lines, failed, left_out = [], 0, 0
    for draw in DRAWS:
        if asked.only and draw.program not in asked.only:
            continue
        command = draw.command(size)
        line = " ".join(["python", *command])
        print(f"== {line}", flush=True)
        if obstacle := draw.obstacle():
            left_out += 1
            said = f"left out: {obstacle}"
        else:
            start_s = time.monotonic()
            code = subprocess.run([sys.executable, *command], check=False).returncode
            failed += code != 0
            said = f"{time.monotonic() - start_s:6.0f} s  {f'FAILED, exit code {code}' if code else 'passed'}"
        lines.append(f"{said}  {line}")
        print(said, flush=True)
    print("\n".join(["", *lines, f"{len(lines)} draws with seed {asked.seed}, {failed} failed, {left_out} left out"]))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
