"""Draws the documentation's figure of predicted against measured seconds, one dot per row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cost_model.figures import BAND, INK, STYLES, find_ticks, mark_diagonal, open_figure, save_figure
from cost_model.validation.report import Result


def draw(tables: Sequence[tuple[str, Sequence[Result]]], path: Path) -> None:
    """Writes an SVG of predicted over measured seconds, and of the error; a band marks errors up to ten per cent.

    Args:
        tables: (name of the table, results of its rows).

    Raises:
        InstallError: matplotlib is not installed.
    """
    figure, ((left, right),) = open_figure(1, 2, (12.5, 5.2))
    everything = [one for _, found in tables for one in found]
    low = 0.8 * min(min(one.case.measured_s, one.predicted_s) for one in everything)
    high = 1.25 * max(max(one.case.measured_s, one.predicted_s) for one in everything)
    mark_diagonal(left, low, high, 0.1)
    right.axhspan(-10, 10, color=BAND, linewidth=0)
    right.axhline(0, color=INK, linewidth=0.8)
    for (name, found), (colour, marker) in zip(tables, STYLES):
        measured = [one.case.measured_s for one in found]
        style = {"color": colour, "marker": marker, "s": 20, "alpha": 0.75, "linewidths": 0, "label": name}
        left.scatter(measured, [one.predicted_s for one in found], **style)
        right.scatter(measured, [100 * one.error for one in found], **style)
    ticks = find_ticks(low, high)
    for axes in (left, right):
        axes.set(xscale="log", xlim=(low, high), xlabel="measured step (s)")
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    left.set(yscale="log", ylim=(low, high), ylabel="predicted step (s)", aspect="equal")
    left.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    left.minorticks_off()
    right.set(ylabel="error of the prediction (%)")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8.5)
    save_figure(figure, path)
