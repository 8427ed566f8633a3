"""Runs the checks of `whale doctor` and prints their findings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from whale.doctor import gpus, machine, software, trial
from whale.doctor.finding import Finding
from whale_ops import gpu_driver

_STYLES = {"ok": "green", "none": "dim", "warning": "yellow", "problem": "bold red"}


def main(*, as_json: bool, with_trial: bool, timeout_s: float) -> int:
    """Runs all checks and prints their findings.

    Args:
        as_json: whether to print one JSON object instead of tables.
        with_trial: whether to also try a run of two processes.
        timeout_s: time limit of that run in seconds.

    Returns:
        The exit code: 1 if there is a problem, 0 otherwise (also with warnings).
    """
    console = Console(highlight=False, stderr=as_json)
    findings = [*software.look(), *machine.look(), *gpus.look(gpu_driver.look())]
    if not as_json:
        console.print(_make_table(findings))
    if with_trial:
        found = _run_trial(console, findings, timeout_s)
        findings.append(found)
        if not as_json:
            console.print(_make_table([found]))
    problems = sum(finding.status == "problem" for finding in findings)
    if as_json:
        print(json.dumps({"healthy": problems == 0, "findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        for line in _list_advice(findings):
            console.print(line, soft_wrap=True)
        console.print(_make_verdict(findings, with_trial))
    return int(problems > 0)


def _run_trial(console: Console, findings: Sequence[Finding], timeout_s: float) -> Finding:
    problems = [finding.name for finding in findings if finding.status == "problem"]
    if problems:
        return Finding(trial.NAME, "none", f"not tried before these problems are solved: {', '.join(problems)}")
    with console.status(f"{trial.NAME}, {timeout_s:g} s at most"):
        return trial.look(timeout_s)


def _make_table(findings: Sequence[Finding]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(min_width=22)
    table.add_column(min_width=7)
    table.add_column(overflow="fold")
    for finding in findings:
        state = Text(finding.status if finding.status != "none" else "-", style=_STYLES[finding.status])
        table.add_row(finding.name, state, Text(finding.text))
    return table


def _list_advice(findings: Sequence[Finding]) -> Iterator[Text]:
    for finding in findings:
        if finding.action is not None:
            yield Text.assemble(
                "\n", (finding.status, _STYLES[finding.status]), f": {finding.name}\n  next: {finding.action}"
            )


def _make_verdict(findings: Sequence[Finding], with_trial: bool) -> Text:
    counts = {status: sum(finding.status == status for finding in findings) for status in ("problem", "warning")}
    if counts["problem"]:
        text = f"\n{_format_count(counts['problem'], 'problem')}, {_format_count(counts['warning'], 'warning')}"
        return Text(text, style=_STYLES["problem"])
    ready = "runs work here" if with_trial else "no problem was found; with --quick no run was tried"
    return Text(
        f"\n{ready}{'; ' + _format_count(counts['warning'], 'warning') if counts['warning'] else ''}", style="green"
    )


def _format_count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
