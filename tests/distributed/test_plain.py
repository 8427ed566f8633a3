"""What goes between ranks is data: it comes back as it was, and what is no data is refused."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from whale.distributed.msgpack_values import pack, unpack

pytestmark = pytest.mark.core
ROOT = Path(__file__).resolve().parents[2]


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        if a.dtype == object:
            return a.shape == b.shape and all(map(same, a.ravel().tolist(), b.ravel().tolist()))
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return bool(a == b or (a != a and b != b))


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -1, 1 << 63, -(1 << 200), 1.5, float("nan"), float("-inf"), 1 + 2j, "", "e\n\0", "\udc80x",
        b"\xff", [], [1, (2, [3])], (), (1, "a"), {}, {"a": 1, 2: (3,), (4, 5): None}, {1, 2}, frozenset({"a"}),
        np.float64(0.1), np.float32(0.1), np.int64(-3), np.bool_(True), np.str_("x"), np.bytes_(b"y"), np.complex64(1j),
        np.arange(6.0).reshape(2, 3), np.zeros((0, 3), np.int8), np.array(7, np.uint64), np.array(["a", "bc"]),
        np.array([b"a", b"\0"], object), np.array("z", object), np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array([1, 2], ml_dtypes.bfloat16), random.Random(3).getstate(), np.random.RandomState(3).get_state(),
        {"loss": np.float64(1.5), "acc": [np.float32(0.5)]},
    ],
    ids=lambda value: ascii(value)[:30],
)  # fmt: skip
def test_values_come_back_as_they_were(value: Any) -> None:
    assert same(unpack(pack(value)), value)


class _Thing:
    pass


@pytest.mark.parametrize(
    "value",
    [_Thing(), _Thing, len, [_Thing()], np.array([_Thing()], object), object()],
    ids=["instance", "class", "function", "list", "array", "object"],
)
def test_what_is_no_data_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent to other ranks"):
        pack(value)


def test_depth_is_bounded_both_ways() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        pack(deep)
    with pytest.raises(ValueError):
        unpack(b"\x91" * 100_000)


def test_noise_is_refused_or_data() -> None:
    generator, whole = random.Random(24), pack([{"a": (1, np.arange(3.0))}, "text", 1 << 70])
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(generator.randrange(1, 4)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        try:
            unpack(bytes(data[: generator.randrange(len(data) + 1)]))
        except ValueError:
            pass
    with pytest.raises(ValueError):
        unpack(pickle.dumps([1]))


def test_nothing_that_runs_in_a_rank_unpickles() -> None:
    """Those that may read files that a process has written for its own children, in folders of its user."""
    found = {
        str(path.relative_to(ROOT))
        for folder in ("whale", "cost_model", "whale_ops")
        for path in (ROOT / folder).rglob("*.py")
        if "import pickle" in path.read_text() or "allow_pickle=True" in path.read_text()
    }
    assert found == {"whale/tools/profile/steps.py", "whale/frontends/launch.py"}
