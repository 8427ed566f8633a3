"""Which reductions go from accelerator to accelerator, when `communication.backend` names what carries them there.

All that the step itself does with floats, whatever waits for them: what is exchanged through the host is copied there
and back. What is in loops and branches, gathered or scattered, and integers stay with Whale.
"""

from __future__ import annotations

from dataclasses import replace

from whale.ir.layout import Broadcast, Partial
from whale.ir.plan import DEVICE, Reshard
from whale.ir.program import Program

# Values of `communication.backend` that mean accelerators.
DEVICE_BACKENDS = ("nccl", "cuda-ipc")
# Element types of WhaleDeviceAllReduce.
DEVICE_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})


def device_can(program: Program, r: Reshard) -> bool:
    """Whether accelerators can carry out this change of layout."""
    return (
        r.graph == ""
        and isinstance(r.source, Partial)
        and isinstance(r.target, Broadcast)
        and program.type_of(r.ref).dtype in DEVICE_DTYPES
    )


def give_to_device(program: Program, reshards: tuple[Reshard, ...]) -> tuple[Reshard, ...]:
    """``reshards`` with all that accelerators can carry out given to them."""
    return tuple(replace(r, backend=DEVICE) if device_can(program, r) else r for r in reshards)
