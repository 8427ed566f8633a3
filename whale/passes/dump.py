"""Writes the text of a program after each pass, and of its plan, to a directory that ``WHALE_DEBUG_DUMP`` names."""

from __future__ import annotations

from pathlib import Path

from whale.ir.plan import Plan
from whale.ir.plan_text import format_plan
from whale.ir.program import Program
from whale.ir.text import format_program


def dump(directory: str, name: str, program: Program, plan: Plan | None = None) -> None:
    """Writes the program, or its plan where one is given, to ``<directory>/<program>/<number>-<name>.txt``.

    Numbers go on where earlier texts of the program ended. Nothing is written where ``directory`` is empty.
    """
    if not directory:
        return
    folder = Path(directory) / "".join(c if c.isalnum() or c in "._-" else "_" for c in program.name or "program")
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob("*.txt")))
    text = format_program(program) if plan is None else format_plan(plan)
    (folder / f"{number:02d}-{name}.txt").write_text(text)
