"""The table and the plot of a run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Result:
    """Samples of one configuration on one workload.

    Attributes:
        samples_ms: mean step time of each round; of the slowest rank.
        cpu_ms: processor time of one step, all ranks together; median of the rounds.
        note: shown instead when there are no samples.
    """

    workload: str
    configuration: str
    samples_ms: tuple[float, ...] = ()
    cpu_ms: float = 0.0
    note: str = ""

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)

    @property
    def quartiles_ms(self) -> tuple[float, float]:
        first, _, third = statistics.quantiles(self.samples_ms, n=4, method="inclusive")
        return first, third


def markdown(results: Sequence[Result]) -> str:
    """A table: a row per configuration, a column per workload; median, quartiles and processor time in ms a step."""
    workloads = list(dict.fromkeys(r.workload for r in results))
    configurations = list(dict.fromkeys(r.configuration for r in results))
    by_place = {(r.configuration, r.workload): r for r in results}
    lines = [f"| ms a step | {' | '.join(workloads)} |", "|---|" + "---|" * len(workloads)]
    for configuration in configurations:
        cells = [_cell(by_place.get((configuration, workload))) for workload in workloads]
        lines.append(f"| {configuration} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


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


def plot(results: Sequence[Result], path: Path) -> None:
    """Bars of the medians with their quartiles, one panel per workload, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "whale", "svg.fonttype": "none", "font.size": 10})
    from matplotlib import pyplot

    shown = [r for r in results if r.samples_ms]
    workloads = list(dict.fromkeys(r.workload for r in shown))
    height = 0.8 + 0.42 * max(sum(r.workload == w for r in shown) for w in workloads)
    figure, panels = pyplot.subplots(len(workloads), 1, figsize=(9, height * len(workloads)), squeeze=False)
    for panel, workload in zip(panels[:, 0], workloads):
        rows = [r for r in shown if r.workload == workload][::-1]
        medians = [r.median_ms for r in rows]
        spread = [[r.median_ms - r.quartiles_ms[0] for r in rows], [r.quartiles_ms[1] - r.median_ms for r in rows]]
        bars = panel.barh([r.configuration for r in rows], medians, color=[_color(r.configuration) for r in rows])
        panel.errorbar(medians, range(len(rows)), xerr=spread, fmt="none", ecolor="black", elinewidth=1, capsize=3)
        for bar, result in zip(bars, rows):
            text = f"{result.median_ms:.0f}"
            panel.annotate(text, (result.quartiles_ms[1], bar.get_y() + bar.get_height() / 2), (6, 0),
                           textcoords="offset points", va="center")  # fmt: skip
        panel.set_title(workload, loc="left", fontsize=11, fontweight="bold")
        panel.set_xlim(0, 1.12 * max(r.quartiles_ms[1] for r in rows))
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("ms a step (median; whiskers: quartiles)")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def _color(configuration: str) -> str:
    if configuration.startswith("TensorFlow"):
        return "#9aa5b1"
    return "#3f7fbf" if configuration.startswith("Whale") else "#d98c3f"


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
without XLA; Horovod over MPI; `tf.distribute`'s MultiWorkerMirroredStrategy (Keras 2); PyTorch, alone and with
DistributedDataParallel over gloo; Keras 3 on JAX, data parallel over two devices of one process; and Whale: data
parallel, with its tensors divided (`wh.split`, FC only), with the optimizer's state divided (`memory.zero=1`), over
MPI alone, without shared memory, and with Horovod as its backend. Models have the same layers everywhere. Every
configuration is a process group that stays alive; in each round all groups run {steps} steps in turn while the others
are stopped, so what else the machine does meets all of them. (Where memory does not hold all groups at once, those
with several ranks form one set, and the others further ones.) The table shows the median of {rounds} rounds in ms a
step, the quartiles, and the processor time of a step, all ranks together. Each rank has one thread and one core (four
ranks share the cores); one process with two threads or devices has both. Horovod's cycle time and fusion threshold
are the best of those tried for each model.

Measured on {where}.

{table}
![Step times]({plot})

"""
