"""Horovod as a backend and as a neighbour, with real processes. Needs `python -m whale_ops.build_horovod`."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.distributed.against_one_device import check_processes
from tests.distributed.test_mistakes import STEP
from tests.launcher.helpers import Launcher
from tests.oracle.pool import Pool
from whale.config import Config
from whale.distributed import horovod
from whale.errors import ClusterError, ConfigError

with_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: python -m whale_ops.build_horovod"
)


@with_horovod
@pytest.mark.parametrize(
    ("case", "optimizer", "shares"),
    [("mlp_metrics", "adam", "5,3"), ("convnet", "sgd", "8,0"), ("tf1_mlp", "adam", "3,0,5")],
)
def test_gradients_through_horovod_are_those_of_one_device(
    launcher: Launcher, pool: Pool, tmp_path: Path, case: str, optimizer: str, shares: str
) -> None:
    launcher.environment["WHALE_COMMUNICATION_BACKEND"] = "horovod"
    check_processes(launcher, pool, tmp_path, case, optimizer, shares)


@with_horovod
@pytest.mark.parametrize("order", ["horovod first", "whale first", "whale ends first"])
def test_beside_a_script_that_starts_horovod_itself(launcher: Launcher, order: str) -> None:
    """Both use one MPI, whoever starts it, and the processes end well."""
    begin = ["import horovod.tensorflow as hvd", "hvd.init()", "wh.init()"]
    if order != "horovod first":
        begin[1], begin[2] = begin[2], begin[1]
    end = "wh.shutdown()" if order == "whale ends first" else ""
    script = "\n".join(
        [
            STEP,
            *begin,
            "step = wh.function(descend)",
            "losses = [float(step(x, y)) for _ in range(3)]",
            "summed = float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum))",
            "assert (hvd.rank(), hvd.size()) == (wh.rank(), wh.size()) and summed == 2.0",
            "assert sorted(losses, reverse=True) == losses",
            end,
            "print('went on to the end')",
        ]
    )
    done = launcher.run("-np", "2", launcher.script(script), timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("went on to the end") == 2


@with_horovod
@pytest.mark.parametrize("backend", ["whale", "horovod"])
def test_a_tape_that_is_wrapped_already(launcher: Launcher, backend: str) -> None:
    script = STEP.replace("tape.gradient(loss, w)", "hvd.DistributedGradientTape(tape).gradient(loss, [w])[0]").replace(
        "import sys", "import horovod.tensorflow as hvd, sys"
    )
    launcher.environment["WHALE_COMMUNICATION_BACKEND"] = backend
    done = launcher.run(
        "-np", "2", launcher.script(script + "\nwh.init()\nhvd.init()\nwh.function(descend)(x, y)\n"), timeout_s=120
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0, said
    assert "ProgramError: the program already averages gradients through Horovod" in said
    assert re.search(r"remove .*hvd\.DistributedGradientTape", said), said


def test_without_horovod_the_error_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ClusterError, match=r"python -m whale_ops\.build_horovod"):
        horovod.start(Config({"communication.backend": "horovod"}), 2, (0,))


def test_ranks_of_one_process_have_no_horovod() -> None:
    config = Config({"communication.backend": "horovod", "communication.in_process_ranks": 1})
    with pytest.raises(ConfigError, match="in_process_ranks"):
        horovod.start(config, 2, (0, 1))
