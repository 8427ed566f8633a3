"""An ``init`` that fails leaves nothing half made, and the next one works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import whale as wh
from whale.errors import ConfigError, PlanError
from whale.runtime.context import process


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"mesh.plan": "missing.json"}, PlanError),
        ({"mesh.annotations": "missing.json"}, ConfigError),
        ({"mesh.annotations": "wrong.json"}, PlanError),
        ({"communication.backend": "horovod"}, ConfigError),
        ({"mesh": wh.Mesh(data=3)}, PlanError),
    ],
    ids=["plan", "annotations", "ranks", "horovod", "mesh"],
)
def test_a_second_try_works(
    config: dict[str, Any],
    error: type[Exception],
    ranks: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.json").write_text('{"a": {"replica": {"devices": [7]}}}')
    for _ in range(2):
        with pytest.raises(error):
            ranks(2, **config)
        assert process.context is None
    ranks(2)
    total = wh.function(lambda x: tf.reduce_sum(x))
    assert float(total(tf.ones([4, 2]))) == 8.0
    wh.shutdown()
