"""What `whale profile` measures where there are GPUs; here other devices of TensorFlow stand for them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import tensorflow as tf

from cost_model.graph.machine_profile import Copies, Gpu, MachineProfile, Operation
from whale.distributed import gpus
from whale.runtime.compile import measured_call
from whale.tools.profile import profile

_SCRIPT = """
import json
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
from whale.tools.profile.profile import SIZES_BYTES, measure_copies

found = measure_copies([f"/device:CPU:{i}" for i in range(3)])
assert all([size for size, _ in one.samples] == list(SIZES_BYTES) for one in found)
print(json.dumps([[one.source, one.target, [s for _, s in one.samples]] for one in found]))
"""


def test_copies_between_every_pair_are_measured() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    names = [f"/device:CPU:{i}" for i in range(3)]
    assert [(source, target) for source, target, _ in found] == [(a, b) for a in names for b in names if a != b]
    assert all(0 < seconds < 10 for _, _, samples in found for seconds in samples)


def test_what_a_gpu_computes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls return when a GPU has been told: each round of a measurement ends when it is through."""
    waited: list[bool] = []
    monkeypatch.setattr(tf.test.experimental, "sync_devices", lambda: waited.append(True))
    measured_call.measure_call_s(lambda: None)
    assert not waited, "a processor is through when the call is"
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: ["GPU:0"])
    measured_call.measure_call_s(lambda: None)
    assert len(waited) == 1 + measured_call.ROUNDS
    gpus.await_gpus()
    assert len(waited) == 2 + measured_call.ROUNDS


def test_the_summary_has_rates_by_dtype_gpus_and_copies() -> None:
    def product(dtype: str, seconds: float) -> Operation:
        signature = f"MatMul({dtype}[64,64]; {dtype}[64,64]) -> {dtype}[64,64] transpose_b=True"
        return Operation(signature, "MatMul", 2.0 * 64**3, 3 * 64 * 64 * 4, seconds)

    copied = [Copies("/device:CPU:0", "/device:GPU:1", [(65536.0, 1e-5), (2.0**24, 1e-3)])]
    products = [product("float32", 2e-6), product("bfloat16", 1e-6)]
    table = MachineProfile("host", 8, 64, 0, 0, 1e-3, 0, products, [], [], [Gpu("A", 80)], copied)
    lines = profile.format_summary(table).splitlines()
    assert "  A, 80 GB" in lines
    assert "  MatMul   bfloat16 up to 524.3 GFLOP/s" in lines and "  MatMul   float32  up to 262.1 GFLOP/s" in lines
    assert "  CPU:0 to GPU:1 copied: 10 us, 16.78 GB/s" in lines
