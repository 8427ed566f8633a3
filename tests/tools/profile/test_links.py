"""Exchanges that `whale profile` measures, between ranks of `whale run`; the devices are the host's memory."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tests.launcher.helpers import Launcher
from tests.whale_ops.gpu.host_device import build_host_device
from whale.tools.profile.links import Links

_FEW = """
import sys
from tests.whale_ops.gpu.on_host_device import take_host_device
from whale.tools.profile import links

take_host_device(sys.argv[2], [1])
links.SIZES_BYTES, links.SECONDS_PER_SIZE, links.COLD_BYTES = (64 << 10,), 0.0, 1 << 10
links.main()
"""


def test_exchanges_are_measured_through_the_host_and_through_the_devices(tmp_path: Path) -> None:
    """All kinds both ways, between a rank with a device and one without."""
    launcher, out = Launcher(tmp_path), tmp_path / "links.json"
    launcher.environment |= {"WHALE_COMMUNICATION_BACKEND": "pinned", "CUDA_VISIBLE_DEVICES": "-1"}
    library = build_host_device(tmp_path)
    done = launcher.run("-np", "2", launcher.script(_FEW), str(out), str(library))
    assert done.returncode == 0, done.stdout + done.stderr
    found = msgspec.json.decode(out.read_bytes(), type=Links)
    kinds = {through: [c.kind for c in found.curves if c.through == through] for through in ("", "pinned")}
    assert kinds[""] == kinds["pinned"] and len(kinds[""]) == 9 and len(found.curves) == 18
    for curve in found.curves:
        assert curve.ranks == 2 and [size for size, _ in curve.samples] == [64 << 10]
        # A device finishes copies some time after it is told to: tens of microseconds for each piece.
        assert all(0 < seconds < 1 for _, seconds in curve.samples)
    assert found.wake_s >= 0 and not launcher.left_behind()
