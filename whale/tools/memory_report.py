"""Implements ``wh.memory_report``: predicted and measured memory of this process's ranks, by category."""

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
    """Holds the memory of this process in bytes; printing it gives a table.

    Attributes:
      ranks: the ranks of this process; all figures are for all of them together, except `predicted`.
      variables: category (parameters, optimizer state, buffers) -> exact bytes of the variables that these ranks hold
          now.
      predicted: name of a program -> category -> bytes at the peak of a step, on the first of these ranks. Categories
          are variables, gradients, gathered weights and activations.
      on_host_bytes: part of `variables` that lies in host memory because of ``memory.offload``.
      copied: bytes that steps have copied (to host memory, from host memory) since the process began.
      copied_each_step: name of a program -> bytes that a step is predicted to copy (to, from) host memory. Rows of
          tables whose number only the step knows are not counted.
      allocated_bytes, allocated_peak_bytes: bytes that TensorFlow's allocator has given out, now and at most; tensors
          below 256 KiB are not counted. None: not measured, see ``not_allocated``.
      not_allocated: why the allocator's figures are missing.
      resident_bytes, resident_peak_bytes: resident memory of the process, libraries included, as the kernel counts it.
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
        """Returns the bytes of all variables that these ranks hold now."""
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
            lines.append(f"  predicted copies of a step of {program} to and from host memory")
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
    """Reports the memory of this process: variables by category, predicted peaks of its programs, and measurements.

    Not collective: ranks may call it at different times. Variables that no step has used yet are not counted, since
    they take no memory before that.

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
                f"no tensor has had {format_bytes(COUNTED_FROM_BYTES)}, the least size that is counted",
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
