"""Ranks of several hosts, here emulated, that TCP connects: what they compute, and who goes on when one is killed."""

from __future__ import annotations

import pytest

from tests.distributed.test_mistakes import STEP
from tests.launcher.helpers import Launcher

_HOSTS = {"communication.between_hosts": "tcp", "debug.emulate_network": "hosts=2+1"}
_TRAIN = f"""
import os, signal
wh.init({_HOSTS}, elastic=KILLED >= 0)
step = wh.function(descend)
for number in range(6):
    if number == 3 and wh.rank() == KILLED and wh.size() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    loss = float(step(x, y))
if wh.rank() == 0:
    print("size", wh.size(), "loss %.6f" % loss)
"""


@pytest.mark.parametrize("killed", [-1, 2])
def test_tcp_connects_the_ranks_of_hosts(launcher: Launcher, killed: int) -> None:
    launcher.environment["WHALE_DEBUG_LOG"] = "debug"
    done = launcher.run("-np", "3", launcher.script(f"KILLED = {killed}\n{STEP}{_TRAIN}"))
    alone = launcher.run("-np", "1", launcher.script(f"KILLED = -1\n{STEP}{_TRAIN.replace(str(_HOSTS), '{}')}"))
    assert done.returncode == 0 and alone.returncode == 0, done.stderr + alone.stderr
    loss = alone.stdout.split()[-1]
    assert f"size {3 if killed < 0 else 2} loss {loss}" in done.stdout, done.stdout + done.stderr
    assert "messages between hosts go by TCP" in done.stderr
