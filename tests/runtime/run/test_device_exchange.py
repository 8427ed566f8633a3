"""communication.backend "nccl" and "cuda-ipc": programs whose sums the ranks' devices carry out, and refusals.

The device is the host's memory (tests/whale_ops/device/host_device.cc); tests/distributed/test_gpu.py has GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
import whale_ops
from tests.whale_ops.device.host_device import build_host_device, host_devices
from tests.whale_ops.harness import ranks as communicators
from whale.config import Config
from whale.errors import ClusterError, ConfigError
from whale.ir.plan_text import format_plan
from whale.runtime.ranks import device_exchange

Start = Callable[..., None]
NCCL = {"communication.backend": "nccl"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_host_device(tmp_path_factory.mktemp("device"))


@pytest.fixture
def with_devices(ranks: Start, library: Path) -> Iterator[Start]:
    """As `ranks`, each with the host's memory as its device."""
    with host_devices(library):
        yield ranks


def trained(
    function: Any, dtype: str = "float64", centred: bool = True, scope: Callable[[], Any] = nullcontext
) -> tuple[list[np.ndarray], list[float], Any]:
    """Weights and losses after three steps, and the step; `centred`: by what the whole batch has in the mean.

    `scope`: of the second layer.
    """
    generator = np.random.default_rng(1)
    weights = [tf.Variable(generator.standard_normal(s).astype(dtype) / 8) for s in ((30, 40), (40, 1), (40,))]
    x, y = generator.standard_normal((12, 30)).astype(dtype), np.ones((12, 1), dtype)

    @function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            hidden = x @ weights[0] + weights[2]
            if centred:
                hidden -= tf.reduce_mean(hidden, 0)
            with scope():
                out = tf.tanh(hidden) @ weights[1]
            loss = tf.reduce_mean(tf.square(out - y))
        for weight, slope in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(tf.cast(0.5, dtype) * slope)
        return loss

    losses = [float(step(tf.constant(x), tf.constant(y))) for _ in range(3)]
    return [w.numpy() for w in weights], losses, step


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (2, {}),
        (3, {"replica.shares": [5, 0, 7], "communication.group_bytes": 0}),
        (2, {"pipeline.num_micro_batch": 2, "replica.shares": [8, 4]}),
    ],
    ids=["even", "uneven", "micro-batches"],
)
def test_a_step_computes_what_one_device_computes(with_devices: Start, count: int, options: dict[str, Any]) -> None:
    centred = "pipeline.num_micro_batch" not in options
    one, losses_of_one, _ = trained(tf.function, centred=centred)
    with_devices(count, **{**NCCL, **options})
    weights, losses, step = trained(wh.function, centred=centred)
    np.testing.assert_allclose(losses, losses_of_one, rtol=1e-12)
    for weight, other in zip(weights, one):
        np.testing.assert_allclose(weight, other, rtol=1e-10, atol=1e-13)
    generator = np.random.default_rng(1)
    text = format_plan(step.plan(tf.constant(generator.standard_normal((12, 30))), tf.ones((12, 1), tf.float64)))
    assert "of the tensors from GPU to GPU" in text
    assert "all-reduce P(sum) -> B from GPU to GPU" in text


def test_gradients_can_travel_with_16_bits(with_devices: Start) -> None:
    one, _, _ = trained(tf.function, "float32")
    with_devices(2, **{**NCCL, "communication.wire_dtype": "float16"})
    weights, _, _ = trained(wh.function, "float32")
    error = max(np.max(np.abs(weight - other)) / np.max(np.abs(other)) for weight, other in zip(weights, one))
    assert 2.0**-19 < error < 2.0**-9, "rounded, and no more than the wire rounds"


def test_sums_over_all_ranks_of_a_mesh(with_devices: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """What is outside of the scope has rows on every rank, so its gradients are sums over both axes, and one sum."""
    one, losses_of_one, _ = trained(tf.function)
    with_devices(4, **NCCL, mesh="data=2,expert=2")
    weights, losses, step = trained(wh.function, scope=lambda: wh.split(axis="expert"))
    np.testing.assert_allclose(losses, losses_of_one, rtol=1e-12)
    for weight, other in zip(weights, one):
        np.testing.assert_allclose(weight, other, rtol=1e-10, atol=1e-13)
    (compiled,) = (s.compiled for s in step._steps.values())
    assert all(any(n.op == "WhaleDeviceAllReduce" for n in rank.nodes) for rank in compiled.ranks)
    assert "carries out the sums over all ranks: 2 of 7" in capsys.readouterr().err


def test_ranks_of_one_process_are_refused(ranks: Start) -> None:
    with pytest.raises(ConfigError, match="in-process"):
        ranks(2, **NCCL)


def test_every_rank_hears_what_one_lacks(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(NCCL)
    monkeypatch.setattr(device_exchange, "library", lambda: library)
    for lacks, fault in (("TensorFlow sees no GPU", "nccl"), ("", "open")):

        def opened(comm: whale_ops.Communicator, lacks: str = lacks) -> ClusterError | None:
            try:
                device_exchange.open_device(config, comm, 0, lacks if comm.rank == 1 else "")
            except ClusterError as refused:
                return refused
            return None

        with communicators(2) as comms, ThreadPoolExecutor(2) as pool:
            if fault == "open":
                for comm in comms:
                    real = comm.open_device
                    comm.open_device = lambda path, _, *rest, real=real: real(path, "open", *rest)  # type: ignore[method-assign]
            for error in pool.map(opened, comms):
                assert error is not None
                assert (f"rank 1: {lacks}" if lacks else "no such device") in str(error)
                assert "communication.backend" in str(error)


def test_what_a_rank_lacks(library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_exchange, "library", lambda: tmp_path / "none.so")
    assert "python -m whale_ops.build_cuda" in device_exchange.take_gpu(0)[1]
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("there is a GPU here")
    monkeypatch.setattr(device_exchange, "library", lambda: library)
    assert device_exchange.take_gpu(0) == (0, "TensorFlow sees no GPU")
