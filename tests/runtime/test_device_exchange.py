"""communication.backend "nccl" and "cuda-ipc": programs whose exchanges the ranks' devices carry out, and refusals.

The device is the host's memory (tests/whale_ops/gpu/host_device.cc); tests/distributed/test_gpu.py has GPUs.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
import whale_ops
from cost_model.graph.machine import Link
from tests.forkserver import warm_python
from tests.whale_ops.gpu.host_device import build_host_device, host_devices
from tests.whale_ops.harness import ranks as communicators
from whale.config import Config
from whale.distributed import device_exchange, gpus
from whale.distributed.device_exchange import Gpu, OwnGpu
from whale.errors import ClusterError, ConfigError, PlanError
from whale.ir.program import Node
from whale.ir.values import DType
from whale.runtime.compile import memory_plan, microbenchmark
from whale.started import ProcessPlace
from whale_ops import gpu_driver

Start = Callable[..., None]
NCCL = {"communication.backend": "nccl"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_host_device(tmp_path_factory.mktemp("device"))


PINNED = {"communication.backend": "pinned", "communication.bucket_bytes": 0}  # tensors in several pieces


@pytest.fixture
def with_mixed_devices(ranks: Start, library: Path) -> Iterator[Start]:
    """As `with_devices`, and every second rank has no device."""
    with host_devices(library, mixed=True):
        yield ranks


@pytest.fixture
def with_devices(ranks: Start, library: Path) -> Iterator[Start]:
    """As `ranks`, each with the host's memory as its device, through which steps exchange all that they do."""
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
        (3, {"batch.shares": [5, 0, 7], "communication.bucket_bytes": 0}),
        (2, {"pipeline.micro_batches": 2, "batch.shares": [8, 4]}),
    ],
    ids=["even", "uneven", "micro-batches"],
)
def test_a_step_computes_what_one_device_computes(with_devices: Start, count: int, options: dict[str, Any]) -> None:
    centred = "pipeline.micro_batches" not in options
    one, losses_of_one, _ = trained(tf.function, centred=centred)
    with_devices(count, **{**NCCL, **options})
    weights, losses, _ = trained(wh.function, centred=centred)
    np.testing.assert_allclose(losses, losses_of_one, rtol=1e-12)
    for weight, other in zip(weights, one):
        np.testing.assert_allclose(weight, other, rtol=1e-10, atol=1e-13)


def test_gradients_can_travel_with_16_bits(with_devices: Start) -> None:
    one, _, _ = trained(tf.function, "float32")
    with_devices(2, **{**NCCL, "communication.wire_dtype": "float16"})
    weights, _, _ = trained(wh.function, "float32")
    error = max(np.max(np.abs(weight - other)) / np.max(np.abs(other)) for weight, other in zip(weights, one))
    assert 2.0**-19 < error < 2.0**-9, "rounded, and no more than the wire rounds"


def equals_one_device(start: Start, options: dict[str, Any]) -> None:
    """Four ranks that ``start`` begins train as one device does."""
    centred = "pipeline.micro_batches" not in options
    one, losses_of_one, _ = trained(tf.function, centred=centred)
    start(4, **options)
    scope = (lambda: wh.split(axis="expert")) if "mesh" in options else nullcontext
    weights, losses, _ = trained(wh.function, centred=centred, scope=scope)
    np.testing.assert_allclose(losses, losses_of_one, rtol=1e-12)
    for weight, other in zip(weights, one):
        np.testing.assert_allclose(weight, other, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": wh.Mesh(data=2, expert=2)},
        {"mesh": wh.Mesh(data=2, expert=2), "pipeline.micro_batches": 2},
        {"memory.zero": 3, "batch.shares": [1, 2, 4, 5]},
    ],
    ids=["groups", "groups and micro-batches", "zero 3"],
)
def test_every_exchange_is_one_of_devices(with_devices: Start, options: dict[str, Any]) -> None:
    """Groups along each axis, what scopes bring together, gathered and scattered state."""
    equals_one_device(with_devices, {**NCCL, **options})


def test_stages_send_from_device_to_device(with_devices: Start) -> None:
    """Two replicas of two stages, whose gradients are sums of two ranks, in micro-batches."""
    generator = np.random.default_rng(2)
    first, x = [generator.standard_normal((8, 8)) / 4 for _ in range(2)], generator.standard_normal((12, 8))

    def losses_of(function: Any, stage: Callable[[], Any]) -> list[float]:
        weights = [tf.Variable(value) for value in first]

        @function
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                with stage():
                    hidden = tf.tanh(x @ weights[0])
                with stage():
                    loss = tf.reduce_mean(tf.square(tf.tanh(hidden @ weights[1])))
            for weight, slope in zip(weights, tape.gradient(loss, weights)):
                weight.assign_sub(slope)
            return loss

        return [float(step(tf.constant(x))) for _ in range(3)]

    wanted = losses_of(tf.function, nullcontext)
    with_devices(4, **NCCL, **{"pipeline.micro_batches": 3})
    np.testing.assert_allclose(losses_of(wh.function, wh.stage), wanted, rtol=1e-12)


def test_a_plan_tells_what_stays_with_the_host(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import tensorflow as tf
import whale as wh

wh.init(wh.Config({"communication.backend": "nccl"}))
weight = tf.Variable(tf.ones((4, 1)))


@wh.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(x @ weight)
    weight.assign_sub(tape.gradient(loss, weight))
    centred = x
    for _ in tf.range(3):  # what the whole batch has in the mean, in each round
        centred = tf.tanh(centred - tf.reduce_mean(centred, 0))
    return loss, tf.reduce_sum(tf.cast(x > 0, tf.int64)), centred


step(tf.ones((8, 4)))
"""
    )
    done = subprocess.run(
        [warm_python(), "-m", "whale", "plan", "-np", "2", str(script)], capture_output=True, text=True, check=True
    )
    assert "From device to device: all exchanges but these, which go through host memory" in done.stdout
    assert "16 B  1 AllReduce: int64: devices reduce floating-point types only" in done.stdout, done.stdout
    assert "1 AllReduce: in a loop or a branch" in done.stdout, done.stdout
    assert "NCCL takes some 864.0 MiB of the first rank's GPU" in done.stdout, done.stdout
    assert ("told by a TensorFlow for GPUs" in done.stdout) != tf.test.is_built_with_cuda()


def test_auto_parallel_measures_the_devices_beside_the_host(library: Path) -> None:
    def measured(comm: whale_ops.Communicator) -> list[Link]:
        comm.open_device(library, "cuda-ipc", 0, 1 << 20)
        try:
            return [microbenchmark._link(SimpleNamespace(comms=[comm]), through) for through in ("", "cuda-ipc")]
        finally:
            comm.close_device()

    with communicators(2) as comms, ThreadPoolExecutor(2) as pool:
        for host, devices in pool.map(measured, comms):
            assert 0 < host.exchange_s < 1 and 0 < devices.exchange_s < 1
            assert host.bytes_per_s > 1e6 and devices.bytes_per_s > 1e6
        keys = {counter.key for comm in comms for counter in comm.counters()}
    for size in (1, microbenchmark.FIRST_ELEMENTS):
        assert f"whale/auto//{size}/0" in keys and f"device/whale/auto/cuda-ipc/{size}/0/turn" in keys, keys


def test_the_buffers_of_nccl_are_memory_of_a_step(with_devices: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator for all ranks, and one for each axis along which something is summed or gathered."""
    monkeypatch.setattr(memory_plan, "limit_bytes", lambda context: (100 << 20, "memory of the GPU, A"))
    with_devices(4, **NCCL, mesh=wh.Mesh(data=2, expert=2))
    with pytest.raises(PlanError, match=r"NCCL \d\.\d GiB") as refused:
        trained(wh.function, scope=lambda: wh.split(axis="expert"))
    assert "memory of the GPU, A" in str(refused.value)


@pytest.mark.parametrize(
    ("op", "dtype", "has"),
    [
        ("WhaleDeviceAllReduce", "float32", True),
        ("StatefulPartitionedCall", "float32", True),
        ("WhaleAllReduce", "float32", False),
        ("Unique", "string", False),
        ("NoSuchOp", "float32", False),
    ],
)
def test_kernels_for_gpus_are_found_by_types(op: str, dtype: str, has: bool) -> None:
    whale_ops.load_ops()
    assert gpus.has_gpu_kernel(Node("x", op, attrs={"T": DType(dtype)})) == has


def test_a_kernel_of_other_types_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorflow.core.framework import kernel_def_pb2
    from tensorflow.python.framework import kernels

    registered = kernel_def_pb2.KernelList()
    kernel = registered.kernel.add(op="Bincount", device_type="GPU")
    kernel.constraint.add(name="T").allowed_values.list.type.append(tf.float32.as_datatype_enum)
    monkeypatch.setattr(kernels, "get_registered_kernels_for_op", lambda op: registered)
    for dtype in ("float32", "float64"):
        node = Node("x", "Bincount", attrs={"T": DType(dtype)})
        assert gpus.has_gpu_kernel(node) == (dtype == "float32")


def test_ranks_of_one_process_are_refused(ranks: Start) -> None:
    with pytest.raises(ConfigError, match="in_process_ranks"):
        ranks(2, **NCCL)


def test_every_rank_hears_what_one_lacks(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(NCCL)
    monkeypatch.setattr(device_exchange, "find_library", lambda: library)
    for lacks, fault in (("libwhale_cuda.so is not built", "nccl"), ("", "open")):

        def opened(comm: whale_ops.Communicator, lacks: str = lacks) -> ClusterError | None:
            try:
                device_exchange.open_device(config, comm, Gpu(0, lacks if comm.rank == 1 else ""))
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


@pytest.mark.parametrize(
    ("backend", "ordinals", "said"),
    [
        ("nccl", (0, None), ["rank 1: TensorFlow sees no GPU", "on every rank", '"pinned", with which ranks without']),
        ("cuda-ipc", (None, None), ["rank 0: TensorFlow sees no GPU", 'set communication.backend to "whale"']),
        ("pinned", (None, None), ["rank 1: TensorFlow sees no GPU", "on one rank or several"]),
    ],
)
def test_ranks_without_a_gpu_are_refused_where_they_cannot_take_part(
    library: Path, monkeypatch: pytest.MonkeyPatch, backend: str, ordinals: tuple[int | None, ...], said: list[str]
) -> None:
    monkeypatch.setattr(device_exchange, "find_library", lambda: library)
    config = Config({"communication.backend": backend})

    def opened(comm: whale_ops.Communicator) -> str:
        with pytest.raises(ClusterError) as refused:
            device_exchange.open_device(config, comm, Gpu(ordinals[comm.rank]))
        return str(refused.value)

    with communicators(2) as comms, ThreadPoolExecutor(2) as pool:
        for text in pool.map(opened, comms):
            assert all(part in text for part in said), text


@pytest.mark.parametrize(
    "options",
    [
        {"batch.shares": [5, 0, 4, 3]},
        {"mesh": wh.Mesh(data=2, expert=2), "pipeline.micro_batches": 2},
        {"memory.zero": 3, "batch.shares": [1, 2, 4, 5]},
    ],
    ids=["shares", "groups and micro-batches", "zero 3"],
)
def test_ranks_with_and_without_a_gpu_compute_what_one_device_computes(
    with_mixed_devices: Start, options: dict[str, Any]
) -> None:
    equals_one_device(with_mixed_devices, {**PINNED, **options})


def test_what_a_rank_lacks(library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_exchange, "find_library", lambda: tmp_path / "none.so")
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("there is a GPU here")
    assert device_exchange.take_gpu(0) == Gpu(None)
    for found in ("list_physical_devices", "get_visible_devices"):
        monkeypatch.setattr(tf.config, found, lambda kind: ["GPU:0"])
    assert "python -m whale_ops.build" in device_exchange.take_gpu(0).lacks
    monkeypatch.setattr(device_exchange, "find_library", lambda: library)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["GPU:0", "GPU:1"])
    assert "TensorFlow sees 2 GPUs, the driver 1" in device_exchange.take_gpu(0).lacks


@pytest.mark.parametrize(
    ("visible", "taken"),
    [(["GPU:0", "GPU:1"], "GPU:1"), (["GPU:0"], "GPU:0"), (["GPU:2", "GPU:3"], "GPU:3"), ([], None)],
    ids=["its number's", "the script's", "of the script's", "hidden by the script"],
)
def test_every_process_has_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, visible: list[str], taken: str | None
) -> None:
    """With the default backend, too: else all ranks of a host would compute on its first GPU."""
    done: list[tuple[str, ...]] = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [f"GPU:{i}" for i in range(4)])
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: visible)
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda gpu: None)
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda gpu: True)
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda gpu, kind: done.append(("only", gpu)))
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda gpu, yes: done.append(("grows", gpu)))
    place = ProcessPlace(rank=5, size=6, local_rank=1, local_size=2, launcher="whale run")
    device_exchange.start_device_exchange(Config({}), place, 6, ())
    assert done == ([] if taken is None else [("only", taken), ("grows", taken)])


@pytest.mark.parametrize(
    ("forced", "grows", "limits", "said"),
    [
        ("", True, (), ""),
        ("", False, (), "it has started before wh.init"),
        ("true", False, (), ""),
        ("", False, (1024,), ""),
        ("false", True, (), "TF_FORCE_GPU_ALLOW_GROWTH=false"),
    ],
    ids=["as Whale sets it", "started", "started, forced", "started, limited", "forbidden"],
)
def test_a_gpu_whose_memory_tensorflow_takes_at_once_is_said(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    forced: str,
    grows: bool,
    limits: tuple[int, ...],
    said: str,
) -> None:
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", forced)
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda gpu: grows)
    parts = [SimpleNamespace(memory_limit=limit) for limit in limits]
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda gpu: parts or None)
    device_exchange.warn_of_taken_memory("GPU:0")
    assert said in caplog.text and bool(said) == bool(caplog.text)


def test_gpus_that_tensorflow_does_not_see_are_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("there is a GPU here")
    found = gpu_driver.Driver((13, 0), (gpu_driver.Gpu("NVIDIA A100", 80 << 30, 8, (True,)),))
    for driver, is_said in ((None, False), (gpu_driver.Driver((0, 0), (), "cuInit"), False), (found, True)):
        monkeypatch.setattr(gpu_driver, "look", lambda driver=driver: driver)
        caplog.clear()
        assert device_exchange.look_at_own_gpu() is None
        assert ("lists 1 GPU, of which TensorFlow sees none" in caplog.text) == is_said


def test_ranks_share_a_gpu_and_not_its_parts() -> None:
    def gpu(uuid: str, used_bytes: int = 0) -> OwnGpu:
        return OwnGpu(uuid, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5 << 30, 8, used_bytes)

    own = [gpu("a", 3), gpu("b"), None, gpu("a", 700)]  # the last one saw what the first has opened, too
    with communicators(4) as comms, ThreadPoolExecutor(4) as pool:
        for found in pool.map(device_exchange.find_gpus, comms, own):
            assert [one and (one.uuid, one.used_bytes, one.sharing) for one in found] == [
                ("a", 3, 2), ("b", 0, 1), None, ("a", 3, 2),
            ]  # fmt: skip


def test_unequal_precision_of_gpus_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    v100, a100 = OwnGpu("v", "Tesla V100-SXM2-16GB", 16 << 30, 7), OwnGpu("a", "NVIDIA A100", 80 << 30, 8)
    describe = device_exchange.describe_unequal_precision
    assert describe([a100, a100], "bfloat16") == describe([v100, v100], "float16") == describe([None, None], "") == []
    (rounded,) = describe([a100, v100, None], "")
    assert "TF32" in rounded and "on ranks 1 (Tesla V100-SXM2-16GB), 2 (a processor):" in rounded
    (slow,) = describe([v100, v100], "bfloat16")
    assert "without units for bfloat16" in slow and '"float16"' in slow
    assert len(describe([a100, v100], "bfloat16")) == 2
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert describe([a100, v100], "") == []
