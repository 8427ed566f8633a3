"""Compares drawn programs with one device: ``python -m tests.unknown_sizes [--first 0] [--count 500]``."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter

from tests.unknown_sizes.compare import compare


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m tests.unknown_sizes")
    arguments.add_argument("--first", type=int, default=0)
    arguments.add_argument("--count", type=int, default=500)
    asked = arguments.parse_args()
    found: Counter[str] = Counter()
    for number in range(asked.first, asked.first + asked.count):
        try:
            found[compare(number)] += 1
        except Exception:  # the others go on
            found["wrong"] += 1
            print(f"program {number}", traceback.format_exc(limit=-3), sep="\n", flush=True)
    print(f"programs {asked.first} to {asked.first + asked.count - 1}:", *(f"{n} {what}" for what, n in found.items()))
    return int(found["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
