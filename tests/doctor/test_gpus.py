"""What whale doctor says of GPUs, and how much of their memory steps are planned for: with a driver without GPUs."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import tensorflow as tf

from tests.host_gpu.build import HostGpu, build_driver_by_path
from whale.config import Config
from whale.distributed import device_exchange
from whale.distributed.device_exchange import OwnGpu
from whale.doctor import gpus
from whale.runtime.compile import memory_plan
from whale.runtime.compile.settings import choose_scores_bytes
from whale_ops import build, device_code, device_library, gpu_driver


@pytest.fixture(scope="module")
def library() -> str:
    return str(build_driver_by_path())


def driver(library: str, monkeypatch: pytest.MonkeyPatch, *memory_gib: int) -> gpu_driver.Driver:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("HOST_GPUS", ",".join(str(HostGpu(n << 30)) for n in memory_gib))
    found = gpu_driver.look(library)
    assert found is not None
    return found


def test_the_driver_is_asked_for_versions_memory_and_peers(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = driver(library, monkeypatch, 80, 80, 24)
    assert found.cuda == (13, 0)
    assert [(g.memory_bytes >> 30, g.capability) for g in found.gpus] == [(80, 8), (80, 8), (24, 8)]
    assert {g.architecture for g in found.gpus} == {86} and len({g.uuid for g in found.gpus}) == 3
    monkeypatch.setenv("HOST_GPUS", f"{HostGpu()},{HostGpu(used_bytes=300 << 20)}")
    taken = gpu_driver.look(library)
    assert taken is not None
    assert [gpu_driver.count_used_bytes(gpu, library) >> 20 for gpu in taken.gpus] == [0, 300]
    assert gpu_driver.count_used_bytes(found.gpus[2], library) == 0, "it is not there"
    assert gpu_driver.count_used_bytes(found.gpus[0], "libnone.so.1") == 0
    assert [g.peers for g in found.gpus] == [(True, True, False), (True, True, False), (False, False, True)]
    monkeypatch.setenv("HOST_GPU_INIT_ERROR", "803")
    assert driver(library, monkeypatch, 80).failure == "cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
    assert gpu_driver.look("libnone.so.1") is None


def test_what_is_slow_or_missing_is_said_with_what_to_do(
    library: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device_library, "PATH", tmp_path / "libwhale_cuda.so")
    monkeypatch.setattr(device_code, "find_nvrtcs", lambda: iter([device_code.Nvrtc("x", (13, 0), (90,))]))
    found = {one.name: one for one in gpus.look(driver(library, monkeypatch, 80, 80, 24))}
    assert found["GPUs"].text.startswith("3: NVIDIA Something, 80.0 GiB, others, compute capability 8.6; ")
    assert "GPUs' instances (MIG)" not in found
    assert found["GPUs"].text.endswith("CUDA up to 13.0")
    assert "none between 0-2, 1-2" in found["GPUs' peer access"].text
    assert found["GPUs' peer access"].status == "warning" and '"pinned"' in (found["GPUs' peer access"].action or "")
    assert found["GPUs' exchanges"].text.startswith("libwhale_cuda.so is not built")
    assert found["MPI and GPUs"].text.endswith("MPI is used for host memory only")
    assert found["NCCL"].status in ("ok", "warning")
    assert found["GPUs' kernels"].status == "warning" and "pip install" in (found["GPUs' kernels"].action or "")
    assert "GPUs' memory" not in found
    assert gpus.check_peers(driver(library, monkeypatch, 80, 80)).text == "all read each other's memory"
    monkeypatch.setattr(gpu_driver, "MANAGEMENT_LIBRARY", library)
    monkeypatch.setenv("HOST_GPUS", f"{HostGpu()},{HostGpu(4 << 30, used_bytes=3 << 30)}")
    shared = gpu_driver.look(library)
    assert shared is not None
    (in_use,) = gpus.check_memory(shared)
    assert in_use.text == "other programs use 3.0 GiB of GPU 1" and "nvidia-smi" in (in_use.action or "")
    monkeypatch.setenv("HOST_GPUS", str(HostGpu(10 << 30, name="NVIDIA A100-SXM4-40GB MIG 1g.10gb")))
    instance = gpu_driver.look(library)
    assert instance is not None
    (part,) = gpus.check_instances(instance)
    assert "1g.10gb" in part.text and '"pinned"' in (part.action or "")

    device_library.PATH.write_bytes(b"of some day")
    assert gpus.check_library(driver(library, monkeypatch, 80)).text == "libwhale_cuda.so was built from other sources"
    device_library.PATH.write_bytes(build.compute_core_digest().encode())
    damaged = gpus.check_library(driver(library, monkeypatch, 80))
    assert (
        damaged.status == "problem" and "could not be loaded" in damaged.text and "nvidia-smi" in (damaged.action or "")
    )
    monkeypatch.setattr(device_code, "find_nvrtcs", lambda: iter([device_code.Nvrtc("x", (13, 0), (80,))]))
    assert gpus.check_kernels(driver(library, monkeypatch, 80)).text == "NVRTC 13.0 (x)"


def test_without_gpus_there_is_one_line(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/none")
    assert [one.text for one in gpus.look(None)] == ["no driver of NVIDIA"]
    monkeypatch.setenv("HOST_GPU_INIT_ERROR", "803")
    (broken,) = gpus.look(driver(library, monkeypatch, 80))
    assert broken.status == "warning" and "DRIVER_MISMATCH" in broken.text


def test_steps_are_planned_for_the_memory_of_the_ranks_own_gpu(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = ["first", "second"]
    monkeypatch.setattr(gpu_driver, "LIBRARY", library)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: there)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: there)
    driver(library, monkeypatch, 80, 24)
    large, small = device_exchange.list_visible_gpus()
    assert large.memory_bytes == 80 << 30 and large.uuid != small.uuid

    def context(gpu: OwnGpu | None = None, backend: str = "whale", **more: Any) -> Any:
        config = Config({"communication.backend": backend})
        planning = SimpleNamespace(dry=more.get("dry"))
        return SimpleNamespace(config=config, own_gpu=gpu, local_ranks=3, planned_size=3, planning=planning, **place)

    place = {"has_other_processes": False}
    left = 1536 << 20  # by TensorFlow, on a GPU of capability 8
    text = "memory of the GPU, NVIDIA Something, without 1.5 GiB for CUDA"
    assert memory_plan.limit_bytes(context(large)) == ((80 << 30) - left, text)
    assert memory_plan.limit_bytes(context(small)) == ((24 << 30) - left, text)
    assert memory_plan.limit_bytes(context(small, "pinned"))[0] == (24 << 30) - left  # its buffers are the host's
    assert memory_plan.limit_bytes(context(msgspec.structs.replace(small, sharing=2), "cuda-ipc")) == (
        (12 << 30) - left - (12 << 20),
        "memory of the GPU, NVIDIA Something, divided by the 2 ranks that share it, without 1.5 GiB for CUDA and "
        "12.0 MiB for exchanges",
    )
    in_use = msgspec.structs.replace(small, sharing=2, used_bytes=4 << 30)
    assert memory_plan.limit_bytes(context(in_use)) == (
        (10 << 30) - left,
        "memory of the GPU, NVIDIA Something without 4.0 GiB that other programs have of it, divided by the 2 ranks "
        "that share it, without 1.5 GiB for CUDA",
    )
    # A dry run's ranks have the GPUs in turns; ranks that are threads have the first one.
    dry = memory_plan.limits_bytes(context(dry=True), 0)
    assert dry == [(40 << 30) - left, (24 << 30) - left, (40 << 30) - left]
    assert memory_plan.limits_bytes(context(), 0) == [(80 << 30) / 3 - left] * 3
    # GPUs that the driver does not list, of AMD's: nothing is known, and ranks can tell each other so.
    there.append("third")
    assert memory_plan.limits_bytes(context(), 0) == [math.inf] * 3
    unknown = memory_plan._Rank.make(math.inf, "")
    assert msgspec.json.decode(msgspec.json.encode(unknown), type=memory_plan._Rank).fits


def test_attention_in_blocks_follows_the_smallest_gpu() -> None:
    large, small = (OwnGpu(name, name, gib << 30, 8) for name, gib in (("large", 80), ("small", 24)))
    shared = msgspec.structs.replace(large, sharing=8, used_bytes=16 << 30)

    def choose(*gpus: OwnGpu | None, **keys: Any) -> int:
        config = Config({f"memory.{name}": value for name, value in keys.items()})
        return choose_scores_bytes(config, gpus) >> 20

    assert (choose(large, large), choose(large, small), choose(large, shared)) == (320, 96, 64)
    assert choose() == choose(large, None) == 64, "processors have none"
    assert (choose(large, attention_scores_bytes=16 << 20), choose(large, attention_scores_bytes=0)) == (16, 0)
