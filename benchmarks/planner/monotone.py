"""Looks whether more devices, more time to search, or a busy machine ever give a slower plan: random clusters and
parts of them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
from multiprocessing.synchronize import Event

from cost_model.analytic.stacks import stack
from cost_model.analytic.transformer import Transformer
from cost_model.analytic.transformer_model import TransformerModel
from cost_model.cluster.cluster_file import Cluster, parse
from cost_model.cluster.pools import Machines
from whale.planner.analytic_search.candidates import Constraints
from whale.planner.analytic_search.search_sequence import find_best

KINDS = ("v100-sxm2-32gb", "p100-pcie-16gb", "a100-sxm-40gb", "t4", "a100-sxm-80gb", "h100-sxm-80gb")
NETWORKS = ("ethernet-25g", "infiniband-edr-100", "infiniband-hdr-200")
ROUNDING = 1e-9
HURRIED = 0.1  # of the budget, which gives a plan that the whole budget may not make slower
MODELS = (
    (4, 512, 8, 128),
    (8, 1024, 16, 512),
    (12, 2048, 16, 1024),
    (24, 1024, 16, 256),
)  # layers, hidden, heads, sequence


def case(seed: int) -> tuple[Transformer, int, Cluster, Cluster]:
    """(model, batch, a cluster of 1 to 3 kinds of hosts, the same with some hosts, kinds or devices of a host gone)."""
    r = random.Random(f"monotone {seed}")
    network, kinds = r.choice(NETWORKS), r.randint(1, 3)
    whole = [(device, r.randint(1, 4), r.choice((1, 2, 4, 8))) for device in r.sample(KINDS, kinds)]
    part = [
        (device, r.randint(0, hosts), r.choice([n for n in (1, 2, 4, 8) if n <= each])) for device, hosts, each in whole
    ]
    if not any(hosts for _, hosts, _ in part):
        part[0] = (part[0][0], 1, part[0][2])
    layers, hidden, heads, sequence = r.choice(MODELS)
    model = Transformer(layers, hidden, heads, sequence, 30720)
    return model, r.choice((8, 24, 32, 64)), _cluster(network, whole), _cluster(network, part)


def _cluster(network: str, groups: list[tuple[str, int, int]]) -> Cluster:
    rows = "".join(
        f"- {{name: {device}, count: {hosts}, devices: [{{type: {device}, count: {each}}}],"
        " networks: {f: {nics: 1}}}\n"
        for device, hosts, each in groups
        if hosts
    )
    return parse(f"name: random\nnetworks: {{f: {{type: {network}}}}}\nhosts:\n{rows}")


def best_s(model: Transformer, where: Cluster, batch: int, budget_s: float) -> float:
    """Seconds of the step that is found; infinite where nothing fits."""
    machines = Machines(where)
    described = TransformerModel(model, stack("megatron-2022"), machines)
    found = find_best(described, machines, batch, Constraints(budget_s=budget_s))
    return float("inf") if found is None else found.fastest_s


def compare(seed: int, budget_s: float) -> tuple[float, float]:
    """By what part more devices, and more time, made the plan of a case slower; not positive: they did not."""
    model, batch, whole, part = case(seed)
    more_s, fewer_s, hurried_s = (
        best_s(model, whole, batch, budget_s),
        best_s(model, part, batch, budget_s),
        best_s(model, whole, batch, HURRIED * budget_s),
    )
    return _slower(more_s, fewer_s), _slower(more_s, hurried_s)


def _slower(one_s: float, other_s: float) -> float:
    if other_s == float("inf"):
        return 0.0
    return one_s / other_s - 1.0


def monotone(options: argparse.Namespace) -> None:
    """Counts the cases in which more devices or more time gave a slower plan."""
    found = []
    for seed in range(options.first, options.first + options.count):
        found.append(compare(seed, options.budget))
        if max(found[-1]) > ROUNDING:
            print(
                f"case {seed}: {found[-1][0]:.2%} slower with more devices, {found[-1][1]:.2%} with more time",
                flush=True,
            )
    devices, budgets = (sum(one[i] > ROUNDING for one in found) for i in (0, 1))
    print(f"{len(found)} cases: {devices} slower with more devices, {budgets} with more time")


def under_load(options: argparse.Namespace) -> None:
    """Plans cases alone, and again beside twice as many busy processes as there are processors; counts other plans."""
    seeds = range(options.first, options.first + options.count)
    alone = [_planned(seed, options.budget) for seed in seeds]
    stop = multiprocessing.Event()
    busy = [multiprocessing.Process(target=_spin, args=(stop,), daemon=True) for _ in range(2 * (os.cpu_count() or 1))]
    for process in busy:
        process.start()
    try:
        beside = [_planned(seed, options.budget) for seed in seeds]
    finally:
        stop.set()
        for process in busy:
            process.join()
    for seed, one, other in zip(seeds, alone, beside):
        if one != other:
            print(f"case {seed}: {one} alone, {other} beside {len(busy)} busy processes", flush=True)
    other_plans = sum(one != other for one, other in zip(alone, beside))
    print(f"{len(alone)} cases: {other_plans} other plans beside {len(busy)} busy processes")


def _planned(seed: int, budget_s: float) -> str:
    """Returns the plan of a case's whole cluster as text; empty: nothing fits."""
    model, batch, whole, _ = case(seed)
    machines = Machines(whole)
    described = TransformerModel(model, stack("megatron-2022"), machines)
    found = find_best(described, machines, batch, Constraints(budget_s=budget_s))
    return "" if found is None else f"{found.strategy.format_summary()}, {found.evaluation.step_s!r} s"


def _spin(stop: Event) -> None:
    while not stop.is_set():
        sum(range(10_000))
