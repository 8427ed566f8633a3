"""``python -m tests.combinations [--triples 300] [--only NAME ...] [--out docs/combinations.md]``."""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from pathlib import Path

from tests.combinations.features import BY_NAME, FEATURES, Feature, clash
from tests.combinations.run import outcome


def chosen(triples: int, only: list[str]) -> list[tuple[Feature, ...]]:
    """All pairs and some triples, the same each time."""
    features = [f for f in FEATURES if not only or f.name in only]
    found: list[tuple[Feature, ...]] = [(f,) for f in features]
    found += [pair for pair in itertools.combinations(FEATURES if len(features) == 1 else features, 2)
              if not only or any(f in features for f in pair)]  # fmt: skip
    every = list(itertools.combinations(features, 3))
    random.Random(0).shuffle(every)
    return [c for c in found if not clash(c)] + [c for c in every if not clash(c)][:triples]


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m tests.combinations")
    arguments.add_argument("--triples", type=int, default=0)
    arguments.add_argument("--only", nargs="+", default=[], choices=sorted(BY_NAME))
    arguments.add_argument("--out", type=Path)
    asked = arguments.parse_args()
    rows: dict[tuple[str, ...], tuple[str, str]] = {}
    for combination in chosen(asked.triples, asked.only):
        names = tuple(f.name for f in combination)
        rows[names] = outcome(combination)
        kind, what = rows[names]
        print(f"{kind:8}{' + '.join(names):60}{what.splitlines()[0]}", flush=True)
    if asked.out:
        asked.out.write_text(page(rows))
    count = {kind: sum(k == kind for k, _ in rows.values()) for kind in ("equal", "refused", "WRONG")}
    print(", ".join(f"{n} {kind}" for kind, n in count.items()))
    return int(count["WRONG"] > 0)


def page(rows: dict[tuple[str, ...], tuple[str, str]]) -> str:
    """The table of pairs, with the reasons of what is refused."""
    reasons: dict[str, int] = {}
    cells: dict[tuple[str, str], str] = {}
    for names, (kind, what) in rows.items():
        if len(names) > 2:
            continue
        first, second = names if len(names) == 2 else names * 2
        number = reasons.setdefault(what.splitlines()[0], len(reasons) + 1) if kind == "refused" else 0
        cells[first, second] = cells[second, first] = "=" if kind == "equal" else f"({number})" if number else "WRONG"
    names_of = [f.name for f in FEATURES]
    triples = [kind for names, (kind, _) in rows.items() if len(names) == 3]
    lines = [
        "# Features with each other",
        "",
        "Written by `python -m tests.combinations --triples 300 --out docs/combinations.md`: eight ranks, a program of",
        "eight layers in float64, two steps. `=`: losses and weights are those of one device to 1e-10 (16 bits on the",
        "wire: to 2 %); a number: refused, with the reason below; empty: the two say the same thing in two ways.",
        "",
        "| | " + " | ".join(str(i + 1) for i in range(len(names_of))) + " |",
        "|---" * (len(names_of) + 1) + "|",
    ]
    for i, name in enumerate(names_of):
        row = (cells.get((name, other), "") for other in names_of)
        lines.append(f"| {i + 1} {name} | " + " | ".join(row) + " |")
    lines += ["", *(f"{number}. {reason}" for reason, number in reasons.items()), ""]
    if triples:
        equal, refused = triples.count("equal"), triples.count("refused")
        lines.append(f"Of {len(triples)} triples {equal} are equal and {refused} refused.")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())
