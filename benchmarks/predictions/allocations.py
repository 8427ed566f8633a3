"""What tensors and kernels of this process ask TensorFlow's allocator of host memory for, from its profiler's events.

The allocator's own figures count whole pieces, which may be nearly twice as large as what was asked for; where pieces
lie depends on which thread came first in all steps before, so those figures differ from run to run by a tenth.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from whale_ops.memory import GRAIN_BYTES

_ALLOCATORS = ("mklcpu", "whale_arena")
_STEP = "measured_step"
_TAKEN, _GIVEN_BACK = "MemoryAllocation", "MemoryDeallocation"
_EVENTS_LEVEL = 2  # of the profiler: what allocators do


class Asked(NamedTuple):
    """Of one step, in bytes: those live when it begins, and the most that are at a time."""

    before_bytes: int
    most_bytes: int


@contextmanager
def recorded() -> Iterator[list[Asked]]:
    """Records the process inside the context; the list then has what each step asked for.

    It has to begin before the first tensor is made: what is there already is not counted.
    """
    peaks: list[Asked] = []
    options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=_EVENTS_LEVEL, python_tracer_level=0)
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder, options)
        try:
            yield peaks
        finally:
            tf.profiler.experimental.stop()
        for path in Path(folder).rglob("*.xplane.pb"):
            peaks += _peaks(path.read_bytes())


def step(call: Callable[[], Any]) -> None:
    """Runs a step whose peak `recorded` gives."""
    with tf.profiler.experimental.Trace(_STEP):
        call()


def _peaks(data: bytes) -> list[Asked]:
    from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

    space = XSpace()
    space.ParseFromString(data)
    events: list[tuple[int, str, dict[str, Any]]] = []  # when in ps, name, facts
    for plane in space.planes:
        stats = {number: one.name for number, one in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                name, at = plane.event_metadata[event.metadata_id].name, 1000 * line.timestamp_ns + event.offset_ps
                if name == _STEP:
                    events += [(at, _STEP, {}), (at + event.duration_ps, "", {})]
                elif name in (_TAKEN, _GIVEN_BACK):
                    facts = {stats[s.metadata_id]: _value(s, stats) for s in event.stats}
                    if facts.get("allocator_name") in _ALLOCATORS:
                        events.append((at, name, facts))
    # Each event has the allocator's count of pieces; what pieces have beyond what was asked for is taken from it. An
    # event that is missing, or on the wrong side of another thread's, then costs its surplus, not all of its bytes.
    surplus: dict[int, int] = {}
    surplus_bytes = before_bytes = live_bytes = 0
    inside = first = False
    peaks: list[Asked] = []
    for _, name, facts in sorted(events, key=lambda e: e[0]):
        if not facts:
            inside = name == _STEP
            if inside:
                peaks.append(Asked(live_bytes, live_bytes))
            continue
        piece_bytes, address = int(facts["allocation_bytes"]), int(facts["addr"])
        if not first:
            first = True
            before_bytes = int(facts["bytes_allocated"]) + (piece_bytes if name == _GIVEN_BACK else -piece_bytes)
        if name == _TAKEN:
            surplus_bytes -= surplus.pop(address, 0)
            surplus[address] = piece_bytes - -(-int(facts["requested_bytes"]) // GRAIN_BYTES) * GRAIN_BYTES
            surplus_bytes += surplus[address]
        elif address in surplus:
            surplus_bytes -= surplus.pop(address)
        else:
            before_bytes -= piece_bytes
        live_bytes = int(facts["bytes_allocated"]) - before_bytes - surplus_bytes
        if inside:
            peaks[-1] = Asked(peaks[-1].before_bytes, max(peaks[-1].most_bytes, live_bytes))
    return peaks


def _value(stat: Any, names: dict[int, str]) -> Any:
    kind = stat.WhichOneof("value")
    return names[stat.ref_value] if kind == "ref_value" else getattr(stat, kind)
