"""The page and the figure of the docs: predicted against measured time and memory, one dot per run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cost_model.figures import STYLES, find_ticks, mark_diagonal, open_figure, save_figure

SIXTH = ("#56B4E9", "P")
_ROW = re.compile(r"^(\w+) +(\S.*?) {2,}([\d.]+) +([\d.]+) +[+-][\d.]+ +([\d.]+) +([\d.]+) +[+-][\d.]+$", re.MULTILINE)


@dataclass(frozen=True)
class Dot:
    """A run of the table: milliseconds of a step, and MB of tensors at its peak."""

    program: str
    plan: str
    predicted_ms: float
    measured_ms: float
    predicted_mb: float
    measured_mb: float


def write(report: str, folder: Path) -> None:
    """Writes predictions.md and predictions.svg; needs matplotlib."""
    page = folder / "predictions.md"
    page.write_text(
        "# Predicted and measured: this project's own runs\n\n"
        "Written by `python -m benchmarks.predictions --rows FILE --out docs`; its docstring says how runs are "
        "measured, [the cost model](guides/cost_model.md) how they are predicted, and when. The figure is drawn from "
        "the table by `python -m benchmarks.predictions --redraw docs`. A negative error is a prediction that is too "
        "small.\n\n![Predicted against measured, one dot per run](predictions.svg)\n\n```\n" + report + "\n```\n"
    )
    draw(read_table(page.read_text()), folder / "predictions.svg")


def read_table(page: str) -> list[Dot]:
    """Returns the runs that the page lists."""
    return [Dot(found[1], found[2], *map(float, found.groups()[2:])) for found in _ROW.finditer(page)]


def draw(dots: Sequence[Dot], path: Path) -> None:
    """Writes the figure."""
    figure, (both,) = open_figure(1, 2, (11, 4.8))
    for axes, (title, unit, part) in zip(both, (("step (ms)", "ms", 0.1), ("peak of tensors (MB)", "mb", 0.05))):
        values = [getattr(dot, f"{side}_{unit}") for dot in dots for side in ("predicted", "measured")]
        low, high = 0.85 * min(values), 1.18 * max(values)
        mark_diagonal(axes, low, high, part)
        for program, (colour, marker) in zip(dict.fromkeys(dot.program for dot in dots), (*STYLES[:5], SIXTH)):
            mine = [dot for dot in dots if dot.program == program]
            axes.scatter(
                [getattr(dot, f"measured_{unit}") for dot in mine],
                [getattr(dot, f"predicted_{unit}") for dot in mine],
                color=colour, marker=marker, s=26, alpha=0.8, linewidths=0, label=program,
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
        axes.minorticks_off()
        ticks = find_ticks(low, high)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set(xlabel=f"measured {title}", ylabel=f"predicted {title}")
        axes.set_title(f"band: within {part:.0%}", loc="left", fontsize=9)
    handles, labels = both[0].get_legend_handles_labels()
    figure.legend(handles[1:], labels[1:], loc="outside right upper", frameon=False)
    save_figure(figure, path)
