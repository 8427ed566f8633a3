"""The page and the figure of the docs: predicted against measured time and memory, one dot per run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.predictions.__main__ import Row

# Colour-blind safe (Okabe and Ito), one per program.
STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P"))


def write(rows: Sequence[Row], report: str, folder: Path) -> None:
    """Writes predictions.md and predictions.png; needs matplotlib."""
    folder.joinpath("predictions.md").write_text(
        "# Predicted and measured: this project's own runs\n\n"
        "Written by `python -m benchmarks.predictions --rows FILE --out docs`; its docstring says how runs are "
        "measured, [the cost model](guides/cost_model.md) how they are predicted, and when. A negative error is a "
        "prediction that is too small.\n\n![Predicted against measured, one dot per run](predictions.png)\n\n```\n"
        + report
        + "\n```\n"
    )
    _draw(rows, folder / "predictions.png")


def _draw(rows: Sequence[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, both = pyplot.subplots(1, 2, figsize=(10, 4.8), layout="constrained")
    panels = (("step time (ms)", 1e3, "_s", 0.1), ("peak of tensors (MB)", 1e-6, "_bytes", 0.05))
    for axes, (title, unit, what, band) in zip(both, panels):
        values = [unit * getattr(r, side + what) for r in rows for side in ("predicted", "measured")]
        low, high = 0.8 * min(values), 1.25 * max(values)
        axes.fill_between(
            [low, high], [(1 - band) * low, (1 - band) * high], [(1 + band) * low, (1 + band) * high],
            color="0.9", label=f"within {100 * band:.0f} %",
        )  # fmt: skip
        axes.plot([low, high], [low, high], color="0.5", linewidth=1)
        for program, (colour, marker) in zip(dict.fromkeys(r.program for r in rows), STYLES):
            mine = [r for r in rows if r.program == program]
            axes.scatter(
                [unit * getattr(r, "measured" + what) for r in mine],
                [unit * getattr(r, "predicted" + what) for r in mine],
                color=colour, marker=marker, s=26, alpha=0.8, linewidths=0, label=program,
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
        ticks = [n for n in (5, 10, 20, 50, 100, 200, 500, 1000) if low < n < high]
        axes.minorticks_off()
        axes.set_xticks(ticks, [str(n) for n in ticks])
        axes.set_yticks(ticks, [str(n) for n in ticks])
        axes.set(xlabel=f"measured {title}", ylabel=f"predicted {title}")
    both[0].legend(frameon=False, fontsize=8, loc="upper left")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
