"""Simulates a step with faster or slower networks and devices on a grid of values, for the sliders of a plan's page.

sliders                for a described model's plan, simulated on changed clusters
make_captured_sliders  for a script's plan, whose ranks' programs are simulated at other speeds
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import msgspec

from cost_model.cluster.cluster_file import Cluster
from cost_model.cluster.pools import Machines
from cost_model.graph.machine import Machine
from cost_model.graph.predict import what_if_seconds
from whale.ir.program import Program
from whale.planner.evaluate import ModelEvaluator
from whale.planner.report.planfile import PlanFile

NETWORK = (0.25, 0.5, 1.0, 2.0, 4.0)  # factors of the bandwidth between hosts
SHARES = (0.4, 0.6, 0.8, 1.0)  # factors of the speed of devices
KINDS = 2  # most kinds of devices that have a slider
DEVICES = 4096  # plans with more devices have no sliders, so that a page is written in seconds
SPEEDS = (0.5, 0.75, 1.0, 1.5, 2.0)  # factors of the speed of all ranks' kernels
NODES, MANY = 60_000, 8_000  # nodes of all ranks' programs above which there are no sliders, or every second value


def sliders(plan: PlanFile, machines: Machines) -> dict[str, Any] | None:
    """Returns the sliders and the step's seconds at each grid point; None: the plan has too many devices.

    The strategy stays the same and is simulated on changed clusters. In the list of seconds the last slider varies
    fastest.
    """
    if plan.strategy.ranks > DEVICES:
        return None
    used = sorted({part.pool for stage in plan.strategy.stages for part in stage.parts})[:KINDS]
    networks = NETWORK if machines.cluster.networks else (1.0,)
    step_s = []
    for place in product(networks, *[SHARES] * len(used)):
        other = Machines(_change(machines.cluster, place[0], machines, used, place[1:]))
        step_s.append(float(f"{ModelEvaluator(plan.model(other), other).evaluate(plan.strategy).step_s:.5g}"))
    axes = [("bandwidth between hosts", [f"{value:g} x" for value in networks], networks.index(1.0))]
    axes += [(f"speed of {machines.pools[pool].name}", [f"{s:.0%}" for s in SHARES], len(SHARES) - 1) for pool in used]
    return {"axes": axes, "step_s": step_s}


def _change(
    cluster: Cluster, network: float, machines: Machines, used: Sequence[int], shares: Sequence[float]
) -> Cluster:
    replace = msgspec.structs.replace
    slower = {id(machines.pools[pool].entry): share for pool, share in zip(used, shares)}
    return replace(
        cluster,
        networks={
            name: replace(entry, oversubscription=entry.oversubscription / network)
            for name, entry in cluster.networks.items()
        },
        hosts=[
            replace(host, devices=[replace(d, share=d.share * slower.get(id(d), 1.0)) for d in host.devices])
            for host in cluster.hosts
        ],
    )


def make_captured_sliders(programs: Sequence[Program], machine: Machine, slowest: int) -> dict[str, Any] | None:
    """Returns sliders as `sliders` does, for ranks' programs; one of them slows a single rank down. None: too many
    nodes.

    Args:
        slowest: the rank that is predicted to end last, which the last slider slows down.
    """
    nodes = sum(len(p.nodes) for p in programs)
    if nodes > NODES:
        return None
    several, step = len(programs) > 1, 2 if nodes > MANY else 1
    networks, speeds = NETWORK[::step] if several else (1.0,), SPEEDS[::step]
    shares = SHARES[1::step] if several else (1.0,)
    paces = [
        [speed * (share if rank == slowest else 1.0) for rank in range(len(programs))]
        for speed, share in product(speeds, shares)
    ]
    axes = [
        ("speed of exchanges", [f"{value:g} x" for value in networks], networks.index(1.0)),
        ("speed of all ranks", [f"{value:g} x" for value in speeds], speeds.index(1.0)),
        (f"speed of rank {slowest} alone", [f"{s:.0%}" for s in shares], len(shares) - 1),
    ]
    step_s = [float(f"{s:.5g}") for s in what_if_seconds(programs, machine, networks, paces)]
    return {"axes": axes, "step_s": step_s}
