"""Plants faults in a copy of the product, one at a time, and says of each whether the tests find it.

    python -m tests.mutants                     all of them, with the tests that are named in the catalogue
    python -m tests.mutants frozen_rank ...     some of them, by name
    python -m tests.mutants --list              what there is
    python -m tests.mutants --whole ...         with all tests, where those of the catalogue find nothing

The tests that are named run on the product as it is first: one that fails there says nothing. The exit code is 1 if a
fault is not found, 2 if nothing can be said.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.mutants.catalogue import MUTANTS, Mutant
from tests.mutants.copy import Copy, Ended, copied

# Its test compares the catalogue with the product, and would find every fault.
_OTHERS = ("-x", "--ignore=tests/mutants", "tests")
PASSED = "all tests passed"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - |$)", re.MULTILINE)
_STARTED = re.compile(r"^(tests/\S+::\S.*?)(?: (?:PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b| *$)", re.MULTILINE)
_LIMIT_OF_PYTEST = re.compile(r"^Timeout \(\d+:\d\d:\d\d\)!", re.MULTILINE)  # as faulthandler says it


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict of tests on a fault: whether they find it, by which test, or why not."""

    is_found: bool
    what: str
    test: str = ""


def judged(ended: Ended, limit_s: float) -> Verdict:
    """Judges, by how a run of tests ended, whether it has found the fault in the product that it ran on."""
    started = _STARTED.findall(ended.output)
    last = started[-1] if started else "no test"
    if ended.code is None:
        return Verdict(False, f"no test's own limit ended {last} within {limit_s:g} s")
    if ended.code == 0:
        return Verdict(False, PASSED)
    if _LIMIT_OF_PYTEST.search(ended.output):
        return Verdict(True, f"hung: {last}", last)
    if ended.code < 0:
        return Verdict(True, f"crashed: {last}", last)
    failed = _FAILED.findall(ended.output)
    if ended.code != 1 or not failed:
        return Verdict(False, f"pytest ended with code {ended.code}: {ended.output.strip().splitlines()[-1]}")
    return Verdict(True, failed[0], failed[0])


def look(copy: Copy, mutant: Mutant, whole: bool, limit_s: float) -> Verdict:
    """Tries whether the tests find one fault."""
    with copy.planted(mutant):
        verdict = judged(copy.test(["-x", *mutant.found_by], limit_s), limit_s)
        if verdict.is_found or not whole:
            return verdict
        verdict = judged(copy.test(_OTHERS, limit_s), limit_s)
    if verdict.is_found and judged(copy.test([verdict.test], limit_s), limit_s).what != PASSED:
        return Verdict(False, f"{verdict.test} fails on the product as it is")
    return verdict


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tool; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Do the tests find planted faults?")
    parser.add_argument("names", nargs="*", metavar="name", help="faults of the catalogue; default: all")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument("--whole", action="store_true", help="run all tests where those of the catalogue find nothing")
    parser.add_argument("--limit", type=float, metavar="S", help="seconds for a fault; default: 600, with --whole 7200")
    options = parser.parse_args(arguments)
    known = {mutant.name: mutant for mutant in MUTANTS}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no such fault: {', '.join(unknown)}; --list says what there is")
    chosen = [known[name] for name in options.names] or list(MUTANTS)
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:<28} {mutant.kind:<14} {mutant.path}")
        return 0
    limit_s = options.limit or (7200.0 if options.whole else 600.0)
    width = max(len(mutant.name) for mutant in chosen)
    found = 0
    with copied() as copy:
        named = list(dict.fromkeys(test for mutant in chosen for test in mutant.found_by))
        before = copy.test(named, len(chosen) * limit_s)
        if before.code != 0:
            print(before.output, file=sys.stderr)
            print("the tests fail on the product as it is, and can say nothing about faults", file=sys.stderr)
            return 2
        print(f"the tests that are named pass on the product as it is ({before.seconds:.0f} s)", flush=True)
        for mutant in chosen:
            begin_s = time.monotonic()
            verdict = look(copy, mutant, options.whole, limit_s)
            found += verdict.is_found
            said = "found " if verdict.is_found else "MISSED"
            print(f"{said} {mutant.name:<{width}} {time.monotonic() - begin_s:5.0f} s  {verdict.what}", flush=True)
    print(f"found {found} of {len(chosen)}")
    return int(found < len(chosen))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as error:
        sys.exit(f"python -m tests.mutants: {error}")
