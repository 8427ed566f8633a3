"""The features that a program can be spread with, and what each changes of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from whale.config import Mesh

RANKS = 8


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature.

    Attributes:
      name: as the table has it.
      axes: sizes that it gives axes of the mesh.
      config: keys of the configuration.
      marks: what it asks of the program and of how it is called (see ``tests.combinations.run``).
      limit: of the difference; features that round have another one than float64's.
      instead: features that say the same thing otherwise, and are not combined with it.
    """

    name: str
    axes: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    marks: frozenset[str] = frozenset()
    limit: float = 1e-10
    instead: frozenset[str] = frozenset()


def _of(name: str, *marks: str, instead: Iterable[str] = (), limit: float = 1e-10, **axes: int) -> Feature:
    return Feature(name, axes, {}, frozenset(marks), limit, frozenset(instead))


def _set(name: str, *marks: str, limit: float = 1e-10, instead: Iterable[str] = (), **config: Any) -> Feature:
    keys = {key.replace("__", "."): value for key, value in config.items()}
    return Feature(name, {}, keys, frozenset(marks), limit, frozenset(instead))


ON_GPUS = "host's GPUs"  # of the tests' own, one for each rank
_ROUNDED = 2e-2  # to 16 bits, in float32
_CHOSEN_ANEW = 5e-2  # the same, where one of few tokens may choose another expert: what its router reads is rounded
_IN_STAGES = ("4 stages", "unequal stages", "interleaved")
FEATURES: tuple[Feature, ...] = (
    _of("tensor", "tensor", tensor=2),
    _of("second tensor axis", "expert", expert=2),
    _of("sequence", "attention", "sequence", tensor=2, instead=["tensor"]),
    _of("context", "attention", "heads", "context", context=2),
    _of("2 stages", "stages", stage=2, instead=_IN_STAGES),
    _of("4 stages", "stages", stage=4, instead=_IN_STAGES),
    _of("unequal stages", "stages", "unequal", instead=_IN_STAGES),
    _of("interleaved", "stages", "chunks", stage=2),
    _set("micro-batches", pipeline__micro_batches=4),
    _set("gpipe", pipeline__micro_batches=4, pipeline__schedule="gpipe", instead=["micro-batches", "zb-h1"]),
    _set("zb-h1", pipeline__micro_batches=4, pipeline__schedule="zb-h1", instead=["micro-batches"]),
    _of("accumulation", "accumulated"),
    _set("zero 1", memory__zero=1, memory__zero_min_bytes=0, instead=["zero 2", "zero 3"]),
    _set("zero 2", memory__zero=2, memory__zero_min_bytes=0, instead=["zero 3"]),
    _set("zero 3", memory__zero=3, memory__zero_min_bytes=0),
    _set("recompute auto", memory__recompute="auto", instead=["recompute marked"]),
    _set("recompute marked", "checkpoint", memory__recompute="marked"),
    _set("offload", memory__offload="parameters"),
    _set("amp", precision__compute_dtype="bfloat16", limit=_ROUNDED),
    _set("16 bits on the wire", communication__wire_dtype="bfloat16", limit=_ROUNDED),
    _of("loop", "loop"),
    _of("lstm", "lstm", tensor=2),
    _of("scan", "scan"),
    _of("branch", "branch"),
    _of("experts", "experts", instead=["none dropped", "session"]),  # sessions have no layers of Keras 3
    _of("none dropped", "none dropped", instead=["session"]),
    _of("table", "table", instead=["growing table", "hot table"]),
    _of("growing table", "growing", instead=["session", "hot table"]),
    _of("classes", "classes", instead=["sampled classes"]),
    _of("sampled classes", "sampled classes"),
    _of("session", "session"),
    _of("shard", "shard", "processes"),
    _set("local batch", "local", "processes", batch__mode="local", instead=["shard"]),
    _set("unequal shares", batch__shares=(6, 2, 4, 4, 4, 4, 2, 6)),
    _of("some devices", "devices"),
    _of("saved", "saved"),
    _set("devices", "host device", communication__backend="cuda-ipc", instead=["horovod"]),
    _set("mixed devices", "mixed devices", communication__backend="pinned", instead=["horovod", "devices"]),
    _set("horovod", "processes", communication__backend="horovod"),
    _set("auto_parallel", "auto", mesh__auto_parallel=True),
    _of("7 rows", "uneven"),  # that divide neither by the ranks nor by the micro-batches
    _of("hot table", "hot", instead=["session"]),
    _of("xla", "xla", instead=["session"]),
    _set("table on host", "table", memory__offload="tables", instead=["offload", "growing table", "hot table"]),
    _set(ON_GPUS, "processes", communication__backend="nccl", instead=["devices", "mixed devices", "horovod"]),
    _of("two updates", "twice", instead=["session"]),  # in each step, the second by the weights of the first
    _set("empty shares", batch__shares=(8, 0, 0, 8, 4, 0, 4, 8), instead=["unequal shares"]),
)
BY_NAME = {feature.name: feature for feature in FEATURES}


def clash(features: Iterable[Feature]) -> bool:
    """Whether some of the features say the same thing in two ways."""
    features = list(features)
    return any(one.name in other.instead for one in features for other in features if one is not other)


def limit_of(features: Iterable[Feature]) -> float:
    """Of the difference, of features together."""
    features = list(features)
    limit = max(f.limit for f in features)
    choosing = any(f.marks & {"experts", "none dropped"} for f in features)
    return _CHOSEN_ANEW if choosing and limit == _ROUNDED else limit


def mesh_of(features: Iterable[Feature]) -> Mesh:
    """The mesh that the features ask for; the rest of the ranks is the axis data."""
    found: dict[str, int] = {}
    for feature in features:
        found.update(feature.axes)
    order = sorted(found, key=["stage", "tensor", "expert", "context"].index)
    return Mesh(**{name: found[name] for name in order})
