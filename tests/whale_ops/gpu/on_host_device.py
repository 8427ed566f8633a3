"""Runs a script as a rank of `whale run` whose device is the host's memory, or that has none:

    whale run -np 2 on_host_device.py LIBRARY WITHOUT SCRIPT ...

LIBRARY is what host_device.py compiles; WITHOUT are ranks of the host without a device: none, or 1,3.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Collection
from pathlib import Path

from whale.distributed import device_exchange


def take_host_device(library: str, without: Collection[int] = ()) -> None:
    """From now on this process's GPU is the host's memory; ranks of its host that are named have none."""
    device_exchange.find_library = lambda: Path(library)
    device_exchange.find_missing = lambda *_: ""  # its reductions are compiled with it
    device_exchange.take_gpu = lambda local_rank: device_exchange.Gpu(None if local_rank in without else 0)


def main() -> None:
    library, without, script, *arguments = sys.argv[1:]
    take_host_device(library, () if without == "none" else [int(rank) for rank in without.split(",")])
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
