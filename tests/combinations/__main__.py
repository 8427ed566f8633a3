"""``python -m tests.combinations [--triples 300] [--only NAME ...] [--jobs 2] [--out docs/combinations.md]``.

``--out PAGE`` changes the cells that were run on the page, one by one, and leaves the others as they stand there; what
was mended since is run again by its names: ``--cells "tensor + loop" "zero 3 + scan" --out PAGE``. ``--left`` runs only
what the page does not know, so that a row may be run in several sittings: ``--only xla --size 2 --left --out PAGE``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from tests.combinations.features import BY_NAME, FEATURES, ON_GPUS, RANKS, Feature, clash
from tests.forkserver import warm_python
from tests.host_gpu.build import HostGpu, build_host_cuda, build_plugin
from whale.python import environment

ROOT = Path(__file__).resolve().parents[2]
Names = tuple[str, ...]
Outcome = tuple[str, str]
_LOOK_S = 0.5


def chosen(triples: int, only: list[str], seed: int = 0) -> list[Names]:
    """All pairs and some triples, the same each time with the same seed."""
    features = [f for f in FEATURES if not only or f.name in only]
    found: list[tuple[Feature, ...]] = [(f,) for f in features]
    found += [pair for pair in itertools.combinations(FEATURES if len(features) == 1 else features, 2)
              if not only or any(f in features for f in pair)]  # fmt: skip
    every = list(itertools.combinations(features, 3))
    random.Random(seed).shuffle(every)
    kept = [c for c in found if not clash(c)] + [c for c in every if not clash(c)][:triples]
    return [tuple(f.name for f in c) for c in kept]


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m tests.combinations")
    arguments.add_argument("--triples", type=int, default=0)
    arguments.add_argument("--seed", type=int, default=0, help="of the triples; 0: those of docs/combinations.md")
    arguments.add_argument("--only", nargs="+", default=[], choices=sorted(BY_NAME))
    arguments.add_argument("--jobs", type=int, default=1, help="processes beside each other")
    arguments.add_argument("--part", nargs=2, type=int, default=[0, 1], metavar=("NUMBER", "OF"), help="of the runs")
    arguments.add_argument("--size", type=int, choices=[1, 2, 3], help="only combinations of so many features")
    arguments.add_argument("--cells", nargs="+", default=[], metavar="'NAME + NAME'", help="these, and no others")
    arguments.add_argument("--out", type=Path, metavar="PAGE", help="takes the outcomes, each as soon as it is there")
    arguments.add_argument("--left", action="store_true", help="only what PAGE does not know, or has as WRONG")
    asked = arguments.parse_args()
    os.environ["WHALE_MESH_PLAN_CACHE"] = ""  # each is planned anew, also where an earlier run has its plan
    number, parts = asked.part
    combinations = [_named(cell) for cell in asked.cells] or chosen(asked.triples, asked.only, asked.seed)
    combinations = [c for c in combinations if asked.size in (None, len(c))][number::parts]
    rows, triples = read_page(asked.out.read_text()) if asked.out and asked.out.exists() else ({}, "")
    if asked.left:
        combinations = [c for c in combinations if rows.get(c, ("WRONG", ""))[0] == "WRONG"]
    done: dict[Names, Outcome] = {}
    without = [] if find_spec("horovod") else [c for c in combinations if "horovod" in c]
    if without:
        print(f"{len(without)} runs are left out: Horovod is not installed (python -m whale_ops.build_horovod)")
    between = [c for c in combinations if c not in without and _between_processes(c)]
    inside = [c for c in combinations if c not in without and c not in between]
    on_gpus = [c for c in between if ON_GPUS in c]
    between = [c for c in between if c not in on_gpus]
    for names, (kind, what) in itertools.chain(
        in_this_process(inside, asked.jobs), on_ranks(between), on_ranks(on_gpus)
    ):
        done[names] = kind, what
        print(f"{kind:8}{' + '.join(names):60}{what.splitlines()[0]}", flush=True)
        if asked.out:
            asked.out.write_text(write_page(rows | done, triples))
    count = {kind: sum(k == kind for k, _ in done.values()) for kind in ("equal", "refused", "WRONG")}
    print(", ".join(f"{n} {kind}" for kind, n in count.items()))
    return int(count["WRONG"] > 0)


def _named(cell: str) -> Names:
    """The features of a cell, in the order of the page."""
    asked = cell.split(" + ")
    if unknown := [name for name in asked if name not in BY_NAME]:
        raise SystemExit(f"no feature is called {unknown[0]!r}: {', '.join(BY_NAME)}")
    return tuple(name for name in BY_NAME if name in asked)


def _between_processes(names: Names) -> bool:
    return any("processes" in BY_NAME[name].marks for name in names)


def in_this_process(combinations: Sequence[Names], jobs: int) -> Iterator[tuple[Names, Outcome]]:
    """What comes out of each on ranks that are threads, in ``jobs`` processes."""
    if jobs > 1:
        with ThreadPoolExecutor(jobs) as pool:
            for part in pool.map(_in_another, (combinations[i::jobs] for i in range(jobs))):
                yield from part
        return
    with_two_devices()
    from tests.combinations.run import outcome

    for names in combinations:
        yield names, outcome([BY_NAME[name] for name in names])


def _in_another(combinations: Sequence[Names]) -> list[tuple[Names, Outcome]]:
    command = [warm_python(), "-m", "tests.combinations.on_ranks"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "asked.json").write_text(json.dumps(combinations))
        subprocess.run([*command, folder, "--alone"], cwd=ROOT, check=True)
        return list(zip(combinations, _said(Path(folder, "rank0.jsonl"))))


def on_ranks(combinations: Sequence[Names]) -> Iterator[tuple[Names, Outcome]]:
    """What comes out of each on ranks that are processes: that of the first, or WRONG where they do not agree.

    Ranks end at the first that is WRONG, after which they may be at different places; the rest goes to new ones.
    """
    left = list(combinations)
    while left:
        count = 0
        with tempfile.TemporaryDirectory() as folder:
            for said in _of_processes(left, folder):
                yield left[count], said
                count += 1
        left = left[count:]


def _of_processes(combinations: Sequence[Names], folder: str) -> Iterator[Outcome]:
    """Yields what comes out of each, as soon as all ranks have said it, up to the first that is WRONG."""
    Path(folder, "asked.json").write_text(json.dumps(combinations))
    command = [warm_python(), "-m", "whale", "run", "-np", str(RANKS), str(ROOT / "tests/combinations/on_ranks.py")]
    known = environment() | {"CUDA_VISIBLE_DEVICES": "-1"}
    if all(ON_GPUS in names for names in combinations):
        build_plugin()
        known |= build_host_cuda().variables(*[HostGpu(8 << 30, name=f"GPU {rank}") for rank in range(RANKS)])
        known["PYTHONPATH"] = str(ROOT)
        command[-1:] = [str(ROOT / "tests/host_gpu/on_host_gpus.py"), "none", command[-1]]
    errors = Path(folder, "errors")
    with errors.open("wb") as out:
        running = subprocess.Popen([*command, folder], cwd=ROOT, env=known, stdout=subprocess.DEVNULL, stderr=out)
    count = 0
    try:
        while count < len(combinations):
            has_ended = running.poll() is not None
            ranks = [_said(Path(folder, f"rank{rank}.jsonl")) for rank in range(RANKS)]
            for one in list(zip(*ranks))[count:]:
                count += 1
                if len({kind for kind, _ in one}) > 1:
                    one = (("WRONG", f"some ranks: {next(what for kind, what in one if kind != 'equal')}"),)
                yield one[0]
                if one[0][0] == "WRONG":
                    return
            if has_ended and count < len(combinations):
                yield "WRONG", " ".join(errors.read_text(errors="replace")[-600:].split())
                return
            time.sleep(_LOOK_S)
    finally:
        if count < len(combinations):  # ranks may be at different places
            running.terminate()
        running.wait()


def _said(path: Path) -> list[Outcome]:
    """Returns what a rank has said so far, in whole lines."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [(kind, what) for kind, what in map(json.loads, (line for line in lines if line.endswith("\n")))]


def with_two_devices() -> None:
    """The processor is two devices of TensorFlow, one of which computes for the other's memory; before it starts."""
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


def write_page(rows: dict[Names, Outcome], triples: str = "") -> str:
    """Returns the table of pairs, with the reasons of what is refused.

    Args:
        triples: what an earlier page says of them, which stands until some are run again.
    """
    pairs = {names: outcome for names, outcome in rows.items() if len(names) <= 2}
    order = {feature.name: number for number, feature in enumerate(FEATURES)}
    reasons: dict[str, int] = {}
    cells: dict[tuple[str, str], str] = {}
    for names in sorted(pairs, key=lambda names: [order[name] for name in (names[0], names[-1])]):
        kind, what = pairs[names]
        first, second = names[0], names[-1]
        number = reasons.setdefault(what.splitlines()[0], len(reasons) + 1) if kind == "refused" else 0
        cells[first, second] = cells[second, first] = "=" if kind == "equal" else f"({number})" if number else kind
    names_of = [f.name for f in FEATURES]
    lines = [
        "# Features with each other",
        "",
        "Written by `python -m tests.combinations --triples 300 --out docs/combinations.md`, and in parts (`--only",
        "NAME --size 2`, `--cells`), each of which changes the cells that it runs: eight ranks, a program of eight",
        "layers in float64, two steps. `=`: losses and weights are those of one device to 1e-10 (16 bits on the wire,",
        "and amp: to 2 %); a number: refused, with the reason below; empty: the two say the same thing in two ways; ?:",
        "not run (with horovod: it was not installed). Ranks are threads of one process; with shard, local batch,",
        "horovod and the host's GPUs they are processes. The last column is a GPU for each rank, of the tests' own",
        "(`tests/host_gpu`), and NCCL.",
        "",
        "| | " + " | ".join(str(i + 1) for i in range(len(names_of))) + " |",
        "|---" * (len(names_of) + 1) + "|",
    ]
    for i, name in enumerate(names_of):
        row = (cells.get((name, other)) or _unknown(name, other) for other in names_of)
        lines.append(f"| {i + 1} {name} | " + " | ".join(row) + " |")
    lines += ["", *(f"{number}. {reason}" for reason, number in reasons.items()), "", _of_triples(rows) or triples]
    return "\n".join(lines).rstrip() + "\n"


def read_page(text: str) -> tuple[dict[Names, Outcome], str]:
    """Returns what a page that `write_page` has written knows: outcomes of pairs, and what it says of triples.

    Differences of equal pairs are not on the page.
    """
    reason = r"(?m)^(\d+)\. (.+)$"
    reasons = {f"({number})": what for number, what in re.findall(reason, text)}
    known = {"=": ("equal", ""), "WRONG": ("WRONG", ""), **{cell: ("refused", what) for cell, what in reasons.items()}}
    rows = re.findall(r"(?m)^\| \d+ ([^|]+) \|(.*)\|$", text)
    columns = [name for name, _ in rows]
    found: dict[Names, Outcome] = {}
    for name, cells in rows:
        for other, cell in zip(columns, map(str.strip, cells.split("|"))):
            if cell in known and {name, other} <= BY_NAME.keys():
                found[_named(" + ".join([name, other]))] = known[cell]
    return found, re.sub(reason, "", text.rpartition("|\n")[2]).strip()


def _of_triples(rows: dict[Names, Outcome]) -> str:
    """Returns what the page says of the triples that were run, "" where none was."""
    kinds = [kind for names, (kind, _) in rows.items() if len(names) == 3]
    if not kinds:
        return ""
    lines = [f"Of {len(kinds)} triples {kinds.count('equal')} are equal and {kinds.count('refused')} refused."]
    lines += [f"* {' + '.join(names)}: {what.splitlines()[0]}" for names, what in _refused_of_equal_pairs(rows)]
    return "\n".join(lines)


def _refused_of_equal_pairs(rows: dict[Names, Outcome]) -> list[tuple[Names, str]]:
    """The triples that are refused though none of their pairs is."""
    refused = {names: what for names, (kind, what) in rows.items() if kind == "refused"}
    return [
        (names, what)
        for names, what in refused.items()
        if len(names) == 3 and refused.keys().isdisjoint(itertools.combinations(names, 2))
    ]


def _unknown(name: str, other: str) -> str:
    return "" if name != other and clash([BY_NAME[name], BY_NAME[other]]) else "?"


if __name__ == "__main__":
    sys.exit(main())
