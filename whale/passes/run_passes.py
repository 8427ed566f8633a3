"""Runs the passes of a table in order; times, logs, dumps and verifies the result of each.

Four tables turn a captured program into the ranks' programs. NORMALIZE and PLAN are in ``whale.passes.pass_manager``,
PARTITION in ``whale.partition.lower``, REWRITE in ``whale.kernels.substitute``.

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

V = TypeVar("V")  # the value that the passes of a table change: a program, or the draft of a plan
C = TypeVar("C")  # the context that they read, such as settings

VERIFY_VARIABLE = "WHALE_VERIFY_PASSES"  # environment variable: if set, programs are verified even without a dump


@dataclass(frozen=True, slots=True)
class When(Generic[C]):
    """Represents the condition under which a pass runs.

    Attributes:
      text: the configuration key, or the property of the program or plan, that turns the pass on, for reports.
      holds: returns True if the condition is true in the table's context (the settings).
    """

    text: str
    holds: Callable[[C], bool]


@dataclass(frozen=True, slots=True)
class Pass(Generic[V, C]):
    """Represents a pass: one row of a table, which turns a program (or draft of a plan) into a changed one.

    Attributes:
      name: its name in dumps, reports and errors.
      what: a line that says what the pass does, for reports.
      run: returns the new value (a program or plan) from the previous value and the context; changes neither of them.
      when: its condition; None: the pass always runs.
    """

    name: str
    what: str
    run: Callable[[V, C], V]
    when: When[C] | None = None

    def runs(self, context: C) -> bool:
        """Returns True if the pass runs in ``context`` (its condition holds, or there is none)."""
        return self.when is None or self.when.holds(context)


@dataclass(frozen=True, slots=True)
class Table(Generic[V, C]):
    """Represents a named list of passes that run one after the other on the same kind of value.

    Attributes:
      programs: returns the programs in a value, which are verified after each pass.
      text: formats a value for ``debug.dump``.
      changes: describes in a few words what a pass has changed, from the values before and after the pass.
    """

    name: str
    passes: tuple[Pass[V, C], ...]
    programs: Callable[[V], Sequence[Program]]
    text: Callable[[V, C], str]
    changes: Callable[[V, V], str]


@dataclass(frozen=True, slots=True)
class PassRun:
    """Records one run of a pass.

    Attributes:
      table: name of the pass's table.
      name: name of the pass.
      seconds: how long it took.
      changed: what it changed, in a few words ("3 new, 1 gone, of 120 nodes").
    """

    table: str
    name: str
    seconds: float
    changed: str


@dataclass
class PassLog:
    """Collects the passes that have run, in order, for a report of their time and changes."""

    runs: list[PassRun] = field(default_factory=list)

    def lines(self, tables: Iterable[Table]) -> list[str]:
        """Formats a report of the passes of ``tables``: a line for each with its seconds and changes, or, if it did not
        run, the condition that would turn it on.
        """
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
    """Says how runs of passes are observed: whether their results are dumped, logged and verified.

    Attributes:
      dump: the directory to which the program is written after each pass (key ``debug.dump``); "": none.
      log: gets each pass's seconds and changes; None: they are not recorded.
    """

    dump: str = ""
    log: PassLog | None = field(default=None, compare=False, repr=False)

    @property
    def is_on(self) -> bool:
        """Returns True if passes are dumped or logged; they must run then, even if a cache holds their result."""
        return bool(self.dump) or self.log is not None

    @property
    def verifies(self) -> bool:
        """Returns True if the programs are verified after each pass: with ``debug.dump``, or if ``WHALE_VERIFY_PASSES``
        is set, as tests do.
        """
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
      value: a program, draft or other value of the kind that the table's passes take.
      context: what passes and their conditions read beside the value, usually the settings.
      passes: the passes to run, if not all of the table; None: all.

    Returns:
      The value that the last pass returned.

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
    """Writes ``text`` to ``<directory>/<program>/<number>-<name>.txt``; writes nothing if ``directory`` is "".

    Numbers count the files of the program's folder, so that they follow the order of passes.
    """
    if not directory:
        return
    folder = Path(directory) / "".join(c if c.isalnum() or c in "._-" else "_" for c in program or "program")
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob("*.txt")))
    (folder / f"{number:02d}-{name}.txt").write_text(text)


def program_changes(before: Program, after: Program) -> str:
    """Describes how many nodes a pass has added, removed and changed in a program and its functions: "3 new, 1 gone, of
    120 nodes", or "nothing".
    """
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
