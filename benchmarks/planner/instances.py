"""Small random planning problems, and their optimum by enumerating everything, independently of the search."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from cost_model.analytic.evaluate import evaluate
from cost_model.analytic.memory import part_memory
from cost_model.analytic.stacks import stack
from cost_model.analytic.stage_cache import StageCosts
from cost_model.cluster.cluster_file import Cluster, parse
from cost_model.cluster.pools import Machines
from whale.ir.strategy import DeviceGroup, ParallelStrategy, Recompute, Stage
from whale.planner.analytic_search.estimate import divisors
from whale.planner.analytic_search.layer_profiles import LayerProfile, Measured, TableLayer, TableModel

TYPES = (
    "v100-sxm2-32gb",
    "p100-pcie-16gb",
    "a100-sxm-40gb",
    "t4",
    "a100-sxm-80gb",
    "v100-sxm2-16gb",
    "h100-sxm-80gb",
    "l4",
)


@dataclass(frozen=True)
class Instance:
    """A model by tables, a cluster, a batch."""

    cluster: Cluster
    table: LayerProfile
    batch: int

    def model(self) -> TableModel:
        # A stack whose update hides nothing: what remains is in the tables.
        return TableModel(self.table, stack("megatron-2021"), Machines(self.cluster))


def instance(seed: int, names: tuple[str, ...] = TYPES) -> Instance:
    """Up to 8 devices of up to 4 kinds, up to 12 layers of unequal size, memory that often binds.

    Of every second instance the layers hold more, and are measured with activations computed again as well.
    """
    r = random.Random(seed)
    kinds = r.randint(1, 4)
    counts = [1] * kinds
    for _ in range(r.randint(0, 8 - kinds)):
        counts[r.randrange(kinds)] += 1
    layers, batch = r.randint(3, 12), r.choice([4, 6, 8, 12, 16])
    devices = r.sample(names, kinds)
    sizes = [r.uniform(0.3, 3.0) for _ in range(layers)]
    table_layers = [TableLayer(f"l{i}", 1, r.uniform(0.1, 1.8) * 1e8, r.choice([1e5, 1e6, 1e7])) for i in range(layers)]
    measured = []
    for device, count in zip(devices, counts):
        speed = r.uniform(0.3, 3.0)
        for tensor in (t for t in (1, 2) if t <= count):
            gain = 1.0 if tensor == 1 else r.uniform(1.2, 1.9)
            start = r.uniform(0.0, 3e-3)
            for rows in range(1, batch + 1):
                for layer, size in zip(table_layers, sizes):
                    forward = start / layers + 1e-3 * rows * size / speed / gain
                    measured.append(
                        Measured(layer.name, device, forward, 2 * forward, tensor, rows, 1e-4, 4e7 * rows * size)
                    )
    if seed % 2:
        of_again = random.Random(f"recompute {seed}")
        part, kept, more = of_again.uniform(0.8, 1.0), of_again.uniform(0.05, 0.3), of_again.uniform(1.0, 8.0)
        measured = [msgspec.structs.replace(m, memory_bytes=more * m.memory_bytes) for m in measured]
        measured += [
            msgspec.structs.replace(
                m, backward_s=m.backward_s + part * m.forward_s, memory_bytes=kept * m.memory_bytes, recompute="full"
            )
            for m in measured
        ]
    hosts = "\n".join(
        f"  - {{name: h{k}, devices: [{{type: {device}, count: {count}, memory_gb: {r.choice([5, 8, 12])}}}],"
        " networks: {fabric: {nics: 1}}}"
        for k, (device, count) in enumerate(zip(devices, counts))
    )
    cluster = parse(f"name: random-{seed}\nnetworks: {{fabric: {{type: infiniband-hdr-200}}}}\nhosts:\n{hosts}\n")
    return Instance(cluster, LayerProfile(table_layers, measured, f"random-{seed}"), batch)


def enumerate_best(
    one: Instance, zero: int, known_s: float = float("inf")
) -> tuple[float, ParallelStrategy | None, int]:
    """(seconds, strategy, chains simulated) of the fastest strategy that fits, among all without interleaving.

    Every ordered choice of devices for stages, every tensor degree per kind of device, every cut; of the divisions of a
    stage's rows, and of what it may compute again, the fastest that fits. Chains grow from the last stage, which says
    how many micro-batches a stage holds. One is left early only where no completion can be faster than `known_s` or the
    best so far: a stage's passes follow each other, before its first and after its last come those of the stages before
    it, and no stage before it is faster than if all devices that are left shared its layers without loss. None: nothing
    is faster than `known_s`.
    """
    best: tuple[float, ParallelStrategy | None] = (known_s, None)
    looked = 0
    for micro_batches in divisors(one.batch):
        chains = _Chains(one, micro_batches, zero, best)
        chains.visit(chains.model.count, chains.sizes, 0.0, 0.0)
        best, looked = chains.best, looked + chains.looked
    return (*best, looked)


class _Chains:
    """All chains of stages for one number of micro-batches."""

    def __init__(
        self, one: Instance, micro_batches: int, zero: int, best: tuple[float, ParallelStrategy | None]
    ) -> None:
        self.model = model = one.model()
        self.zero, self.micro_batches, self.best, self.looked = zero, micro_batches, best, 0
        self.stage_costs = StageCosts(model, model.machines)
        self.rows = one.batch // micro_batches
        self.sizes = tuple(pool.devices for pool in model.machines.pools)
        self.speeds = [_speed(model, pool, self.rows) for pool in range(len(self.sizes))]
        self.work = _work(model)
        choices = list(_stage_options(model, self.sizes, self.rows))
        most = min(sum(self.sizes), model.count)
        self.table = {
            (low, high, live): _options_for(model, model.machines, choices, low, high, live, zero)
            for low in range(model.count)
            for high in range(low + 1, model.count + 1)
            for live in range(1, min(most, micro_batches) + 1)
        }
        self.chain: list[tuple[int, int, tuple[DeviceGroup, ...], Recompute]] = []

    def visit(self, high: int, left: tuple[int, ...], total: float, least_s: float) -> None:
        """All choices for the layers before `high`, with the devices that are left.

        Args:
            total: seconds of one micro-batch on the stages so far.
            least_s: the largest, of these stages, of all micro-batches on it and one on those before it.
        """
        if high == 0:
            self.looked += 1
            stages = tuple(Stage(((a, b),), parts, again) for a, b, parts, again in reversed(self.chain))
            strategy = ParallelStrategy(stages, self.micro_batches, zero=self.zero)
            found = evaluate(self.model, self.model.machines, strategy, self.stage_costs)
            if found.fits and found.step_s < self.best[0] * (1 - 1e-12):
                self.best = found.step_s, strategy
            return
        count = self.micro_batches
        live = min(count, len(self.chain) + 1)
        for low in range(high - 1, -1, -1):
            for own, used, parts, again in self.table[low, high, live]:
                rest = tuple(n - u for n, u in zip(left, used))
                if min(rest) < 0:
                    continue
                before = 0.0
                if low:
                    speed = sum(n * s for n, s in zip(rest, self.speeds))
                    if not speed:
                        continue
                    before = self.rows * self.work[low] / speed
                ahead = max(least_s + own, count * own)
                last = max(ahead, total + own) + before
                if max(last, count * _fair(before, rest, low)) < self.best[0]:
                    self.chain.append((low, high, parts, again))
                    self.visit(low, rest, total + own, ahead)
                    self.chain.pop()


def _fair(before: float, rest: tuple[int, ...], low: int) -> float:
    """The slowest of the stages before, if they shared `before` seconds evenly: at least this long."""
    return before / max(1, min(sum(rest), low)) if low else 0.0


def _options_for(
    model: TableModel,
    machines: Machines,
    choices: list[tuple[tuple[int, ...], tuple[DeviceGroup, ...]]],
    low: int,
    high: int,
    live: int,
    zero: int,
) -> list[tuple[float, tuple[int, ...], tuple[DeviceGroup, ...], Recompute]]:
    """(seconds, devices, parts, recompute) of a stage of these layers that holds so many micro-batches and fits.

    The fastest one is first.
    """
    found: dict[tuple[object, ...], tuple[float, tuple[int, ...], tuple[DeviceGroup, ...], Recompute]] = {}
    whole = (low, high) == (0, model.count)
    for (used, parts), (again, _) in itertools.product(choices, model.recomputes()):
        costs = [model.layer_costs(p.pool, p.tensor, p.rows, again, False, 1) for p in parts]
        own = max(c.forward(low, high) for c in costs) + max(c.backward(low, high) for c in costs)
        key = (used, tuple(sorted({(p.pool, p.tensor) for p in parts})))
        if key in found and found[key][0] <= own:
            continue
        replicas = sum(p.replicas for p in parts)
        if all(
            part_memory(c, ((low, high),), p, replicas, live, zero, 1 if whole else 2).total_bytes
            <= machines.pools[p.pool].memory_bytes
            for c, p in zip(costs, parts)
        ):
            found[key] = own, used, parts, again
    return sorted(found.values(), key=lambda e: e[0])


def _work(model: TableModel) -> list[float]:
    """Work before each layer, in seconds of one row on the first pool's device."""
    costs = model.layer_costs(0, 1, 1, "none", False, 1)
    return [a + b for a, b in zip(costs.forward_s, costs.backward_s)]


def _speed(model: TableModel, pool: int, rows: int) -> float:
    """Work (of the table's own unit, see `_work`) that one device of a pool does in a second at most."""
    work = _work(model)
    best = 0.0
    for tensor in model.tensor_degrees(pool):
        for n in range(1, rows + 1):
            costs = model.layer_costs(pool, tensor, n, "none", False, 1)
            for i in range(model.count):
                one = costs.forward(i, i + 1) + costs.backward(i, i + 1)
                best = max(best, n * (work[i + 1] - work[i]) / one / tensor)
    return best


def _stage_options(
    model: TableModel, sizes: tuple[int, ...], rows: int
) -> Iterator[tuple[tuple[int, ...], tuple[DeviceGroup, ...]]]:
    """Every choice of devices, tensor degrees and rows for one stage; what is slower at no less memory is left out."""
    for used in itertools.product(*(range(n + 1) for n in sizes)):
        chosen = [k for k, n in enumerate(used) if n]
        for tensors in itertools.product(*(model.tensor_degrees(k) for k in chosen)):
            if not chosen or any(used[k] % t for k, t in zip(chosen, tensors)):
                continue
            groups = [(k, t, used[k] // t) for k, t in zip(chosen, tensors)]
            if sum(g[2] for g in groups) > rows:
                continue
            for parts in _rows(groups, rows):
                yield used, parts


def _rows(groups: list[tuple[int, int, int]], rows: int) -> Iterator[tuple[DeviceGroup, ...]]:
    """Every division of rows, one replica after the other; replicas of a kind in falling order."""
    slots = [(k, t) for k, t, n in groups for _ in range(n)]

    def visit(at: int, left: int, before: list[int]) -> Iterator[list[int]]:
        if at == len(slots):
            if left == 0:
                yield before
            return
        same = at > 0 and slots[at] == slots[at - 1]
        for n in range(1, min(left, before[-1] if same else left) + 1):
            yield from visit(at + 1, left - n, [*before, n])

    for division in visit(0, rows, []):
        counted: dict[tuple[int, int, int], int] = {}
        for (k, t), n in zip(slots, division):
            counted[k, t, n] = counted.get((k, t, n), 0) + 1
        yield tuple(DeviceGroup(k, t, count, n) for (k, t, n), count in counted.items())
