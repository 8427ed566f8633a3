"""The runs: every way to lay out stages, with every number of micro-batches and every schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SCHEDULES = ("gpipe", "1f1b", "zb-h1")
MICRO_BATCHES = (1, 2, 4, 7)


@dataclass(frozen=True, slots=True)
class Layout:
    """Stages on ranks.

    Attributes:
      model: see ``tests.pipelines.models``.
      devices: ranks of each stage; empty: as Whale shares them out.
      split: whether a layer is under ``wh.split`` inside its stage.
      mesh: named axes of the ranks, if any.
      interleaved: whether the ranks have several stages each.
    """

    name: str
    model: str
    ranks: int
    devices: tuple[tuple[int, ...], ...] = ()
    split: bool = False
    interleaved: bool = False
    mesh: str = ""


LAYOUTS = (
    Layout("2 stages", "chain 2", 2),
    Layout("3 stages", "chain 3", 3),
    Layout("4 stages", "chain 4", 4),
    Layout("2 stages x 2 replicas", "chain 2", 4),
    Layout("2 stages x split 2", "chain 2", 4, split=True),
    Layout("2 -> 3 ranks", "chain 2", 5, ((0, 1), (2, 3, 4))),
    Layout("3 -> 1 -> 2 ranks", "chain 3", 6, ((0, 1, 2), (3,), (4, 5))),
    Layout("interleaved", "chain 4", 2, interleaved=True),
    Layout("2 stages x 2 x 2", "chain 2", 8, split=True, mesh="stage=2,data=2,tensor=2"),
    Layout("2 x 2 stages x 2", "chain 2", 8, split=True, mesh="data=2,stage=2,tensor=2"),
    Layout("4 -> 2 ranks, split 2", "chain 2", 6, ((0, 1, 2, 3), (4, 5)), split=True, mesh="tensor=2"),
    Layout("interleaved x 2 x 2", "chain 4", 8, split=True, interleaved=True, mesh="stage=2,data=2,tensor=2"),
    Layout("two towers", "towers", 3),
    Layout("two towers, contrastive", "contrastive", 3),
    Layout("tied embeddings", "tied", 3),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One pipeline to be compared with one device."""

    layout: Layout
    micro_batches: int
    schedule: str
    optimizer: str = "sgd"
    recompute: bool = False
    zero: int = 0
    api: str = "tf2"

    def __str__(self) -> str:
        extra = ", recompute" * self.recompute + (f", zero {self.zero}" if self.zero else "")
        return (
            f"{self.layout.name}, {self.micro_batches} micro-batches, {self.schedule}, "
            f"{self.optimizer}{extra}, {self.api}"
        )


def is_legal(layout: Layout, micro_batches: int, schedule: str) -> bool:
    """Whether there is such a schedule: see docs/guides/pipeline.md."""
    if layout.interleaved and schedule != "1f1b":
        return micro_batches == 1
    return layout.model != "contrastive" or micro_batches == 1  # a loss over the whole batch


def all_runs() -> Iterator[Run]:
    """Layouts x micro-batches x schedules, each with three settings that take turns in all else."""
    for layout in LAYOUTS:
        for micro_batches in MICRO_BATCHES:
            for schedule in SCHEDULES if micro_batches > 1 else ("1f1b",):
                if not is_legal(layout, micro_batches, schedule):
                    continue
                yield Run(layout, micro_batches, schedule)
                yield Run(layout, micro_batches, schedule, "adam", recompute=True)
                if not layout.split:
                    yield Run(layout, micro_batches, schedule, "adam", zero=1)
                    yield Run(layout, micro_batches, schedule, "adam", zero=3)
                if schedule == "1f1b" and micro_batches in (1, 4):
                    yield Run(layout, micro_batches, schedule, "sgd", api="tf1")
                    yield Run(layout, micro_batches, schedule, "adam", api="tf1")
