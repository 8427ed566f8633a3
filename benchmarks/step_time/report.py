"""The table and the plot of a run."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cost_model.figures import INK, find_colour, open_figure, save_figure

REFERENCE = "Whale, 2 ranks"  # measured in every set of groups, so that each is compared within one
_LONGEST = 3  # bars are cut where they are so much longer than the one in the middle


@dataclass(frozen=True)
class Result:
    """Samples of one configuration on one workload.

    Attributes:
        samples_ms: mean step time of each round; of the slowest rank.
        cpu_ms: processor time of one step, all ranks together; median of the rounds.
        note: shown instead when there are no samples.
        reference_ms: median of `REFERENCE` in the same rounds; 0: it was not measured.
    """

    workload: str
    configuration: str
    samples_ms: tuple[float, ...] = ()
    cpu_ms: float = 0.0
    note: str = ""
    reference_ms: float = 0.0

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)

    @property
    def quartiles_ms(self) -> tuple[float, float]:
        first, _, third = statistics.quantiles(self.samples_ms, n=4, method="inclusive")
        return first, third


def markdown(results: Sequence[Result]) -> str:
    """A table: a row per configuration, a column per workload; median, quartiles and processor time in ms a step. A
    second one with the time of `REFERENCE` over that of each other configuration.
    """
    workloads = list(dict.fromkeys(r.workload for r in results))
    configurations = list(dict.fromkeys(r.configuration for r in results))
    by_place = {(r.configuration, r.workload): r for r in results}

    def rows(title: str, cell: Callable[[Result | None], str], shown: Sequence[str]) -> list[str]:
        lines = [f"| {title} | {' | '.join(workloads)} |", "|---|" + "---|" * len(workloads)]
        for configuration in shown:
            cells = [cell(by_place.get((configuration, workload))) for workload in workloads]
            lines.append(f"| {configuration} | {' | '.join(cells)} |")
        return lines

    lines = rows("ms a step", _cell, configurations)
    if any(r.reference_ms for r in results):
        others = [name for name in configurations if name != REFERENCE]
        lines += ["", *rows(f"{REFERENCE}, over", _ratio, others)]
    return "\n".join(lines) + "\n"


def _ratio(result: Result | None) -> str:
    """The reference's time over that of another configuration in the same rounds: below 1 the reference is ahead."""
    if result is None or not result.samples_ms or not result.reference_ms:
        return ""
    return f"{result.reference_ms / result.median_ms:.2f}"


def _cell(result: Result | None) -> str:
    if result is None:
        return ""
    if not result.samples_ms:
        return result.note
    low, high = result.quartiles_ms
    return f"**{_figures(result.median_ms)}** ({_figures(low)} to {_figures(high)}), CPU {_figures(result.cpu_ms)}"


def _figures(value: float) -> str:
    """Whole numbers, and three figures of what is below a hundred."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


@dataclass(frozen=True)
class Bar:
    """A cell of the table: milliseconds of a step."""

    workload: str
    configuration: str
    median_ms: float
    low_ms: float
    high_ms: float


def read_table(page: str) -> list[Bar]:
    """Returns the cells of the page's first table."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.partition(f"\n{NOTES}")[0].splitlines()
        if line.startswith("|") and not line.startswith("|-")
    ]
    found = []
    for name, *cells in rows[1:]:
        for workload, cell in zip(rows[0][1:], cells):
            if figures := _CELL.match(cell):
                found.append(Bar(workload, name, *map(float, figures.groups())))
    return found


_CELL = re.compile(r"\*\*([\d.]+)\*\* \(([\d.]+) to ([\d.]+)\)")


def plot(bars: Sequence[Bar], path: Path) -> None:
    """Bars of the medians with their quartiles, the shortest first, one panel per workload, as SVG."""
    workloads = list(dict.fromkeys(bar.workload for bar in bars))
    rows = -(-len(workloads) // 2)
    most = max(sum(bar.workload == w for bar in bars) for w in workloads)
    figure, panels = open_figure(rows, 2, (13, rows * (0.7 + 0.155 * most)))
    for panel in panels.flat[len(workloads) :]:
        panel.set_visible(False)
    for panel, workload in zip(panels.flat, workloads):
        mine = sorted((bar for bar in bars if bar.workload == workload), key=lambda bar: -bar.median_ms)
        longest = min(
            1.05 * max(bar.high_ms for bar in mine), _LONGEST * statistics.median(bar.median_ms for bar in mine)
        )
        for place, bar in enumerate(mine):
            cut = bar.high_ms > longest
            colour = find_colour(bar.configuration)
            panel.barh(place, min(bar.median_ms, longest), height=0.72, color=colour, hatch="//" if cut else None)
            if not cut:
                panel.plot([bar.low_ms, bar.high_ms], [place, place], color=INK, linewidth=1)
            text = f"{_figures(bar.median_ms)}" + " (cut)" * cut
            panel.annotate(
                text, (longest if cut else bar.high_ms, place), (4, 0), textcoords="offset points", va="center",
                fontsize=8,
            )  # fmt: skip
        panel.set_yticks(range(len(mine)), [bar.configuration for bar in mine], fontsize=8)
        panel.set_ylim(-0.6, len(mine) - 0.4)
        panel.set_xlim(0, 1.12 * longest)
        panel.tick_params(axis="y", length=0)
        panel.tick_params(axis="x", labelsize=8)
        panel.set_title(f"{workload}: ms a step", loc="left", fontsize=9.5, fontweight="bold")
    save_figure(figure, path)


def write_page(path: Path, table: str, where: str, rounds: int, steps: int) -> None:
    """docs/benchmarks.md: how it was measured, the table and the plot; what a person wrote below `## Notes` is kept."""
    old = path.read_text() if path.exists() else ""
    notes = old[old.index(NOTES) :] if NOTES in old else ""
    path.write_text(
        PAGE.format(where=where, rounds=rounds, steps=steps, table=table, plot=path.with_suffix(".svg").name) + notes
    )


NOTES = "## Notes"
PAGE = """# Step times

Written by `make bench`. One training step of each model with the same global batch under plain TensorFlow, with and
without XLA; Horovod over MPI; `tf.distribute`'s MultiWorkerMirroredStrategy (Keras 2); PyTorch, alone, compiled, and
with DistributedDataParallel over gloo; Keras 3 on JAX, data parallel over two devices of one process; and Whale: data
parallel, with its tensors divided (`wh.split`, FC only), with the optimizer's state divided (`memory.zero=1`), over
MPI alone, without shared memory, and with Horovod as its backend. Models have the same layers everywhere. Every
configuration is a process group that stays alive; in each round all groups run {steps} steps in turn while the others
are stopped, so what else the machine does meets all of them. (Where memory does not hold all groups at once, those
with several ranks form one set, and the others further ones, each with Whale on two ranks again.) The first table shows
the median of {rounds} rounds in ms a step, the quartiles, and the processor time of a step, all ranks together; the
second one Whale on two ranks over each other configuration, in the same rounds. Each rank has one thread and one core
(four ranks share the cores); one process with two threads or devices has both. Horovod's cycle time and fusion
threshold are the best of those tried for each model.

Measured on {where}. `python -m benchmarks.step_time --redraw docs` draws the figure from the table.

{table}
![Step times: bars are medians, the shortest first, whiskers quartiles]({plot})

"""
