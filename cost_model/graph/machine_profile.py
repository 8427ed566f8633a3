"""Stores measurements of a machine: operations, exchanges between its ranks, whole steps. A JSON file.

`whale profile` writes it. Operations are found by their signature; an operation that was not measured is assumed to
have the speed of the nearest one of its type, in proportion to its work.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from cost_model.graph.signature import signature
from cost_model.graph.traffic import Exchange
from cost_model.kernels.op_work import Work
from whale.errors import ClusterError
from whale.ir.ops import CONTRACTIONS, EINSUMS, FUSED_LOOP, MATMULS
from whale.ir.program import Node, Program
from whale.ir.topology import Link

FORMAT_VERSION = 3
_GPU = "GPU:"  # in TensorFlow's names of devices
PACKED = " packed"  # exchanges of that kind whose tensors do not lie in one piece
Positive = Annotated[float, Meta(gt=0)]
Amount = Annotated[float, Meta(ge=0)]


class Operation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measurement of one operation alone on a core: seconds, and memory beside its results."""

    signature: str
    op: str
    flops: Amount
    moved_bytes: Amount
    seconds: Positive
    scratch_bytes: int = 0


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured exchanges of one kind between so many ranks: (bytes of the tensor, seconds), by size.

    Attributes:
        through: the library that carried them between GPUs, as ``communication.backend`` names it; "": the host,
            between tensors in its memory.
    """

    kind: str
    ranks: Annotated[int, Meta(ge=2)]
    samples: Annotated[list[tuple[Amount, Positive]], Meta(min_length=1)]
    through: str = ""


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU of the host."""

    name: str
    memory_gb: Positive


class Copies(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Copies from one of TensorFlow's devices to another one, by its names: (bytes, seconds), by size."""

    source: str
    target: str
    samples: Annotated[list[tuple[Amount, Positive]], Meta(min_length=1)]


class HostLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The link between two hosts, by their names: as of ``whale.ir.topology.Link``."""

    one: str
    other: str
    exchange_s: Amount
    bytes_per_s: Positive


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whole steps without exchanges: measured seconds, and the seconds predicted from their operations alone.

    Attributes:
        program: fingerprint of the program, if it ran on one device; or of the program of a plan's first rank.
        copies: number of concurrent processes, each with the step; of a plan, its ranks.
    """

    program: str
    seconds: Positive
    predicted_s: Positive
    copies: Annotated[int, Meta(ge=1)] = 1


class MachineProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measurements of one machine.

    Attributes:
        host: its name.
        cores: that ranks may use, a quota counted in.
        memory_gb: of the host.
        call_s: what calling a step takes beside its operations.
        node_s: what the executor takes for a node that computes nothing.
        slice_s: how long a computing thread keeps its core when another waits for it.
        wake_s: what an engine waits for a core when all compute.
        operations, curves, steps: see there.
        gpus, copies: of a machine that has GPUs, which operations were measured on then.
        hosts: on how many the ranks of `curves` were; where there are several, each had one of them.
        links: between each two of these.
    """

    host: str
    cores: Positive
    memory_gb: Positive
    call_s: Amount
    node_s: Amount
    slice_s: Positive
    wake_s: Amount
    operations: list[Operation]
    curves: list[Curve]
    steps: list[Step] = []
    gpus: list[Gpu] = []
    copies: list[Copies] = []
    hosts: int = 1
    links: list[HostLink] = []
    version: int = FORMAT_VERSION

    def find_links(self, names: Sequence[str]) -> dict[tuple[int, int], Link]:
        """Returns the links between hosts of these names, by their positions; {}: not all of them were measured."""
        known = {frozenset((one.one, one.other)): Link(one.exchange_s, one.bytes_per_s) for one in self.links}
        pairs = [(i, j) for j in range(len(names)) for i in range(j)]
        found = {(i, j): link for i, j in pairs if (link := known.get(frozenset((names[i], names[j])))) is not None}
        return found if len(found) == len(pairs) else {}

    def slow_down(self, computing: float, exchanging: float) -> MachineProfile:
        """Returns the profile of a machine that takes so many times as long to compute, and for exchanges."""
        return msgspec.structs.replace(
            self,
            call_s=self.call_s * computing,
            node_s=self.node_s * computing,
            operations=[msgspec.structs.replace(one, seconds=one.seconds * computing) for one in self.operations],
            curves=[
                msgspec.structs.replace(one, samples=[(at, s * exchanging) for at, s in one.samples])
                for one in self.curves
            ],
            links=[
                HostLink(one.one, one.other, link.exchange_s, link.bytes_per_s)
                for one in self.links
                for link in [Link(one.exchange_s, one.bytes_per_s).slow_down(exchanging)]
            ],
        )

    def merge(self, operations: Iterable[Operation], steps: Iterable[Step] = ()) -> MachineProfile:
        """Returns the profile with further measurements, which replace older ones of the same name."""
        found = {o.signature: o for o in (*self.operations, *operations)}
        named = {(s.program, s.copies): s for s in (*self.steps, *steps)}
        return msgspec.structs.replace(self, operations=list(found.values()), steps=list(named.values()))


def default_path() -> Path:
    """Returns the default path of `whale profile`'s file."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "whale" / "profile.json"


def read(path: str | Path) -> MachineProfile:
    """Reads and checks a file of measurements.

    Raises:
        ClusterError: it cannot be read, or is not such a file.
    """
    action = "measure this machine with `whale profile`"
    try:
        table = msgspec.json.decode(Path(path).read_bytes(), type=MachineProfile)
    except OSError as error:
        raise ClusterError("the profile cannot be read", given=f"{path}: {error.strerror}", action=action) from error
    except (ValueError, OverflowError, RecursionError) as error:
        raise ClusterError(
            "the profile is not one that `whale profile` wrote", given=f"{path}: {error}", action=action
        ) from error
    if table.version != FORMAT_VERSION:
        given = f"{path}: version {table.version}"
        raise ClusterError(
            "the profile is of another version", given=given, expected=f"version {FORMAT_VERSION}", action=action
        )
    return table


def write(table: MachineProfile, path: str | Path) -> None:
    """Writes the file; creates its folder if needed."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1))


def check_writable(path: str | Path) -> None:
    """Checks, before anything is measured, that the file can be written; creates its folder if needed.

    Raises:
        ClusterError: it cannot be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not path.exists()
        path.open("ab").close()
        if fresh:
            path.unlink()
    except OSError as error:
        raise ClusterError(
            "the profile cannot be written there",
            given=f"{path}: {error.strerror}",
            action="give another file with -o",
        ) from error


class Measured:
    """Prices operations and exchanges by a machine profile."""

    def __init__(self, table: MachineProfile, marks: Sequence[str] = (), ranks: int = 1) -> None:
        """Takes a machine profile.

        Args:
            marks: fingerprints under which the program's own step may have been measured; the first match is used.
        """
        self.table = table
        self._exact = {o.signature: o for o in table.operations}
        self._by_op: dict[str, list[Operation]] = {}
        for o in table.operations:
            self._by_op.setdefault(o.op, []).append(o)
        self._curves: dict[str, dict[str, dict[int, Curve]]] = {}  # by what carried them, kind, ranks
        for curve in table.curves:
            self._curves.setdefault(curve.through, {}).setdefault(curve.kind, {})[curve.ranks] = curve
        self._out = [c for c in table.copies if _GPU in c.source and _GPU not in c.target]
        self._in = [c for c in table.copies if _GPU not in c.source and _GPU in c.target]
        steps = [s for s in table.steps if s.program in marks]
        step = min(steps, key=lambda s: (marks.index(s.program), abs(s.copies - ranks)), default=None)
        # Kernels in a step are not what they are alone: some are fused, others find their operands in a cache, which
        # they share with those of other ranks.
        self.context = step.seconds / step.predicted_s if step else 1.0

    def operation(self, program: Program, node: Node, does: Work) -> tuple[float, int]:
        """Returns (seconds, scratch bytes) of a node alone on a core, within a step."""
        if not does.kernels:
            return 0.0, 0
        found = self._exact.get(signature(program, node))
        if found is not None:
            return found.seconds * self.context, found.scratch_bytes
        known = (
            self._by_op.get(node.op) or self._list_like(node.op) or self._by_op.get("AddV2") or self.table.operations
        )
        if not known:
            raise ClusterError(
                "the profile has no measurement of any such operation",
                given=node.op,
                expected="the operations that `whale profile` measures",
                action="measure again with `whale profile`, or the program's own with `whale profile SCRIPT`",
            )

        def far(o: Operation) -> float:
            moved = math.log((o.moved_bytes + 1024) / (does.moved_bytes + 1024))
            return abs(moved) + abs(math.log((o.flops + 1024) / (does.flops + 1024)))

        near = min(known, key=far)
        computes = {node.op, near.op} <= CONTRACTIONS | {FUSED_LOOP} and near.flops > 0
        ratio = does.flops / near.flops if computes else (does.moved_bytes + 4096) / (near.moved_bytes + 4096)
        return max(near.seconds * ratio, self.table.node_s) * self.context, does.scratch_bytes or int(
            near.scratch_bytes * ratio
        )

    def _list_like(self, op: str) -> list[Operation]:
        """Returns the measured matrix products if the op is one, or many."""
        products = MATMULS | EINSUMS | {FUSED_LOOP}
        return [one for one in self.table.operations if one.op in products] if op in products else []

    def exchange_s(self, what: Exchange) -> float:
        """Returns the seconds of work of an exchange for each of its ranks.

        If ranks compute on GPUs, exchanges through the host include copies before and behind.

        Raises:
            ClusterError: exchanges of this kind were not measured.
        """
        ranks, tensor_bytes = len(what.ranks), what.tensor_bytes
        curve = self._curve(what)
        # Of a tensor, each rank hands on (p-1)/p.
        scale = ((ranks - 1) / ranks) / ((curve.ranks - 1) / curve.ranks)
        more = max(1.0, (ranks - 1) / (curve.ranks - 1)) ** 0.5
        moved_s = _interpolate(curve.samples, tensor_bytes * scale) * more
        if what.through:
            return moved_s
        handed = tensor_bytes / ranks if what.kind == "all_gather" else tensor_bytes
        taken = tensor_bytes / ranks if what.kind == "reduce_scatter" else tensor_bytes
        return moved_s + _slowest_s(self._out, handed) + _slowest_s(self._in, taken)

    def _curve(self, what: Exchange) -> Curve:
        known = self._curves.get(what.through, {})
        curves = known.get(what.kind + PACKED if what.is_packed and what.kind + PACKED in known else what.kind)
        if curves is None:
            through = f" through {what.through}" if what.through else ""
            set_to = f" with WHALE_COMMUNICATION_BACKEND={what.through}" if what.through else ""
            raise ClusterError(
                "the profile has no such exchange",
                given=what.kind + through,
                expected=", ".join(sorted(known)) or f"exchanges{through} between two ranks",
                action=f"measure again with `whale profile`{set_to}",
            )
        return curves[min(curves, key=lambda n: abs(n - len(what.ranks)))]


def _slowest_s(copies: Sequence[Copies], size: float) -> float:
    """Returns the seconds of the slowest of some copies of so many bytes; 0 if there are none."""
    return max((_interpolate(one.samples, size) for one in copies), default=0.0)


def _interpolate(samples: list[tuple[float, float]], size: float) -> float:
    """Interpolates linearly between two samples; beyond the last one in proportion to its slope."""
    if size <= samples[0][0] or len(samples) == 1:
        return samples[0][1]
    upper = next((i for i, (at, _) in enumerate(samples) if at >= size), len(samples) - 1)
    (x0, y0), (x1, y1) = samples[upper - 1], samples[upper]
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
