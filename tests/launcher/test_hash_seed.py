"""Python's string hashes are the same in all ranks of a run, also in those that start again or join."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from whale.launcher import mpirun, run
from whale.launcher.mpirun import HASH_SEED_VARIABLE, Options, draw_hash_seed, parse_hosts

ORDER = "print(list({'ab', 'cd', 'ef', 'gh', 'ij', 'kl'}), hash('mn'))"


@pytest.fixture(autouse=True)
def without_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HASH_SEED_VARIABLE, raising=False)


def test_each_run_draws_a_seed_that_an_interpreter_takes() -> None:
    seeds = {draw_hash_seed({}) for _ in range(20)}
    assert len(seeds) == 20
    assert all(1 <= int(seed) < 1 << 32 for seed in seeds)
    for extreme in ("1", "4294967295"):
        line = [sys.executable, "-c", ORDER]
        said = {subprocess.check_output(line, env={HASH_SEED_VARIABLE: extreme}) for _ in range(2)}
        assert len(said) == 1


@pytest.mark.parametrize(("given", "kept"), [("7", True), ("0", True), ("random", True), ("", False)])
def test_a_users_seed_stays(given: str, kept: bool) -> None:
    assert (draw_hash_seed({HASH_SEED_VARIABLE: given}) == given) == kept


def test_ranks_of_other_hosts_get_it() -> None:
    options = Options(2, __file__, hosts=parse_hosts("here:1,there:1"))
    environment = mpirun.make_environment(options, "address", "token", 0, hash_seed="12")
    assert environment[HASH_SEED_VARIABLE] == "12"
    line = mpirun.make_command(options, "mpirun", environment)
    assert line[line.index(HASH_SEED_VARIABLE) - 1] == "-x"
    assert "12" not in line


def test_a_run_that_starts_again_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Failing:
        def __init__(self, *_: Any) -> None:
            self.has_failed = True

        def run(self, starts: list[mpirun.MpirunStart]) -> int:
            seen.append(starts[0].environment[HASH_SEED_VARIABLE])
            return 1

        def say(self, _: str) -> None:
            pass

    monkeypatch.setattr(run, "Job", Failing)
    options = replace(Options(1, __file__), max_restarts=2)
    for _ in range(2):
        assert run.run(options) == 1
    assert seen[:3] == [seen[0]] * 3
    assert seen[3:] == [seen[3]] * 3
    assert seen[0] != seen[3]
