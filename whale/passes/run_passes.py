"""Runs the passes of a table in order: times, counts, dumps and verifies the result of each.

Four tables turn a captured program into the ranks' programs. NORMALIZE and PLAN are in ``whale.passes.pass_manager``,
PARTITION in ``whale.partition.lower``, REWRITE in ``whale.kernels.substitute`` (decision 0139).

Decision: 0139.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Generic, TypeVar

from whale.ir.program import Node, Program
from whale.ir.verify import verify

V = TypeVar("V")  # what the passes of a table change
C = TypeVar("C")  # what they are told beside it

VERIFY_VARIABLE = "WHALE_VERIFY_PASSES"  # of the environment: set, programs are verified without a dump, as in tests


@dataclass(frozen=True, slots=True)
class When(Generic[C]):
    """The condition under which a pass runs.

    Attributes:
      text: the configuration key, or the property of the program or plan, that turns the pass on.
      holds: tells whether the condition is true.
    """

    text: str
    holds: Callable[[C], bool]


@dataclass(frozen=True, slots=True)
class Pass(Generic[V, C]):
    """A pass: a row of a table.

    Attributes:
      name: its name in dumps, reports and errors.
      what: a line that says what it does.
      run: returns the new value (a program or plan) from the previous one; it changes neither value nor context.
      when: its condition; None: it always runs.
    """

    name: str
    what: str
    run: Callable[[V, C], V]
    when: When[C] | None = None

    def runs(self, context: C) -> bool:
        """Tells whether the pass runs."""
        return self.when is None or self.when.holds(context)


@dataclass(frozen=True, slots=True)
class Table(Generic[V, C]):
    """Passes that run in this order.

    Attributes:
      programs: the programs of a value, which are verified.
      text: a value as it is dumped.
      changes: describes in a few words what a pass has changed, from the values before and after it.
    """

    name: str
    passes: tuple[Pass[V, C], ...]
    programs: Callable[[V], Sequence[Program]]
    text: Callable[[V, C], str]
    changes: Callable[[V, V], str]


@dataclass(frozen=True, slots=True)
class PassRun:
    """The record of one run of a pass."""

    table: str
    name: str
    seconds: float
    changed: str


@dataclass
class PassLog:
    """The passes that have run, in order."""

    runs: list[PassRun] = field(default_factory=list)

    def lines(self, tables: Iterable[Table]) -> list[str]:
        """Formats the passes of tables: the seconds and changes of each, or the condition that would turn it on."""
        rows: list[tuple[str, str, str]] = []
        for table in tables:
            mine = [run for run in self.runs if run.table == table.name]
            rows.append((table.name, f"{sum(run.seconds for run in mine):.4f}", ""))
            for one in table.passes:
                ran = [run for run in mine if run.name == one.name]
                seconds = f"{sum(run.seconds for run in ran):.4f}" if ran else "-"
                if not ran:
                    said = f"off; on by {one.when.text}" if one.when is not None else "did not run"
                else:
                    said = "; then ".join(dict.fromkeys(run.changed for run in ran))
                    said += f" ({len(ran)} times)" if len(ran) > 1 else ""
                rows.append((f"  {one.name}", seconds, said))
        width = max(len(name) for name, _, _ in rows)
        head = ("passes", "seconds", "changed")
        return [f"{name:<{width}}  {seconds:>8}  {said}".rstrip() for name, seconds, said in (head, *rows)]


@dataclass(frozen=True, slots=True)
class PassObserver:
    """Observes passes: where they are dumped and logged.

    Attributes:
      dump: the directory to which the program is written after each pass (key ``debug.dump``); "": none.
      log: gets each pass's seconds and changes; None: they are not recorded.
    """

    dump: str = ""
    log: PassLog | None = field(default=None, compare=False, repr=False)

    @property
    def is_on(self) -> bool:
        """Tells whether passes are dumped or logged, so that they must not be skipped by a cached result."""
        return bool(self.dump) or self.log is not None

    @property
    def verifies(self) -> bool:
        """Tells whether the result of each pass is verified: with ``debug.dump``, and in tests."""
        return bool(self.dump or os.environ.get(VERIFY_VARIABLE))


def run_passes(
    table: Table[V, C],
    value: V,
    context: C,
    observer: PassObserver,
    passes: Sequence[Pass[V, C]] | None = None,
) -> V:
    """Applies the passes of a table to ``value``, one after the other; skips those whose condition is false.

    Args:
      passes: some of the table's; None: all.

    Raises:
      ProgramError: programs are verified, and a pass has broken one; names the pass and the op.
    """
    for one in table.passes if passes is None else passes:
        if one.when is None or one.when.holds(context):
            value = _run_observed(table, one, value, context, observer)
    return value


def _run_observed(table: Table[V, C], one: Pass[V, C], value: V, context: C, observer: PassObserver) -> V:
    start_s = perf_counter()
    after = one.run(value, context)
    seconds = perf_counter() - start_s
    if observer.log is not None:
        observer.log.runs.append(PassRun(table.name, one.name, seconds, table.changes(value, after)))
    if observer.dump:
        before = table.programs(value)
        dump(observer.dump, one.name, before[0].name, table.text(after, context))
    if observer.verifies:
        known = {id(program) for program in table.programs(value)}
        for program in table.programs(after):
            if id(program) not in known:
                verify(program, f"{one.name} (of {table.name})")
    return after


def dump(directory: str, name: str, program: str, text: str) -> None:
    """Writes a text to ``<directory>/<program>/<number>-<name>.txt``.

    Numbers continue from earlier texts of the program. Nothing is written if ``directory`` is empty.
    """
    if not directory:
        return
    folder = Path(directory) / "".join(c if c.isalnum() or c in "._-" else "_" for c in program or "program")
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob("*.txt")))
    (folder / f"{number:02d}-{name}.txt").write_text(text)


def program_changes(before: Program, after: Program) -> str:
    """Describes how many nodes of a program, and of its functions, a pass has added, removed and changed."""
    if before is after:
        return "nothing"
    was, now = _nodes(before), _nodes(after)
    new, gone = len(now.keys() - was.keys()), len(was.keys() - now.keys())
    other = sum(node is not was[key] and node != was[key] for key, node in now.items() if key in was)
    said = [f"{count} {word}" for count, word in ((new, "new"), (gone, "gone"), (other, "changed")) if count]
    return f"{', '.join(said)}, of {len(was)} nodes" if said else "nothing"


def _nodes(program: Program) -> dict[tuple[str, str], Node]:
    graphs = (("", program), *program.functions.items())
    return {(graph, node.name): node for graph, body in graphs for node in body.nodes}
