"""Stores measurements of a machine in a JSON file: operations, exchanges between its ranks, whole steps.

`whale profile` writes the file. Operations are looked up by their signature; an operation that was not measured is
assumed to have the speed of the nearest one of its type, in proportion to its work.
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
PACKED = " packed"  # added to the kind of exchanges whose tensors are copied into one buffer first
Positive = Annotated[float, Meta(gt=0)]
Amount = Annotated[float, Meta(ge=0)]


class Operation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measurement of one operation that ran alone on a core or GPU.

    Attributes:
        signature: identifies the operation, see `cost_model.graph.signature`.
        op: its type, e.g. MatMul.
        flops: its FLOPs.
        moved_bytes: bytes that it reads and writes.
        seconds: measured time.
        scratch_bytes: memory that it takes besides its results.
    """

    signature: str
    op: str
    flops: Amount
    moved_bytes: Amount
    seconds: Positive
    scratch_bytes: int = 0


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured exchanges of one kind between a number of ranks, by size.

    Attributes:
        kind: kind of `Exchange`; with " packed" added if its tensors have to be copied into one buffer.
        ranks: number of ranks.
        samples: (bytes of the tensor, seconds), in ascending order.
        through: the library that exchanged between GPUs, as ``communication.backend`` names it; "": through the host,
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
    """Measured copies between two of TensorFlow's devices, by size.

    Attributes:
        source, target: TensorFlow's names of the devices.
        samples: (bytes, seconds), in ascending order.
    """

    source: str
    target: str
    samples: Annotated[list[tuple[Amount, Positive]], Meta(min_length=1)]


class HostLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measured link between two hosts.

    Attributes:
        one, other: names of the hosts.
        exchange_s, bytes_per_s: as in ``whale.ir.topology.Link``.
    """

    one: str
    other: str
    exchange_s: Amount
    bytes_per_s: Positive


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured whole step without exchanges, and the time predicted from its operations alone.

    Their ratio corrects predictions of the same program.

    Attributes:
        program: fingerprint of the program, if it ran on one device; of a plan, fingerprint of the first rank's
            program.
        seconds: measured time.
        predicted_s: predicted time.
        copies: number of processes that ran the step at the same time; of a plan, its ranks.
    """

    program: str
    seconds: Positive
    predicted_s: Positive
    copies: Annotated[int, Meta(ge=1)] = 1


class MachineProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measurements of one machine: the content of the file that `whale profile` writes.

    Attributes:
        host: name of the machine.
        cores: number of cores that ranks may use under affinity and quota.
        memory_gb: memory of the host in GB.
        call_s: seconds to call a step, besides its operations.
        node_s: seconds that TensorFlow's executor takes for a node that computes nothing.
        slice_s: seconds for which a computing thread keeps its core if another one waits for it.
        wake_s: seconds for which the communication thread waits for a core if all of them compute.
        operations: measured operations.
        curves: measured exchanges.
        steps: measured whole steps.
        gpus: the machine's GPUs; if there are any, operations were measured on them.
        copies: measured copies between host and GPUs.
        hosts: number of hosts that the ranks of `curves` were on; if several, one rank each.
        links: links between each two of these hosts.
        version: version of the file's format.
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
        """Returns the links between the hosts of these names, by pairs of positions in `names`; {} if any was not
        measured.
        """
        known = {frozenset((one.one, one.other)): Link(one.exchange_s, one.bytes_per_s) for one in self.links}
        pairs = [(i, j) for j in range(len(names)) for i in range(j)]
        found = {(i, j): link for i, j in pairs if (link := known.get(frozenset((names[i], names[j])))) is not None}
        return found if len(found) == len(pairs) else {}

    def slow_down(self, computing: float, exchanging: float) -> MachineProfile:
        """Returns the profile of a machine that takes `computing` times as long to compute, and `exchanging` times
        to exchange.
        """
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
        """Returns this profile with further measurements added; they replace older ones of the same operation or
        step.
        """
        found = {o.signature: o for o in (*self.operations, *operations)}
        named = {(s.program, s.copies): s for s in (*self.steps, *steps)}
        return msgspec.structs.replace(self, operations=list(found.values()), steps=list(named.values()))


def default_path() -> Path:
    """Returns the path at which `whale profile` writes, and predictions look for, the machine's profile."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "whale" / "profile.json"


def read(path: str | Path) -> MachineProfile:
    """Reads and checks a profile.

    Raises:
        ClusterError: it cannot be read, was not written by `whale profile`, or has another version.
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
            "the profile was written by another version of Whale",
            given=given,
            expected=f"version {FORMAT_VERSION} of the file's format",
            action=action,
        )
    return table


def write(table: MachineProfile, path: str | Path) -> None:
    """Writes a profile as JSON; creates the folder if needed."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1))


def check_writable(path: str | Path) -> None:
    """Raises ClusterError if a profile cannot be written at `path`; creates its folder if needed.

    `whale profile` calls this before it measures for minutes.
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
    """Prices operations and exchanges by the measurements of a machine profile."""

    def __init__(self, table: MachineProfile, marks: Sequence[str] = (), ranks: int = 1) -> None:
        """Looks up the measurement of the program's own step, if there is one, to correct the time of its operations.

        Args:
            table: the profile.
            marks: fingerprints under which that step may have been measured; the first match is used.
            ranks: number of ranks of the program; of several measurements, that with the nearest number of processes is
                used.
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
        # Kernels take another time in a step than alone: some are fused, others find their operands in a cache, which
        # they share with kernels of other ranks.
        self.context = step.seconds / step.predicted_s if step else 1.0

    def operation(self, program: Program, node: Node, does: Work) -> tuple[float, int]:
        """Returns (seconds, scratch bytes) of a node that runs on a core of its own within a step.

        Raises:
            ClusterError: the profile has no operation to compare it with.
        """
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
                "the machine profile has no measurement of any operation, so the time of this one cannot be predicted",
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
        """Returns all measured matrix products, einsums and fused loops if `op` is one of these types; else []."""
        products = MATMULS | EINSUMS | {FUSED_LOOP}
        return [one for one in self.table.operations if one.op in products] if op in products else []

    def exchange_s(self, what: Exchange) -> float:
        """Returns the seconds that an exchange takes on each of its ranks, once all have arrived.

        If ranks compute on GPUs, exchanges through the host include the copies to the host before and to the GPU after.

        Raises:
            ClusterError: exchanges of this kind were not measured.
        """
        ranks, tensor_bytes = len(what.ranks), what.tensor_bytes
        curve = self._curve(what)
        # Each of p ranks sends (p-1)/p of the tensor.
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
                "the machine profile has no measurement of an exchange of this kind between ranks",
                given=what.kind + through,
                expected=", ".join(sorted(known)) or f"exchanges{through} between two ranks",
                action=f"measure again with `whale profile`{set_to}",
            )
        return curves[min(curves, key=lambda n: abs(n - len(what.ranks)))]


def _slowest_s(copies: Sequence[Copies], size: float) -> float:
    """Returns the seconds of a copy of `size` bytes on the slowest of these pairs of devices; 0 if there are none."""
    return max((_interpolate(one.samples, size) for one in copies), default=0.0)


def _interpolate(samples: list[tuple[float, float]], size: float) -> float:
    """Interpolates seconds linearly between samples; beyond the last one, continues the slope of the last two."""
    if size <= samples[0][0] or len(samples) == 1:
        return samples[0][1]
    upper = next((i for i, (at, _) in enumerate(samples) if at >= size), len(samples) - 1)
    (x0, y0), (x1, y1) = samples[upper - 1], samples[upper]
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
