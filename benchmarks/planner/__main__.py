"""Measures the planner: `optimality`, `race`, `monotone`, `load`, `hands`, `jobs`, `offers`, `scale`, `published`,
`published-jobs`, `whale22`, by name.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import resource
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import NamedTuple

import msgspec

import cost_model.validation.cases as published_cases
from benchmarks.planner.hands import hands
from benchmarks.planner.instances import enumerate_best, instance
from benchmarks.planner.jobs import choose_offers, place_jobs
from benchmarks.planner.monotone import monotone, under_load
from benchmarks.planner.published_jobs import published_jobs
from cost_model.analytic.evaluate import Evaluation, evaluate
from cost_model.analytic.stacks import stack
from cost_model.analytic.transformer import Transformer
from cost_model.analytic.transformer_model import TransformerModel
from cost_model.cluster import cluster_file
from cost_model.cluster.cluster_file import Cluster
from cost_model.cluster.pools import Machines
from whale.ir.strategy import DeviceGroup, ParallelStrategy, Stage, divide_chunks
from whale.planner.analytic_search.candidates import Constraints
from whale.planner.analytic_search.search_sequence import find_best, search
from whale.planner.analytic_search.whale22 import flops_of, formula_1

GPT_175B = Transformer(layers=96, hidden=12288, heads=96, sequence=2048, vocabulary=51200)
AHEAD = 64  # instances that are waiting for a processor, or for those before them


def main() -> None:
    """Runs one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("optimality", help="random small instances against enumeration")
    verb.add_argument("--first", type=int, default=0)
    verb.add_argument("--count", type=int, default=200, help="instances in which something fits (default 200)")
    verb.add_argument("-v", action="store_true", dest="verbose")
    verb.set_defaults(call=optimality)
    verb = verbs.add_parser("scale", help="seconds and memory of large problems")
    verb.add_argument("--cases", type=int, help="the first so many of them (default: all)")
    verb.set_defaults(call=scale)
    verb = verbs.add_parser("race", help="what is found beside all plans of small problems and published ones of large")
    verb.add_argument("--first", type=int, default=0)
    verb.add_argument("--count", type=int, default=300, help="instances in which something fits (default 300)")
    verb.set_defaults(call=race)
    verb = verbs.add_parser("monotone", help="whether more devices or more time ever give a slower plan")
    verb.add_argument("--first", type=int, default=0)
    verb.add_argument("--count", type=int, default=200, help="cases (default 200)")
    verb.add_argument("--budget", type=float, default=2.5, help="of each search, in seconds (default 2.5)")
    verb.set_defaults(call=monotone)
    verb = verbs.add_parser("load", help="whether plans differ on a busy machine")
    verb.add_argument("--first", type=int, default=0)
    verb.add_argument("--count", type=int, default=10, help="cases (default 10)")
    verb.add_argument("--budget", type=float, default=0.5, help="of each search, in seconds (default 0.5)")
    verb.set_defaults(call=under_load)
    verb = verbs.add_parser("hands", help="whether random legal changes, or fixed choices, ever give a faster plan")
    verb.add_argument("--first", type=int, default=0)
    verb.add_argument("--count", type=int, default=300, help="cases in which something fits (default 300)")
    verb.add_argument("--moves", type=int, default=10_000, help="changes of each plan at most (default 10,000)")
    verb.add_argument("--sets", type=int, default=50, help="fixed choices of each plan at most (default 50)")
    verb.add_argument("--budget", type=float, help="of each search, in seconds (default: as `whale plan` has)")
    verb.add_argument("-v", action="store_true", dest="verbose")
    verb.set_defaults(call=hands)
    verb = verbs.add_parser("jobs", help="jobs placed on a cluster beside all schedules of them")
    verb.add_argument("--first", type=int, default=0)
    verb.add_argument("--count", type=int, default=100, help="cases in which something fits (default 100)")
    verb.add_argument("--budget", type=float, default=0.1, help="of each search, in seconds (default 0.1)")
    verb.add_argument("-v", action="store_true", dest="verbose")
    verb.set_defaults(call=place_jobs)
    verb = verbs.add_parser("offers", help="offers that are taken beside all sets of them")
    verb.add_argument("--first", type=int, default=0)
    verb.add_argument("--count", type=int, default=100, help="cases (default 100)")
    verb.add_argument("--budget", type=float, default=0.05, help="of each search, in seconds (default 0.05)")
    verb.set_defaults(call=choose_offers)
    verb = verbs.add_parser("published", help="the planner's choice beside published configurations")
    verb.add_argument("--rows", type=Path, default=published_cases.DATA / "megatron_sc21_table1_visible.csv")
    verb.set_defaults(call=published)
    verb = verbs.add_parser("published-jobs", help="ten published jobs as their authors divided them and as planned")
    verb.add_argument("--jobs", type=int, nargs="*", help="numbers of some of them, from 0 (default: all)")
    verb.add_argument("--budget", type=float, default=5.0, help="of each plan, in seconds (default 5)")
    verb.add_argument("--each", type=float, default=1.0, help="of each price, in seconds (default 1)")
    verb.add_argument("--out", type=Path, help="folder of the page `published_jobs.md`, whose tables are written")
    verb.set_defaults(call=published_jobs)
    verbs.add_parser("whale22", help="shares on 8 V100 and 8 P100").set_defaults(call=whale22)
    options = parser.parse_args()
    options.call(options)


def optimality(options: argparse.Namespace) -> None:
    """Gap between the planner's step and the fastest of all plans without ZeRO, on random instances."""
    _optimality(options.first, options.count, (0,), options.verbose)


def race(options: argparse.Namespace) -> None:
    """The same with ZeRO 0 or 1, whichever is faster; then what is found beside published configurations."""
    _optimality(options.first, options.count, (0, 1), verbose=False)
    rows = published_cases.DATA / "megatron_sc21_table1_visible.csv"
    worst = max(found_s / own_s - 1 for own_s, found_s in _published_s(rows))
    print(f"what is found takes at most {worst:+.1%} beside the published configuration (negative: it is faster)")


class _Compared(NamedTuple):
    """What was found for one instance beside the best of all its plans; `inf` where nothing fits."""

    seed: int
    found_s: float
    best_s: float
    line: str


def _optimality(first: int, count: int, levels: tuple[int, ...], verbose: bool) -> None:
    """Instances from seed `first` on, on all processors, until `count` of them have a plan."""
    gaps: list[float] = []
    full, start_s = 0, time.monotonic()
    seeds = itertools.count(first)
    with Pool() as pool:
        # Some take minutes and most of them less than a second, so that many are under way at a time.
        waiting = deque(pool.apply_async(_compared, (levels, next(seeds))) for _ in range(AHEAD))
        while len(gaps) < count:
            one = waiting.popleft().get()
            waiting.append(pool.apply_async(_compared, (levels, next(seeds))))
            if one.found_s == one.best_s == float("inf"):
                full += 1
                continue
            gaps.append(max(0.0, one.found_s / one.best_s - 1))
            if verbose or gaps[-1] > 1e-6:
                print(f"seed {one.seed}: {one.line}, gap {gaps[-1]:.3%}", flush=True)
            if len(gaps) % 25 == 0:
                print(
                    f"{len(gaps)} of {count} instances after {time.monotonic() - start_s:.0f} s (seed {one.seed}), "
                    f"{sum(gap < 1e-6 for gap in gaps)} optimal, worst gap {max(gaps):.2%}",
                    flush=True,
                )
    optimal = sum(gap < 1e-6 for gap in gaps)
    print(
        f"{len(gaps)} instances: {optimal / len(gaps):.1%} optimal, worst gap {max(gaps):.2%}; "
        f"in {full} more nothing fits, by enumeration as well"
    )


def _compared(levels: tuple[int, ...], seed: int) -> _Compared:
    """One instance searched and enumerated with each of the ZeRO levels."""
    one = instance(seed)
    model = one.model()
    start_s = time.monotonic()
    limits = Constraints(zero=0 if levels == (0,) else None, budget_s=float("inf"), runnable=False)
    found = find_best(model, model.machines, one.batch, limits)
    found_s = float("inf") if found is None else found.fastest_s
    took_s = time.monotonic() - start_s
    best_s, looked = found_s, 0
    for zero in levels:
        best_s, _, more = enumerate_best(one, zero, best_s)
        looked += more
    line = (
        f"{model.machines.devices} devices of {len(model.machines.pools)} kinds, {model.count} layers, "
        f"batch {one.batch}, {took_s:.2f} s, {looked} simulated, {time.monotonic() - start_s:.1f} s in all"
    )
    return _Compared(seed, found_s, best_s, line)


def hosts(*groups: tuple[str, int, int]) -> Cluster:
    """A cluster of (device, hosts, adapters per host), eight devices each."""
    rows = "\n".join(
        f"  - {{name: {device}, count: {count}, devices: [{{type: {device}, count: 8}}],"
        f" networks: {{fabric: {{nics: {nics}}}}}}}"
        for device, count, nics in groups
    )
    return cluster_file.parse(f"name: mixed\nnetworks: {{fabric: {{type: infiniband-hdr-200}}}}\nhosts:\n{rows}\n")


def scale(options: argparse.Namespace) -> None:
    """Seconds on one core and the process's largest memory."""
    mixed = hosts(("v100-sxm2-32gb", 500, 1), ("a100-sxm-80gb", 500, 4), ("h100-sxm-80gb", 250, 8))
    small = hosts(("v100-sxm2-32gb", 32, 1), ("a100-sxm-80gb", 32, 4))
    deep = Transformer(layers=1024, hidden=2048, heads=16, sequence=1024, vocabulary=51200)
    four = [("v100-sxm2-32gb", 1), ("a100-sxm-40gb", 4), ("a100-sxm-80gb", 4), ("h100-sxm-80gb", 8)]
    few, many = (hosts(*((name, count, nics) for name, nics in four)) for count in (2, 512))
    gpt_2b = Transformer(layers=32, hidden=2560, heads=32, sequence=2048, vocabulary=51200)
    cases = [
        ("2.7B on 64 devices of four types", gpt_2b, few, 512, 2.5),
        ("175B on 16,384 devices of four types", GPT_175B, many, 3072, 8.0),
        ("175B on 512 mixed devices", GPT_175B, small, 1536, 10.0),
        ("175B on 512 mixed devices, 0.4 s allowed", GPT_175B, small, 1536, 0.4),
        ("175B on 10,000 mixed devices", GPT_175B, mixed, 3072, 8.0),
        ("1,024 layers on 64 devices", deep, hosts(("a100-sxm-80gb", 8, 4)), 256, 8.0),
    ]
    for name, transformer, machines_file, batch, budget_s in cases[: options.cases]:
        start_s, clock_s = time.process_time(), time.monotonic()
        machines = Machines(machines_file)
        model = TransformerModel(transformer, stack("megatron-2022"), machines)
        found = search(model, machines, batch, Constraints(budget_s=budget_s))
        took_s = time.process_time() - start_s
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(
            f"{name}: {took_s:.2f} s ({time.monotonic() - clock_s:.1f} on the clock), {peak_mb:.0f} MB, "
            f"{found.estimated} estimated, {found.simulated} simulated; "
            f"step {found.evaluation.step_s:.3f} s, bound {found.bound_s:.3f} s; {found.strategy.format_summary()}",
            flush=True,
        )


def published(options: argparse.Namespace) -> None:
    """For each row: the published configuration, the planner's with the same recompute, the former's rank."""
    for row, own, machines, model in _published(options.rows):
        for zero in (0, None):
            limits = Constraints(recompute=row["recompute"], zero=zero)
            found = search(model, machines, int(row["gbs"]), limits)
            shapes: dict[tuple[int, int, int], float] = {}
            for strategy, evaluation in [(found.strategy, found.evaluation), *found.others]:
                part = strategy.stages[0].parts[0]
                shape = len(strategy.stages), part.tensor, part.replicas
                shapes[shape] = min(shapes.get(shape, evaluation.step_s), evaluation.step_s)
            rank = 1 + sum(step_s < own.step_s * (1 - 1e-6) for step_s in shapes.values())
            print(
                f"{row['params_B']}B on {row['gpus']}: published {own.step_s:.3f} s, planner "
                f"({'no ZeRO' if zero == 0 else 'free'}) {found.evaluation.step_s:.3f} s: "
                f"{found.strategy.format_summary()}; "
                f"published is number {rank} of {len(shapes) + 1} divisions that were simulated",
                flush=True,
            )


def _published_s(rows: Path) -> Iterator[tuple[float, float]]:
    """(seconds of a published configuration, of what is found when all is free) for each row."""
    for row, own, machines, model in _published(rows):
        yield own.step_s, search(model, machines, int(row["gbs"])).evaluation.step_s


def _published(rows: Path) -> Iterator[tuple[dict[str, str], Evaluation, Machines, TransformerModel]]:
    """Each row, what its configuration takes, and as many hosts as it had with its model."""
    selene = published_cases.read_published_cluster("selene")
    with rows.open(newline="") as file:
        read = list(csv.DictReader(file))
    for row in read:
        host = msgspec.structs.replace(selene.hosts[0], count=-(-int(row["gpus"]) // 8))
        machines = Machines(msgspec.structs.replace(selene, hosts=[host]))
        transformer = Transformer(
            layers=int(row["layers"]),
            hidden=int(row["hidden"]),
            heads=int(row["heads"]),
            sequence=int(row["seq"]),
            vocabulary=int(row["vocab"]),
        )
        model = TransformerModel(transformer, stack("megatron-2021"), machines)
        yield row, evaluate(model, machines, _published_spread(row, transformer)), machines, model


def _published_spread(row: dict[str, str], transformer: Transformer) -> ParallelStrategy:
    stages, chunks = int(row["pp"]), int(row["vpp"])
    part = DeviceGroup(0, int(row["tp"]), int(row["dp"]), int(row["mbs"]))
    micro_batches = int(row["gbs"]) // (part.replicas * part.rows)
    layers = divide_chunks(transformer.layers, stages, chunks)
    return ParallelStrategy(tuple(Stage(own, (part,)) for own in layers), micro_batches, row["recompute"])  # type: ignore[arg-type]


def whale22(_: argparse.Namespace) -> None:
    """Shares of a batch on 8 V100 and 8 P100 by Formula 1."""
    machines = Machines(hosts(("v100-sxm2-32gb", 1, 1), ("p100-pcie-16gb", 1, 1)))
    model = TransformerModel(Transformer(24, 1024, 16, 128, 30720), stack("megatron-2021"), machines)
    flops = [f for f, pool in zip(flops_of(model, machines), machines.pools) for _ in range(pool.devices)]
    for batch in (128, 512, 1024):
        shares = formula_1(batch, flops)
        print(f"batch {batch}: V100 {shares[:8]}, P100 {shares[8:]}, ratio {sum(shares[8:]) / sum(shares[:8]):.3f}")


if __name__ == "__main__":
    main()
