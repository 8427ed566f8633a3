"""The table, the plot and the page of `make bench-comm`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cost_model.figures import INK, LINE, find_colour, open_figure, save_figure

LIMIT = "Memory traffic alone"
EXCHANGE_LIMIT = "The same through slots of shared memory"


@dataclass(frozen=True)
class Result:
    """Seconds of one all-reduce in each round."""

    ranks: int
    size: str
    library: str
    samples_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)


def markdown(results: Sequence[Result], sizes: Sequence[str], libraries: Sequence[str]) -> str:
    """A table for each number of processes: a row per library, a column per size, medians in ms."""
    medians = {(r.ranks, r.size, r.library): r.median_s for r in results}
    tables = []
    for ranks in sorted({r.ranks for r in results}):
        columns = [size for size in sizes if any(key[:2] == (ranks, size) for key in medians)]
        lines = [f"| {ranks} processes, ms | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
        for library in libraries:
            cells = [_cell(medians.get((ranks, size, library))) for size in columns]
            if any(cells):
                lines.append(f"| {library} | {' | '.join(cells)} |")
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def _cell(seconds: float | None) -> str:
    if seconds is None:
        return ""
    ms = 1e3 * seconds
    return f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 10 else f"{ms:.0f}"


def plot(results: Sequence[Result], sizes: Sequence[str], libraries: Sequence[str], path: Path) -> None:
    """Median time over size, one panel for each number of processes, as SVG; what comes in several tensors stands
    apart.
    """
    numbers = sorted({r.ranks for r in results})
    widths = [len({r.size for r in results if r.ranks == ranks}) for ranks in numbers]
    figure, panels = open_figure(1, len(numbers), (12.5, 5), sharey=True, width_ratios=widths)
    for panel, ranks in zip(panels[0], numbers):
        columns = [size for size in sizes if any((r.ranks, r.size) == (ranks, size) for r in results)]
        turns: dict[str, int] = {}
        for library in libraries:
            found = {r.size: 1e3 * r.median_s for r in results if (r.ranks, r.library) == (ranks, library)}
            places = [place for place, size in enumerate(columns) if size in found]
            colour = INK if library in (LIMIT, EXCHANGE_LIMIT) else find_colour(library)
            turn = turns[colour] = turns.get(colour, -1) + 1
            style = {"color": colour, "marker": "osD^"[turn % 4], "markersize": 4, "label": library}
            lines = {"linewidth": 2.4 if library == "Whale" else 1.3, "linestyle": ("-", "--", ":", "-.")[turn % 4]}
            joined = [place for place in places if " x " not in columns[place]]
            panel.plot(joined, [found[columns[place]] for place in joined], **style, **lines)
            apart = [place for place in places if place not in joined]
            style["label"] = "_"
            panel.plot(apart, [found[columns[place]] for place in apart], linestyle="none", **style)
        panel.set_yscale("log")
        ticks = [10.0**exponent for exponent in range(-3, 3)]
        panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        panel.set_xticks(range(len(columns)), columns, rotation=45)
        panel.set_title(f"{ranks} processes", loc="left", fontsize=11, fontweight="bold")
        panel.grid(axis="y", color=LINE, linewidth=0.6)
    panels[0, 0].set_ylabel("ms for one all-reduce (median)")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8.5)
    save_figure(figure, path)


def read(data: Path) -> list[Result]:
    """Returns what communication.json has."""
    return [Result(ranks, size, library, tuple(s)) for ranks, size, library, s in json.loads(data.read_text())]


def write(
    folder: Path,
    results: Sequence[Result],
    sizes: Sequence[str],
    libraries: Sequence[str],
    *,
    where: str,
    rounds: int,
) -> None:
    """communication.json with all samples, .svg and .md; older results of other ranks, sizes and libraries are kept.

    What a person wrote below `## Notes` of the page is kept as well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, page = folder / "communication.json", folder / "communication.md"
    older = read(data) if data.exists() else []
    found = {(r.ranks, r.size, r.library): r for r in [*older, *results]}
    merged = sorted(found.values(), key=lambda r: (r.ranks, sizes.index(r.size), libraries.index(r.library)))
    rows = [json.dumps([r.ranks, r.size, r.library, [round(s, 8) for s in r.samples_s]]) for r in merged]
    data.write_text("[\n" + ",\n".join(rows) + "\n]\n")
    plot(merged, sizes, libraries, page.with_suffix(".svg"))
    old = page.read_text() if page.exists() else ""
    notes = old[old.index(NOTES) :] if NOTES in old else ""
    page.write_text(PAGE.format(where=where, rounds=rounds, table=markdown(merged, sizes, libraries)) + notes)


NOTES = "## Notes"
PAGE = """# Communication within a machine

Written by `make bench-comm`. Milliseconds of one all-reduce of float32, median of {rounds} rounds or more (the samples
are in communication.json). Every library is a process group that stays alive; for each size all groups have a turn in
each round while the others are stopped. All-reduces are inside one graph (a tf.function; Whale calls it as it calls
steps), each takes what the one before gave, and the time of a step is divided by their number (32, fewer from 16 MB
on). Whale, Horovod and MPI reduce 100 tensors as one group. MPI's own all-reduce is in place and without TensorFlow.
"Memory traffic alone" are threads of one process that read and write what no all-reduce can do without
(`benchmarks/comm/probe.cc`). Nothing is pinned to a core. `python -m benchmarks.comm --redraw docs` draws the figure
from communication.json.

Measured on {where}.

{table}
![Time over size](communication.svg)

"""
