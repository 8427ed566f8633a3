"""Compiles the device whose memory is the host's."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import whale_ops
from whale.config import Config
from whale.distributed import device_exchange
from whale.ir.program import Program
from whale.kernels import substitute
from whale.passes.resharding.on_devices import DEVICE_BACKENDS, host_exchanges, on_devices
from whale.started import ProcessPlace
from whale_ops import build

ROOT = Path(__file__).resolve().parents[3]
_OF_A_STEP = re.compile(r"\d+:")  # keys begin with the program's number


def build_host_device(folder: Path) -> Path:
    """Compiles host_device.cc; the library's path."""
    output = folder / "libhost_device.so"
    digest = f'-DWHALE_CORE_DIGEST="{build.compute_core_digest()}"'
    flags = ["-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", digest, f"-I{ROOT}"]
    core = [f"-L{build.IN_PLACE}", f"-l:{build.CORE_NAME}", f"-Wl,-rpath,{build.IN_PLACE}"]
    source = ROOT / "tests/whale_ops/gpu/host_device.cc"
    subprocess.run([*build.find_compiler(), *flags, str(source), "-o", str(output), *core], check=True)
    return output


@contextmanager
def host_devices(library: Path, mixed: bool = False) -> Iterator[None]:
    """Under it, ranks of this process that ``wh.init`` makes have the host's memory as their devices, if asked for.

    Args:
      mixed: every second rank has no device, and takes part as a rank without a GPU does.

    Raises:
      AssertionError: at its end, where a step has exchanged something through the host that is not among what is said
        to stay there, or nothing has gone through the devices although a program exchanges through them.
    """
    opened: list[whale_ops.Communicator] = []
    listed: set[str] = set()
    carried: set[str] = set()

    def start(config: Config, place: ProcessPlace, size: int, comms: list[whale_ops.Communicator]) -> None:
        if config["communication.backend"] not in DEVICE_BACKENDS:
            return

        def gpu(rank: int) -> device_exchange.Gpu:
            return device_exchange.Gpu(None if mixed and rank % 2 else 0)

        with ThreadPoolExecutor(len(comms)) as pool:
            list(pool.map(lambda comm: device_exchange.open_device(config, comm, gpu(comm.rank)), comms))
        opened.extend(comms)

    def given(program: Program, comm: str, rank: int) -> Program:
        listed.update(str(one.node.attrs["key"]) for one in host_exchanges(program))
        found = on_devices(program, comm, rank)
        graphs = [found, *found.functions.values()]
        carried.update(node.name for graph in graphs for node in graph.nodes if node.op.startswith("WhaleDevice"))
        return found

    with (
        mock.patch.multiple(device_exchange, find_library=lambda: library, start_device_exchange=start),
        mock.patch.object(substitute, "on_devices", given),
    ):
        yield
    keys = {counter.key for comm in opened for counter in comm.counters()}
    # A plan in which every rank computes all alone exchanges nothing.
    assert not carried or any(key.startswith("device/") for key in keys), "devices have started nothing"
    # The sizes of rows that are exchanged by their ids go before them.
    stray = {key for key in keys if _OF_A_STEP.match(key) and key.removesuffix("/sizes") not in listed}
    assert not stray, f"through the host: {sorted(stray)[:5]}"
