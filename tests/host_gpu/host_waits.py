"""Lists the exchanges of a step that the host waits for: a Megatron-like GPT on GPUs that are the host's.

    python -m tests.host_gpu.host_waits [--layers 8] [--mesh data=2,tensor=2] [--backend nccl]

Each rank counts, in the second of two steps, the exchanges that were done when they were queued, those of which the
host waited for the end, and how often a thread of the host waited for a stream; and those of its program, by axis.
Losses are compared with one device's.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.host_gpu.build import ROOT, HostGpu, build_host_cuda, build_plugin
from tests.launcher.helpers import Launcher
from tests.pipelines.gpt_on_ranks import Gpt, Sizes, trained

RATE = 0.1


def sizes(layers: int) -> Sizes:
    return Sizes(rows=8, layers=layers)


def read_mesh(text: str) -> dict[str, int]:
    return {name: int(size) for name, _, size in (part.partition("=") for part in text.split(","))}


def axes_of(nodes: Iterable[Any], mesh: Mapping[str, int]) -> Counter[str]:
    """Counts a rank's exchanges through GPUs by their kind and the axes along which they are: "AllReduce data"."""
    from whale.ir.ops import ON_DEVICE

    found: Counter[str] = Counter()
    for node in nodes:
        if node.op in ON_DEVICE.values():
            ranks = node.attrs.get("ranks") or range(math.prod(mesh.values()))
            places = np.array(np.unravel_index(list(ranks), tuple(mesh.values())))
            along = "+".join(name for name, row in zip(mesh, places) if len(set(row)) > 1)
            found[f"{node.op.removeprefix('WhaleDevice')} {along}"] += 1
    return found


def count_on_rank(layers: int, mesh_text: str, folder: Path) -> None:
    """Trains on one rank, and writes what it has counted into FOLDER/<rank>.json."""
    import tensorflow as tf

    import whale as wh
    from whale.ir.ops import EXCHANGES
    from whale.runtime.context import require_current

    mesh = read_mesh(mesh_text)
    wh.init({"mesh": wh.Mesh(**mesh)})
    (comm,) = require_current("test").comms
    driver = ctypes.CDLL(str(build_host_cuda().driver))
    driver.host_gpu_waits.restype = ctypes.c_int64
    model = Gpt(sizes(layers))

    @wh.function
    def step(tokens: tf.Tensor, following: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = model.loss(tokens, following, 1, contextlib.nullcontext, wh.split)
        for variable, slope in zip(model.variables, tape.gradient(loss, model.variables)):
            variable.assign_sub(RATE * tf.convert_to_tensor(slope))
        return loss

    def counted() -> Counter[str]:
        calls = Counter({one.key: 0 for one in comm.counters()})
        for one in comm.counters():
            calls[one.key] += one.calls
        return Counter({key: n for key, n in calls.items() if key.startswith("device/done")})

    generator, losses = np.random.default_rng(1), list[float]()
    for _ in range(2):
        words = generator.integers(0, model.sizes.words, (model.sizes.rows, model.sizes.length + 1)).astype(np.int32)
        before, waits = counted(), driver.host_gpu_waits()
        losses.append(float(step(tf.constant(words[:, :-1]), tf.constant(words[:, 1:]))))
        found = counted()
    (compiled,) = (one.compiled for one in step._steps.values())
    program = compiled.ranks[0]
    said: dict[str, Any] = {"losses": losses}
    said["in stream"] = found["device/done in stream"] - before["device/done in stream"]
    said["waited for"] = found["device/done waited for"] - before["device/done waited for"]
    said["host waits for streams"] = driver.host_gpu_waits() - waits
    said["exchanges"] = axes_of(program.nodes, mesh)
    said["not in stream"] = axes_of((n for n in program.nodes if not n.attrs.get("in_stream")), mesh)
    said["through the host"] = [f"{n.op} {n.attrs.get('T')}" for n in program.nodes if n.op in EXCHANGES]
    Path(folder, f"{wh.rank()}.json").write_text(json.dumps(said))
    wh.shutdown()


def count_waits(launcher: Launcher, folder: Path, layers: int, mesh: str, backend: str) -> list[dict[str, Any]]:
    """Runs the ranks of a mesh; what each has counted.

    Raises:
      AssertionError: the run failed.
    """
    size = math.prod(read_mesh(mesh).values())
    build_plugin()
    launcher.environment.pop("CUDA_VISIBLE_DEVICES", None)
    launcher.environment |= build_host_cuda().variables(*[HostGpu(2 << 30, name=f"GPU {n}") for n in range(size)])
    launcher.environment |= {"WHALE_COMMUNICATION_BACKEND": backend, "PYTHONPATH": str(ROOT)}
    launcher.environment["WHALE_MESH_PLAN_CACHE"] = ""  # the program is there, and not what an earlier run kept of it
    script = str(ROOT / "tests/host_gpu/on_host_gpus.py"), "none", str(ROOT / "tests/host_gpu/host_waits.py")
    done = launcher.run("-np", str(size), *script, "--rank", str(folder), "--layers", str(layers), "--mesh", mesh)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def losses_alone(layers: int) -> list[float]:
    """Returns the losses of the same steps on one device."""
    import tensorflow as tf

    import tests.pipelines.gpt_on_ranks as gpt

    assert gpt.STEPS == 2 and gpt.RATE == RATE
    found, _ = trained(sizes(layers), 1, contextlib.nullcontext, contextlib.nullcontext, tf.function)
    return [float(found[f"loss {i}"]) for i in range(2)]


def main() -> None:
    """Runs one rank, or all of them, and prints what they count."""
    parser = argparse.ArgumentParser(prog="python -m tests.host_gpu.host_waits")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--mesh", default="data=2,tensor=2")
    parser.add_argument("--backend", default="nccl", choices=("nccl", "cuda-ipc", "pinned"))
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        count_on_rank(asked.layers, asked.mesh, Path(asked.rank))
        return
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher(Path(folder), sys.executable)
        for rank, said in enumerate(count_waits(launcher, Path(folder), asked.layers, asked.mesh, asked.backend)):
            print(f"rank {rank}: {json.dumps(said)}")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    print(f"one device: {losses_alone(asked.layers)}")


if __name__ == "__main__":
    main()
