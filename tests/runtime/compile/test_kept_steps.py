"""A second run of the same program lowers nothing, and computes the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.draws import one_of
from tests.kernels.one_rank import without
from tests.runtime.compile.test_auto import MIDDLE, speed
from tests.runtime.layouts.test_split import Classifier
from whale.capture import function as capture
from whale.distributed.cache_files import CacheFolder
from whale.ir.plan import Plan
from whale.runtime.compile import compile as compiling
from whale.runtime.compile import plan_cache
from whale.runtime.context import process, require_current

__all__ = ["speed"]
pytestmark = pytest.mark.core
Ranks = Callable[..., None]


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is read out of traces, planned and lowered."""
    found: list[str] = []

    def counted(where: Any, name: str) -> None:
        usual = getattr(where, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            found.append(name)
            return usual(*args, **kwargs)

        monkeypatch.setattr(where, name, count)

    counted(capture, "read_graph")
    for name in ("normalise", "agree_on_plan", "lower_ranks", "substitute_kernels"):
        counted(compiling, name)
    return found


def in_a_new_process() -> None:
    """Names of layers and communicators begin anew."""
    tf.keras.backend.clear_session()
    process.runs = 0


def trained(ranks: Ranks, cache: Path, steps: int = 3, **config: Any) -> tuple[Plan, dict[str, Any]]:
    in_a_new_process()
    ranks(2, **{"mesh.plan_cache": str(cache), **config})
    scopes = () if config.get("mesh.auto_parallel") else (wh.replica, wh.split)
    classifier = Classifier(wh.function, *scopes)
    losses = [np.asarray(classifier.step(*classifier.batch(i))) for i in range(steps)]
    found = {
        "losses": np.asarray(losses),
        **classifier.values(),
        "memory": require_current().reports.predicted["step"](),
    }
    plan = classifier.step.plan(*classifier.batch(0))
    wh.shutdown()
    return plan, found


def assert_equal(one: tuple[Plan, dict[str, Any]], other: tuple[Plan, dict[str, Any]]) -> None:
    assert one[0].to_json() == other[0].to_json() and one[1].keys() == other[1].keys() and len(one[1]) > 3
    for name, value in one[1].items():
        assert value == other[1][name] if name == "memory" else np.array_equal(value, other[1][name]), name


def steps_in(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.step"))


def test_a_second_run_lowers_nothing(ranks: Ranks, done: list[str], tmp_path: Path) -> None:
    first = trained(ranks, tmp_path / "whale")
    assert {"read_graph", "normalise", "agree_on_plan", "lower_ranks", "substitute_kernels"} <= set(done)
    assert len(steps_in(tmp_path / "whale")) == 1
    done.clear()
    in_a_new_process()
    ranks(2, **{"mesh.plan_cache": str(tmp_path / "whale")})
    classifier = Classifier(wh.function, wh.replica, wh.split)
    classifier.step(*classifier.batch(0))
    assert done == []
    wh.shutdown()
    assert_equal(trained(ranks, tmp_path / "whale"), first)


def test_a_second_run_spreads_as_the_first_one_chose(
    ranks: Ranks, speed: Callable[..., None], done: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speed(MIDDLE)
    first = trained(ranks, tmp_path / "whale", **{"mesh.auto_parallel": True})
    done.clear()
    capsys.readouterr()
    second = trained(ranks, tmp_path / "whale", **{"mesh.auto_parallel": True})
    assert "agree_on_plan" not in done and "as in an earlier run" in capsys.readouterr().err
    assert_equal(second, first)


@pytest.mark.parametrize(
    "damage", one_of(3, [lambda data: data[:-1], lambda data: data[:80] + b"!" + data[81:], lambda _: b""])
)
def test_damage_is_said_and_the_step_made_anew(
    ranks: Ranks,
    done: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[bytes], bytes],
) -> None:
    first = trained(ranks, tmp_path / "whale")
    (kept,) = steps_in(tmp_path / "whale")
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    done.clear()
    assert_equal(trained(ranks, tmp_path / "whale"), first)
    assert "lower_ranks" in done and "is damaged, and is made anew" in capsys.readouterr().err
    assert steps_in(tmp_path / "whale") == [kept] and len(kept.read_bytes()) == len(whole)


def test_what_another_whale_wrote_under_the_name_is_made_anew(
    ranks: Ranks, done: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = trained(ranks, tmp_path / "whale")
    (kept,) = steps_in(tmp_path / "whale")
    CacheFolder(tmp_path / "whale").put(kept.name, b"\x81\xa7program\xa4step")
    done.clear()
    assert_equal(trained(ranks, tmp_path / "whale"), first)
    assert "lower_ranks" in done and "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "config",
    one_of(
        4,
        [
            {"batch.shares": [3, 5]},
            without("updates"),
            without("elementwise"),
            {"pipeline.micro_batches": 2},
        ],
    ),
)
def test_another_configuration_is_lowered_by_itself(
    ranks: Ranks, done: list[str], tmp_path: Path, config: dict[str, Any]
) -> None:
    trained(ranks, tmp_path / "whale")
    done.clear()
    first = trained(ranks, tmp_path / "whale", **config)
    assert "lower_ranks" in done and len(steps_in(tmp_path / "whale")) == 2
    assert_equal(trained(ranks, tmp_path / "whale", **config), first)


def test_other_code_lowers_by_itself(
    ranks: Ranks, done: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = trained(ranks, tmp_path / "whale")
    done.clear()
    monkeypatch.setattr("whale.runtime.compile.step_cache.code_digest", lambda: (*plan_cache.code_digest(), "later"))
    assert_equal(trained(ranks, tmp_path / "whale"), first)
    assert "lower_ranks" in done and len(steps_in(tmp_path / "whale")) == 2


def test_what_does_not_fit_any_more_is_planned_and_refused(ranks: Ranks, tmp_path: Path) -> None:
    trained(ranks, tmp_path / "whale")
    (kept,) = steps_in(tmp_path / "whale")
    with pytest.raises(wh.WhaleError, match="does not fit into memory"):
        trained(ranks, tmp_path / "whale", **{"memory.limit_bytes": 100})
    assert steps_in(tmp_path / "whale") == [kept]


def test_constants_and_shapes_that_the_script_says_are_part_of_a_step(
    ranks: Ranks, done: list[str], tmp_path: Path
) -> None:
    def told(number: float, rows: int) -> np.ndarray:
        in_a_new_process()
        ranks(2, **{"mesh.plan_cache": str(tmp_path / "whale")})
        held = tf.constant([number, number])

        @wh.function
        def step(x: tf.Tensor) -> tf.Tensor:
            y = tf.numpy_function(lambda a: a[:rows], [x], tf.float32)
            y.set_shape((rows, 2))
            return y * held

        found: np.ndarray = step(tf.ones((4, 2))).numpy()
        wh.shutdown()
        return found

    for number, rows in ((2.0, 4), (3.0, 4), (3.0, 2), (3.0, 2)):
        done.clear()
        assert np.array_equal(told(number, rows), np.full((rows, 2), number, np.float32))
    assert len(steps_in(tmp_path / "whale")) >= 3
