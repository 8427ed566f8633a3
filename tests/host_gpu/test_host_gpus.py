"""The host's GPUs: what TensorFlow sees of them, and that they show what a library for GPUs gets wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.forkserver import warm_python
from tests.host_gpu.build import ROOT, HostGpu, build_host_cuda, build_plugin
from tests.host_gpu.exchanges import EXPECTED, LATE_US

_LOOK = """
import json, time
import numpy as np
import tensorflow as tf
from tensorflow.python.client import device_lib
from tests.host_gpu.on_host_gpus import take_host_gpus

take_host_gpus()
for gpu in tf.config.list_physical_devices("GPU"):
    tf.config.experimental.set_memory_growth(gpu, True)
said = {"devices": [one.name for one in tf.config.list_logical_devices("GPU")]}
said["memory"] = [one.memory_limit >> 20 for one in device_lib.list_local_devices() if one.device_type == "GPU"]

def train(device):
    with tf.device(device):
        w = tf.Variable(tf.random.stateless_normal((30, 4), [1, 2], dtype=tf.float64))
        x = tf.random.stateless_normal((12, 30), [1, 3], dtype=tf.float64)

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.tanh(x @ w) - 1.0))
            w.assign_sub(0.5 * tape.gradient(loss, w))
            return loss

        return [float(step()) for _ in range(3)], w.device

(on_host, _), *on_gpus = [train(device) for device in ("/CPU:0", "/GPU:0", "/GPU:1")]
said["equal"] = [np.allclose(losses, on_host, rtol=1e-14) for losses, _ in on_gpus]
said["places"] = [device[-5:] for _, device in on_gpus]

# Rows of tables whose values somebody keeps: the first kernel that reads rows of one gives it other memory.
def look_up(device):
    with tf.device(device):
        tables = [tf.Variable(tf.random.stateless_normal((9, 4), [n, 7], dtype=tf.float64)) for n in range(8)]

        @tf.function
        def step(ids):
            rows, losses = tf.minimum(tf.maximum(ids - 1, 0), 8), []
            for table in tables:
                with tf.GradientTape() as tape:
                    losses.append(tf.reduce_sum(tf.gather(table, rows) ** 2))
                table.assign_sub(0.1 * tf.convert_to_tensor(tape.gradient(losses[-1], table)))
            return tf.stack(losses)

        kept = [table.read_value() for table in tables]
        losses = [step(tf.constant([3, 0, 9, 1, 4, 4, 8])).numpy() for _ in range(2)]
        kept += [table.read_value() for table in tables]
        return np.concatenate([*losses, *(value.numpy().ravel() for value in kept)])

# Lists are stacked and divided by copies that are queued.
def scan(device):
    with tf.device(device):
        w = tf.random.stateless_normal((4, 4), [3, 7], dtype=tf.float64)

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                states = tf.scan(lambda state, row: tf.tanh(state @ w + row), x, tf.zeros((3, 4), tf.float64))
            return tape.gradient(states, x)

        return step(tf.random.stateless_normal((5, 3, 4), [4, 7], dtype=tf.float64)).numpy()

# Its kernel for processors asks for the host's memory.
def scatter():
    with tf.device("/GPU:0"):
        return tf.scatter_nd(tf.constant([[0]]), tf.ones((1, 1 << 18)), [4, 1 << 18])  # 4 MiB

before = tf.config.experimental.get_memory_info("GPU:0")["current"]
scattered = scatter()
said["scattered"] = tf.config.experimental.get_memory_info("GPU:0")["current"] - before
del scattered

said["lists"] = bool(np.allclose(scan("/GPU:0"), scan("/CPU:0"), rtol=1e-14))
said["rows"] = bool(np.allclose(look_up("/GPU:0"), look_up("/CPU:0"), rtol=1e-14))

def seconds(device):
    with tf.device(device):
        x = tf.random.normal((400, 400))
        product = tf.function(lambda: x @ x @ x)
        product()
        tf.test.experimental.sync_devices()
        start_s = time.perf_counter()
        for _ in range(20):
            product()
        tf.test.experimental.sync_devices()
        return time.perf_counter() - start_s

said["slower"] = seconds("/GPU:1") / seconds("/GPU:0")

print(json.dumps(said))
"""

_END = """
import sys
from concurrent.futures import ThreadPoolExecutor

import tensorflow as tf
from tests.host_gpu.build import build_host_cuda
from tests.host_gpu.on_host_gpus import take_host_gpus
from tests.whale_ops.gpu.opened import device_of, opened_ranks
from whale_ops import device_library

take_host_gpus()
transport = sys.argv[1]
device_library.load_nccl()
for rank in range(2):
    device_library.load_kernels(device_library.PATH, rank, build_host_cuda().image.read_bytes())
wrong = 0
for turn in range(6):
    with opened_ranks(2, lambda comm: device_of(device_library.PATH, transport, comm.rank, 1 << 16)(comm)) as opened:

        def body(rank):
            with tf.device(f"/GPU:{rank}"):
                step = tf.function(lambda: opened.reduce(rank, [tf.fill((16,), 1.0 + rank)], "x")[0])
                found = step().numpy()
            opened.comms[rank].close_device()
            return found

        with ThreadPoolExecutor(2) as pool:
            wrong += sum(list(found) != [3.0] * 16 for found in pool.map(body, range(2)))
print(f"{wrong} results are wrong")
"""


def environment(*gpus: HostGpu) -> dict[str, str]:
    """Variables of a process with these GPUs."""
    build_plugin()
    inherited = {name: text for name, text in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {**inherited, **build_host_cuda().variables(*gpus), "TF_CPP_MIN_LOG_LEVEL": "2"}


def test_tensorflow_computes_on_unequal_gpus(tmp_path: Path) -> None:
    script = tmp_path / "look.py"
    script.write_text(_LOOK)
    gpus = HostGpu(600 << 20, name="A"), HostGpu(300 << 20, slowness=6.0, name="B")
    variables = {**environment(*gpus), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [warm_python(), str(script)], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["devices"] == ["/device:GPU:0", "/device:GPU:1"]
    assert said["rows"], "of tables whose values are kept"
    assert said["scattered"] >= 4 << 20, "into the GPU's memory"
    assert said["lists"], "that a loop writes and its gradient reads"
    assert said["equal"] == [True, True] and said["places"] == ["GPU:0", "GPU:1"]
    assert said["slower"] > 1.5, "kernels of the second one take six times as long"
    first, second = said["memory"]
    assert 300 < first <= 600 - 225 and 30 < second <= 300 - 225, "TensorFlow leaves 225 MiB of a small GPU to CUDA"


_ALL = [  # in parts, none of which takes minutes beside other tests
    pytest.param(transport, late_us, [*EXPECTED], least, marks=pytest.mark.long, id=f"{transport}-{late_us}")
    for transport, least in {"cuda-ipc": 67, "pinned": 35, "nccl": 53}.items()
    for late_us in LATE_US
]


@pytest.mark.parametrize(
    ("transport", "late_us", "kinds", "least"),
    [pytest.param("cuda-ipc nccl pinned", 20_000, ["all_reduce", "send"], 40, id="short"), *_ALL],
)
def test_faults_of_a_library_for_gpus_are_found(transport: str, late_us: int, kinds: list[str], least: int) -> None:
    """Plants missing waits, marks that come too early or on another stream, results that are taken too early.

    Args:
      least: faults that have to be planted: so many have these cases.
    """
    chosen = ["--transports", *transport.split(), "--late-us", str(late_us), "--kinds", *kinds]
    command = [warm_python(), "-m", "tests.host_gpu.exchanges", *chosen]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    last = re.fullmatch(r"found (\d+) of (\d+) planted faults; 0 cases .*", done.stdout.splitlines()[-1])
    assert done.returncode == 0 and last is not None and last[1] == last[2], done.stdout + done.stderr
    assert int(last[2]) >= least


@pytest.mark.parametrize("transport", ["cuda-ipc", "nccl"])
def test_a_rank_may_close_its_gpu_while_others_read_what_it_has_shown(tmp_path: Path, transport: str) -> None:
    script = tmp_path / "end.py"
    script.write_text(_END)
    gpus = HostGpu(600 << 20, late_us=0, name="A"), HostGpu(600 << 20, late_us=20_000, name="B")
    variables = {**environment(*gpus), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [warm_python(), str(script), transport], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["0 results are wrong"], done.stdout + done.stderr
