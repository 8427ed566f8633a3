"""Exchanges that `whale profile` measures, between ranks of `whale run`; the GPUs are the host's."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from cost_model.graph.machine_profile import Curve
from tests.forkserver import warm_python
from tests.host_gpu.build import HostGpu, build_host_cuda, build_plugin
from tests.launcher.helpers import Launcher
from whale.errors import ClusterError
from whale.tools.profile import links, profile
from whale.tools.profile.links import Links

_FEW = """
import os
from tests.host_gpu.on_host_gpus import take_host_gpus
from whale.tools.profile import links

if os.environ["WHALE_LOCAL_RANK"] == "0":
    take_host_gpus()
links.SIZES_BYTES, links.SECONDS_PER_SIZE, links.COLD_BYTES = (64 << 10,), 0.0, 1 << 10
links.main()
"""


def test_exchanges_are_measured_through_the_host_and_through_the_devices(tmp_path: Path) -> None:
    """Measures all kinds both ways, between a rank with a GPU and one without."""
    launcher, out = Launcher(tmp_path, warm_python()), tmp_path / "links.json"
    build_plugin()
    launcher.environment |= {"WHALE_COMMUNICATION_BACKEND": "pinned", **build_host_cuda().variables(HostGpu())}
    launcher.environment.pop("CUDA_VISIBLE_DEVICES", None)
    done = launcher.run("-np", "2", launcher.script(_FEW), str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found = msgspec.json.decode(out.read_bytes(), type=Links)
    kinds = {through: [c.kind for c in found.curves if c.through == through] for through in ("", "pinned")}
    assert kinds[""] == kinds["pinned"] and len(kinds[""]) == 9 and len(found.curves) == 18
    for curve in found.curves:
        assert curve.ranks == 2 and [size for size, _ in curve.samples] == [64 << 10]
        # A device finishes copies some time after it is told to: tens of microseconds for each piece.
        assert all(0 < seconds < 1 for _, seconds in curve.samples)
    assert found.wake_s >= 0 and not launcher.left_behind()


class _OneRank:
    """A communicator of one rank."""

    rank, size = 0, 2

    def broadcast_bytes(self, key: str, data: bytes) -> bytes:
        return data


def test_what_is_measured_before_the_time_is_over_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is whole after each exchange; the smallest and the largest tensors come first."""
    monkeypatch.setattr(links, "_make_exchanges", lambda rank, size: {"all_reduce": None, "broadcast": None})
    monkeypatch.setattr(links, "_measure_seconds", lambda comm, through, kind, call, size: size * 1e-9)
    path = tmp_path / "links.json"
    results = links.Results(_OneRank(), path, 6, 1.0)
    clock = iter([0.0, 0.5, 0.9, 1.1])
    monkeypatch.setattr(links.time, "monotonic", lambda: next(clock))
    links._measure_sizes(_OneRank(), "", [1 << 10, 16 << 20, 1 << 20], results)
    found = msgspec.json.decode(path.read_bytes(), type=Links)
    small, large = (float(1 << 10), 1e-9 * (1 << 10)), (float(16 << 20), 1e-9 * (16 << 20))
    assert found == Links([Curve("all_reduce", 2, [small, large]), Curve("broadcast", 2, [small])], 0.0, left=3)
    assert [one.name for one in tmp_path.iterdir()] == ["links.json"]


def test_ranks_that_take_too_long_leave_what_they_have_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    partial = Links([Curve("all_reduce", 2, [(1e3, 1e-5)])], 1e-4, left=53)
    found: list[Links] = [partial]

    def end_late(command: list[str], *_: object) -> tuple[None, str]:
        if found:
            Path(command[-2]).write_bytes(msgspec.json.encode(found.pop()))
        return None, "a traceback"

    monkeypatch.setattr(profile, "_run_told", end_late)
    assert profile.measure_links(2) == partial
    with pytest.raises(
        ClusterError, match=r"not be measured in time\n  given: none .*\n  machine: other programs take"
    ):
        profile.measure_links(2)


def test_a_command_tells_how_far_it_is_and_is_ended() -> None:
    told: list[str] = []
    script = "print('[0] measured: exchanges of 1 KiB'); print('noise')"
    assert profile._run_told([sys.executable, "-S", "-c", script], {}, 600.0, told.append) == (
        0,
        "[0] measured: exchanges of 1 KiB\nnoise\n",
    )
    assert told == ["exchanges of 1 KiB"]
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(3600)"]
    assert profile._run_told(sleep, {}, 0.05, told.append)[0] is None
