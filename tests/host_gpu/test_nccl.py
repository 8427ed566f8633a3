"""Exchanges through NCCL between several ranks, with the NCCL of the host's GPUs; and ranks that are lost to it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.draws import one_of
from tests.forkserver import warm_python
from tests.host_gpu.build import ROOT, HostGpu, build_host_cuda, build_plugin
from tests.launcher.helpers import Launcher
from tests.whale_ops.gpu.cuda_ranks import Ranks
from whale_ops import device_library

_SCRIPT = """
import sys, time
from tests.host_gpu.on_host_gpus import take_host_gpus
take_host_gpus()
import tensorflow as tf
import whale as wh
from whale.errors import WhaleError
from whale.started import process_place

begun_s, rank = time.monotonic(), process_place().rank
try:
    wh.init({"communication.backend": "nccl"})
    w = tf.Variable(tf.ones((30, 30)))
    step = wh.function(lambda x: w.assign_add(tf.tensordot(x, x, [[0], [0]])))
    for _ in range(100):
        begun_s = time.monotonic()
        step(tf.ones((4, 30)))
except WhaleError as error:
    text = " ".join(str(error).split())
    print(f"rank {rank} was told after {time.monotonic() - begun_s:.2f} s: {text}", flush=True)
    sys.exit(3)
"""


@pytest.mark.parametrize("size", one_of(2, [2, 4]))
def test_ranks_with_a_gpu_each_exchange_through_nccl(size: int) -> None:
    cuda = build_host_cuda()
    variables = cuda.variables(*[HostGpu(256 << 20, name=f"GPU {rank}") for rank in range(size)])
    ranks = Ranks(device_library.PATH, cuda.image, "nccl", size, size, variables=[variables] * size)
    assert ranks.run("short") == [f"rank {rank}: all right\n" for rank in range(size)]


@pytest.mark.long
def test_two_communicators_are_given_up_at_once() -> None:
    """One by one would hang: to abort one waits for the GPU, where the other one's kernel waits for a lost rank."""
    cuda = build_host_cuda()
    variables = [cuda.variables(HostGpu(256 << 20), HostGpu(256 << 20))] * 2
    with Ranks(device_library.PATH, cuda.image, "nccl", 2, 2, variables=variables).started("abandon") as (first, _):
        assert "gave up what was under way" in first.communicate(timeout=60)[0]


@pytest.mark.parametrize(
    ("where", "sign"),
    one_of(
        5,
        [
            ("connect", signal.SIGKILL),
            ("connect", signal.SIGSTOP),
            ("exchange", signal.SIGKILL),
            ("exchange", signal.SIGSTOP),
        ],
        several=True,
    ),
)
def test_a_rank_that_is_lost_to_nccl_is_an_error_on_the_other(tmp_path: Path, where: str, sign: signal.Signals) -> None:
    """Nobody tells NCCL of it here: while it connects, and while it waits in a kernel, the host does."""
    launcher = Launcher(tmp_path, warm_python())
    build_plugin()
    launcher.environment.pop("CUDA_VISIBLE_DEVICES", None)
    launcher.environment |= build_host_cuda().variables(HostGpu(1 << 30), HostGpu(1 << 30))
    launcher.environment |= {"HOST_NCCL_FAULT": f"1:{where}:{int(sign)}", "PYTHONPATH": str(ROOT)}
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    done = launcher.run("-np", "2", str(script))
    said = done.stdout + done.stderr
    assert done.returncode != 0 and "rank 0 was told after" in said, said
    assert ("SIGKILL" if sign == signal.SIGKILL else "frozen") in said.partition("rank 0 was told")[2], said
    assert not launcher.left_behind()
