"""When whole batches are compared between the ranks, and what of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from whale.runtime.input import equal_inputs


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """(when, what is compared)."""
    found: list[tuple[str, dict[str, Any]]] = []

    def compared(given: Mapping[str, Any], context: Any, step: str, when: str, *_: Any) -> None:
        found.append((when, dict(given)))

    monkeypatch.setattr(equal_inputs, "refuse_other_values", compared)
    return found


def _called(times: int, every: int, has_other_processes: bool = True, has_local_batch: bool = False) -> list[Any]:
    context: Any = SimpleNamespace(
        config={"debug.check_inputs": every}, has_other_processes=has_other_processes, has_local_batch=has_local_batch
    )
    call = equal_inputs.compare_arguments(lambda tensors: tensors, context, "step", ["x", "y"], {"y"}, {"captured": -1})
    return [call([number, number]) for number in range(times)]


def test_the_first_steps_are_compared_and_then_every_so_many(seen: list[tuple[str, dict[str, Any]]]) -> None:
    assert _called(12, 5) == [[number, number] for number in range(12)]
    calls = [0, 1, 2, 5, 10]
    assert [when for when, _ in seen] == [f"call {number}" for number in calls]
    assert [given["x"] for _, given in seen] == calls
    # Rows of its own are no mistake: of "y" there is no whole batch.
    compared = [sorted(name for name, value in given.items() if value is not None) for _, given in seen]
    assert compared == [["captured", "x"], *[["x"]] * 4]


@pytest.mark.parametrize("how", [{"every": 0}, {"has_other_processes": False}, {"has_local_batch": True}], ids=str)
def test_where_nothing_can_differ_or_nobody_asks_nothing_is_compared(
    seen: list[tuple[str, dict[str, Any]]], how: dict[str, Any]
) -> None:
    _called(4, **{"every": 2, **how})
    assert seen == []
