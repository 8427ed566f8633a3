"""Reports the memory of this process's ranks, by category, predicted from their programs and measured:
``wh.memory_report``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from whale.errors import CommError
from whale.ir.plan_text import format_bytes
from whale.passes.analysis.uses import CATEGORIES
from whale.runtime.compile.offload import count_offloaded_bytes
from whale.runtime.context import require_current
from whale_ops.memory import COUNTED_FROM_BYTES


@dataclass(frozen=True)
class MemoryReport:
    """The memory of this process, in bytes.

    Attributes:
      ranks: of this process; the figures are of all of them together.
      variables: category (parameters, optimizer state, buffers) -> bytes of the variables that these ranks hold now,
        exactly.
      predicted: name of a program -> category -> bytes at the fullest moment of a step, of the first of these ranks:
        variables, gradients, weights that are gathered, activations.
      on_host_bytes: of the variables, what lies in the host's memory beside an accelerator (``read_memory.offload``).
      copied: bytes that steps have copied to the host's memory, and from it, since the process began.
      copied_each_step: name of a program -> bytes that a step of it is predicted to copy to the host's memory, and from
        it, on all of these ranks; without rows of which only the step knows how many there are.
      allocated_bytes, allocated_peak_bytes: what TensorFlow's allocator has given out, now and at most, in pieces of
        256 KiB and more; None where that is not measured, as ``not_allocated`` says.
      not_allocated: why.
      resident_bytes, resident_peak_bytes: of the process, by the kernel, libraries included.
    """

    ranks: tuple[int, ...]
    variables: Mapping[str, int]
    predicted: Mapping[str, Mapping[str, int]]
    allocated_bytes: int | None
    allocated_peak_bytes: int | None
    resident_bytes: int
    resident_peak_bytes: int
    on_host_bytes: int = 0
    copied: tuple[int, int] = (0, 0)
    copied_each_step: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    not_allocated: str = ""

    @property
    def variable_bytes(self) -> int:
        """Returns the sum of all categories of variables."""
        return sum(self.variables.values())

    def __str__(self) -> str:
        who = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {self.ranks[0]} to {self.ranks[-1]}"
        lines = [f"memory of {who}", "  variables held now"]
        lines += [f"    {name:<24} {format_bytes(n)}" for name, n in self.variables.items()]
        for program, categories in self.predicted.items():
            lines.append(f"  predicted for a step of {program}, rank {self.ranks[0]}")
            lines += [f"    {name:<24} {format_bytes(n)}" for name, n in categories.items()]
            lines.append(f"    {'together':<24} {format_bytes(sum(categories.values()))}")
        for program, (there, back) in self.copied_each_step.items():
            lines.append(f"  predicted for a step of {program}, beside the host's memory")
            lines += [f"    {'copied to the host':<24} {format_bytes(there)}"]
            lines += [f"    {'copied from the host':<24} {format_bytes(back)}"]
        lines.append("  measured")
        if self.copied_each_step:
            lines.append(f"    {'held by the host':<24} {format_bytes(self.on_host_bytes)}")
            lines.append(f"    {'copied to the host':<24} {format_bytes(self.copied[0])}, of all steps")
            lines.append(f"    {'copied from the host':<24} {format_bytes(self.copied[1])}, of all steps")
        if self.allocated_bytes is not None and self.allocated_peak_bytes is not None:
            lines.append(f"    {'allocated':<24} {format_bytes(self.allocated_bytes)}")
            lines.append(f"    {'allocated at most':<24} {format_bytes(self.allocated_peak_bytes)}")
            lines.append(f"    {'':<24} both without tensors below {format_bytes(COUNTED_FROM_BYTES)}")
        else:
            lines.append(f"    {'allocated':<24} not measured: {self.not_allocated}")
        lines.append(f"    {'resident':<24} {format_bytes(self.resident_bytes)}")
        lines.append(f"    {'resident at most':<24} {format_bytes(self.resident_peak_bytes)}")
        return "\n".join(lines)


def memory_report() -> MemoryReport:
    """Reports the memory of this process: variables by category, predictions of its programs, and measurements.

    Not collective. Variables that no step has used yet are not counted; they take no memory while they are deferred.

    Raises:
      ClusterError: called before ``wh.init``.
    """
    from whale_ops.memory import read_memory

    context = require_current("wh.memory_report()")
    held: Counter[str] = Counter(dict.fromkeys(CATEGORIES[:3], 0))
    held.update(context.variables.count_held_bytes())
    try:
        measured = read_memory()
        allocated: tuple[int | None, int | None] = measured.live_bytes, measured.peak_bytes
        why = ""
        if not measured.peak_bytes:
            allocated, why = (
                (None, None),
                f"no tensor has had {format_bytes(COUNTED_FROM_BYTES)}, from which they count",
            )
    except CommError as error:
        allocated, why = (None, None), str(error).partition("\n")[0]
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident, most = (int(status[key].split()[0]) << 10 for key in ("VmRSS", "VmHWM"))
    return MemoryReport(
        context.ranks,
        dict(held),
        {name: find() for name, find in context.reports.predicted.items()},
        *allocated,
        resident,
        most,
        context.variables.count_host_bytes(),
        count_offloaded_bytes() if context.reports.offloaded else (0, 0),
        dict(context.reports.offloaded),
        why,
    )
