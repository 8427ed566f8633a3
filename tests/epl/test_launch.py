"""What epl-launch asks of the launcher, without starting anything."""

from __future__ import annotations

import os

import pytest

from whale.cli import epl_launch
from whale.launcher.mpirun import Host, Options

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    found: list[Options] = []
    monkeypatch.setattr(epl_launch, "run", lambda options: found.append(options) or 0)
    for name in ("EPL_DEVICES_PER_WORKER", "EPL_LAUNCH_SCRIPT", "EPL_LAUNCH_LOGS"):
        monkeypatch.setenv(name, "")  # which is undone at the end
    return found


def test_workers_of_several_devices_are_as_many_ranks(asked: list[Options]) -> None:
    machines = "10.0.0.1:7000,10.0.0.2:7000"
    assert epl_launch.main(["--num_workers=4", "--gpu_per_worker=2", f"--machine_list={machines}", "train.sh"]) == 0
    assert asked[0].ranks == 8 and asked[0].hosts == (Host("10.0.0.1", 4), Host("10.0.0.2", 4))
    assert asked[0].starts_another and asked[0].as_module
    assert os.environ["EPL_DEVICES_PER_WORKER"] == "2"
    assert os.environ["EPL_LAUNCH_SCRIPT"] == os.path.abspath("train.sh")


@pytest.mark.parametrize("more", [["--machine_rank=1"], ["--num_workers=0"]])
def test_what_starts_nothing_is_refused(
    asked: list[Options], more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert epl_launch.main(["--num_workers=2", "--gpu_per_worker=1", *more, "train.sh"]) == 2
    assert not asked and "next:" in capsys.readouterr().err
