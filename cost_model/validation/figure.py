"""Draws the figure of the docs: predicted against measured seconds, one dot per row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cost_model.validation.report import Result
from whale.errors import InstallError

# Colour-blind safe (Okabe and Ito), each with every marker in turn, in the order of the tables.
COLOURS, MARKERS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"), "os^Dv"
STYLES = [(COLOURS[i % 5], MARKERS[(i + i // 5) % 5]) for i in range(25)]


def draw(tables: Sequence[tuple[str, Sequence[Result]]], path: Path) -> None:
    """Writes a PNG or SVG, by the path's suffix; the band is ten per cent."""
    try:
        import matplotlib
    except ImportError as error:
        raise InstallError(
            "the figure needs matplotlib", given=str(error), action="pip install 'whale-tensorflow[bench]'"
        ) from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    everything = [one for _, found in tables for one in found]
    low = 0.8 * min(min(one.case.measured_s, one.predicted_s) for one in everything)
    high = 1.25 * max(max(one.case.measured_s, one.predicted_s) for one in everything)
    left.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color="0.9", label="within 10 %")
    left.plot([low, high], [low, high], color="0.5", linewidth=1)
    right.axhspan(-10, 10, color="0.9")
    right.axhline(0, color="0.5", linewidth=1)
    for (name, found), (colour, marker) in zip(tables, STYLES):
        measured = [one.case.measured_s for one in found]
        style = {"color": colour, "marker": marker, "s": 22, "alpha": 0.75, "linewidths": 0, "label": name}
        left.scatter(measured, [one.predicted_s for one in found], **style)
        right.scatter(measured, [100 * one.error for one in found], **style)
    for axes in (left, right):
        axes.set(xscale="log", xlim=(low, high), xlabel="measured step time (s)")
    left.set(yscale="log", ylim=(low, high), ylabel="predicted step time (s)", aspect="equal")
    right.set(ylabel="error of the prediction (%)")
    left.legend(frameon=False, fontsize=8, loc="upper left")
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
