"""What tensors and kernels of this process ask TensorFlow's allocator of host memory for, from its profiler's events.

The allocator's own figures count whole pieces, which may be nearly twice as large as what was asked for; where pieces
lie depends on which thread came first in all steps before, so those figures differ from run to run by a tenth.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorflow as tf

from whale_ops.memory import GRAIN_BYTES

_ALLOCATORS = "mklcpu"
_STEP = "measured_step"
_EVENTS_LEVEL = 2  # of the profiler: what allocators do


@contextmanager
def recorded() -> Iterator[list[int]]:
    """Records the process inside the context; the list then has, of each step, the most bytes asked for at a time.

    It has to begin before the first tensor is made: what is there already is not counted.
    """
    peaks: list[int] = []
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


def _peaks(data: bytes) -> list[int]:
    from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

    space = XSpace()
    space.ParseFromString(data)
    events: list[tuple[float, int, int, int]] = []  # when, what (see below), address, bytes
    for plane in space.planes:
        stats = {number: one.name for number, one in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                name, at = plane.event_metadata[event.metadata_id].name, 1e3 * line.timestamp_ns + event.offset_ps
                if name == _STEP:
                    events += [(at, 0, 0, 0), (at + event.duration_ps, 1, 0, 0)]
                elif name in ("MemoryAllocation", "MemoryDeallocation"):
                    facts = {stats[s.metadata_id]: _value(s, stats) for s in event.stats}
                    if facts.get("allocator_name") == _ALLOCATORS:
                        asked = -(-int(facts["requested_bytes"]) // GRAIN_BYTES) * GRAIN_BYTES
                        events.append((at, 2 if name == "MemoryAllocation" else 3, int(facts["addr"]), asked))
    held: dict[int, int] = {}
    live, inside = 0, False
    peaks: list[int] = []
    for _, what, address, asked in sorted(events, key=lambda e: e[0]):
        if what < 2:
            inside = what == 0
            if inside:
                peaks.append(live)
            continue
        live -= held.pop(address, 0)  # events of two threads may come in the wrong order
        if what == 2:
            held[address] = asked
            live += asked
        if inside:
            peaks[-1] = max(peaks[-1], live)
    return peaks


def _value(stat: Any, names: dict[int, str]) -> Any:
    kind = stat.WhichOneof("value")
    return names[stat.ref_value] if kind == "ref_value" else getattr(stat, kind)
