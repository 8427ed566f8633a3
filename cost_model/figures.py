"""Draws figures of the documentation as SVG that follows the reader's light or dark scheme, with one colour per
system.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whale.errors import InstallError

# Colours that differ in the dark scheme: of text and frame, grid, bands.
INK, LINE, BAND = "#16202c", "#d3d9e1", "#e9edf3"
_ON_DARK = {INK: "#e6ebf1", LINE: "#37424f", BAND: "#222c38"}
# Colour-blind safe (Okabe and Ito), each with every marker in turn.
COLOURS, MARKERS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"), "os^Dv"
STYLES = [(COLOURS[i % 5], MARKERS[(i + i // 5) % 5]) for i in range(25)]
# (part of a configuration's name, colour of its system); the first that matches counts.
SYSTEMS = (
    ("Whale", "#2f6fdb"),
    ("Horovod", "#e08a24"),
    ("MultiWorker", "#8d63c9"),
    ("PyTorch", "#d5473f"),
    ("JAX", "#18a387"),
    ("MPI", "#a0714f"),
    ("TensorFlow", "#8a949e"),
)


def find_colour(name: str) -> str:
    """Returns the colour of the system (Whale, Horovod, ...) whose name a configuration's name contains."""
    return next((colour for system, colour in SYSTEMS if system in name), INK)


def open_figure(rows: int, columns: int, size_inches: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """Creates a matplotlib figure with a grid of axes, laid out without overlaps; returns (figure, array of axes).

    Args:
        rows, columns: shape of the grid.
        options: further arguments of `pyplot.subplots`.

    Raises:
        InstallError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise InstallError(
            "figures need matplotlib", given=str(error), action="pip install 'whale-tensorflow[bench]'"
        ) from None
    matplotlib.use("svg")
    colours = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor")
    matplotlib.rcParams.update(dict.fromkeys(colours, INK))
    matplotlib.rcParams.update(dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), LINE))
    matplotlib.rcParams.update({"svg.hashsalt": "whale", "svg.fonttype": "none", "font.size": 10})
    matplotlib.rcParams.update({"hatch.color": INK, "hatch.linewidth": 0.6})
    matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True})
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=size_inches, layout="constrained", squeeze=False, **options)


def save_figure(figure: Any, path: Path) -> None:
    """Writes a figure as SVG with transparent background, whose text, grid and bands follow the reader's colour
    scheme.
    """
    from matplotlib import pyplot

    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    names = {light: f"--c{number}" for number, light in enumerate(_ON_DARK)}
    svg = text.getvalue()
    for light, name in names.items():
        svg = svg.replace(f": {light}", f": var({name})")
    schemes = [";".join(f"{names[light]}:{colour}" for light, colour in scheme) for scheme in (
        [(light, light) for light in _ON_DARK], list(_ON_DARK.items())
    )]  # fmt: skip
    style = f"<style>:root{{{schemes[0]}}} @media (prefers-color-scheme: dark){{:root{{{schemes[1]}}}}}</style>"
    begin = svg.index(">", svg.index("<svg")) + 1
    lines = (line.rstrip() for line in f"{svg[:begin]}\n {style}{svg[begin:]}".splitlines())
    path.write_text("\n".join(lines) + "\n")


def mark_diagonal(axes: Any, low: float, high: float, part: float) -> None:
    """Draws the line x = y, and the band in which y differs from x by at most the fraction ``part``."""
    ends = [low, high]
    axes.fill_between(
        ends, [(1 - part) * n for n in ends], [(1 + part) * n for n in ends],
        color=BAND, linewidth=0, label=f"within {part:.0%}",
    )  # fmt: skip
    axes.plot(ends, ends, color=INK, linewidth=0.8)


def find_ticks(low: float, high: float) -> Sequence[float]:
    """Returns tick positions for a logarithmic axis: 1, 2 and 5 times powers of ten, or powers alone if that were over
    eight.
    """
    powers = [10.0**exponent for exponent in range(-12, 13)]
    found = [k * power for power in powers for k in (1, 2, 5) if low <= k * power <= high]
    return found if len(found) <= 8 else [power for power in powers if low <= power <= high]
