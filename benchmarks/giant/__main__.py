"""``python -m benchmarks.giant [WORD]``: bytes that giant layers move in a step, over ranks of this process.

Prints a row for each line (or those whose names contain the word): bytes that all ranks move together, those that have
to move, their ratio, and the difference from one device in float64. With the word "hot" alone, or none, a second table
has what hot rows save the busiest rank.
"""

from __future__ import annotations

import logging
import sys

from benchmarks.giant import classifier, embeddings, experts, hot, stages
from benchmarks.giant.measure import measure


def main(words: list[str]) -> None:
    lines = [*experts.lines(), *stages.lines(), *classifier.lines(), *embeddings.lines()]
    logging.getLogger("tensorflow").setLevel(logging.ERROR)  # steps of one class are traced once for each line
    print("| what | MiB moved | MiB wanted | ratio | difference |")
    print("|---|---|---|---|---|")
    for line in lines:
        if all(word in line.name for word in words):
            print(measure(line).text(), flush=True)
    if words in ([], ["hot"]):
        print("", *hot.lines(), sep="\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
