"""A second run of the same program plans nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.programs import Builder
from tests.runtime.compile.test_auto import MIDDLE, speed
from tests.runtime.layouts.test_split import Classifier, double
from whale import log
from whale.distributed.cache_files import CacheFolder
from whale.ir.plan import Plan, plan_from_json
from whale.passes.pass_manager import make_plan
from whale.passes.settings import PlanSettings
from whale.planner.graph_search import search
from whale.runtime.compile import auto, cross_rank_checks
from whale.runtime.compile.plan_cache import keep_plan, load_plan
from whale.runtime.context import RunMachines, require_current

__all__ = ["double", "speed"]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the programs that are planned, and of those whose ways are searched."""
    names: list[str] = []
    plan, look = cross_rank_checks.make_any_plan, auto.best_way

    def planned(program: Any, settings: Any) -> Any:
        names.append(program.name)
        return plan(program, settings)

    def looked(program: Any, *others: Any, **named: Any) -> Any:
        names.append(f"{program.name}: ways")
        return look(program, *others, **named)

    monkeypatch.setattr(cross_rank_checks, "make_any_plan", planned)
    monkeypatch.setattr(auto, "best_way", looked)
    return names


def trained(
    ranks: Callable[..., None], cache: Path, machines: RunMachines | None = None, **config: Any
) -> tuple[Plan, Any]:
    tf.keras.backend.clear_session()
    ranks(2, **{"mesh.plan_cache": str(cache), **config})
    require_current().planning.machines = machines
    classifier = (
        Classifier(wh.function) if config.get("mesh.auto_parallel") else Classifier(wh.function, wh.replica, wh.split)
    )
    found = {"loss": np.asarray(classifier.step(*classifier.batch(0))), **classifier.values()}
    plan = classifier.step.plan(*classifier.batch(0))
    wh.shutdown()
    return plan, found


def test_a_second_run_takes_the_plan_of_the_first(
    ranks: Callable[..., None], made: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "whale"
    first = trained(ranks, cache)
    assert made
    made.clear()
    second = trained(ranks, cache)
    assert made == [] and second[0].to_json() == first[0].to_json()
    assert all(np.array_equal(first[1][name], second[1][name]) for name in first[1]) and first[1]
    third = trained(ranks, cache, **{"batch.shares": [3, 5]})
    assert made and third[0].to_json() != first[0].to_json()
    assert "not legal" not in capsys.readouterr().err


@pytest.mark.parametrize("other", [{"name": "v:0"}, {"scope": "split_0"}], ids=str)
def test_a_plan_is_that_of_the_same_variables(
    ranks: Callable[..., None], tmp_path: Path, other: dict[str, str]
) -> None:
    """Placements that a run keeps to go by variables' names; what is divided goes by their scopes."""
    ranks(2, **{"mesh.plan_cache": str(tmp_path / "whale")})
    context, settings, b = require_current("the test"), PlanSettings(2), Builder()
    x, w = b.input("x", (4, 3)), b.variable("w", (3, 2))
    program = b.build([b.op("MatMul", x, b.read(w))])
    plan = make_plan(program, settings)
    keep_plan(program, context, settings, plan)
    kept = load_plan(program, context, settings)
    assert kept is not None and kept.to_json() == plan.to_json()
    (variable,) = program.variables
    assert load_plan(replace(program, variables=(replace(variable, **other),)), context, settings) is None


def test_a_plan_that_is_not_legal_is_made_anew(
    ranks: Callable[..., None], made: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "whale"
    first, _ = trained(ranks, cache)
    made.clear()
    files = CacheFolder(cache)
    for name in [path.name for path in cache.iterdir()]:
        if name.endswith(".step"):
            files.remove(name)
            continue
        data = files.get(name)
        assert data is not None
        plan = plan_from_json(data)
        if plan.fingerprint == first.fingerprint:
            files.put(name, data.replace(b'"S(1)[', b'"S(0)['))
    again, _ = trained(ranks, cache)
    assert len(made) == 1 and again.to_json() == first.to_json()
    assert "is not legal, and is made anew" in capsys.readouterr().err


def test_a_second_run_searches_no_way(
    ranks: Callable[..., None], speed: Callable[..., None], made: list[str], tmp_path: Path
) -> None:
    speed(MIDDLE)
    first = trained(ranks, tmp_path / "whale", **{"mesh.auto_parallel": True})
    assert [name for name in made if name.endswith("ways")]
    made.clear()
    second = trained(ranks, tmp_path / "whale", **{"mesh.auto_parallel": True})
    assert made == [] and second[0].to_json() == first[0].to_json()


def test_what_was_chosen_for_other_hosts_or_another_link_is_looked_for_anew(
    ranks: Callable[..., None],
    speed: Callable[..., None],
    made: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    speed(MIDDLE)

    def searches(exchange_s: float, *hosts: str) -> bool:
        made.clear()
        trained(ranks, tmp_path / "whale", RunMachines(hosts, exchange_s, None), **{"mesh.auto_parallel": True})
        return any(name.endswith("ways") for name in made)

    assert searches(1e-3, "a h0", "a h1")
    assert not searches(2e-3, "a h0", "a h1")  # on a busy machine
    assert searches(1e-3, "a h0", "a h2") and searches(1e-3, "a h0", "b h1")
    capsys.readouterr()
    assert searches(0.2, "a h0", "a h1")
    said = capsys.readouterr().err
    assert said.count("hosts exchange 256 KB in 200 ms, and took 1 ms when an earlier run chose a strategy") == 1, said
    assert not searches(0.2, "a h0", "a h1")  # the new way is kept in place of the old one


def test_what_a_search_without_time_chose_is_not_kept(
    ranks: Callable[..., None],
    speed: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    speed(MIDDLE)
    monkeypatch.setattr(search, "BUDGET_S", 0.0)
    trained(ranks, tmp_path / "whale", **{"mesh.auto_parallel": True})
    assert "not looked at, the time is over" in capsys.readouterr().err
    kept = list((tmp_path / "whale").iterdir())
    assert kept and not [path for path in kept if path.suffix == ".strategy"]


def test_a_folder_that_cannot_be_used_is_said_once(
    ranks: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    ranks(2, **{"mesh.plan_cache": str(tmp_path / "file")})
    double = wh.function(lambda x: 2 * x)
    double(tf.ones(4)), double(tf.ones(6))
    assert capsys.readouterr().err.count("plans are not kept for later runs") == 1


def test_a_line_says_what_takes_long(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with log.log_while_running("planning `step`"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(log, "FIRST_S", 0.01)
    with log.log_while_running("planning `step`"):
        time.sleep(0.1)
    assert "whale: planning `step`: 0 s\n" in capsys.readouterr().err
