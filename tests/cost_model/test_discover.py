"""The local machine: what its driver and its processor files say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cost_model.cluster import cluster_file, discover
from whale.errors import ClusterError


def machine(root: Path, model: str, sockets: int, cores: int) -> Path:
    (root / "proc").mkdir()
    blocks = [
        f"processor\t: {socket * cores + core}\nmodel name\t: {model}\nphysical id\t: {socket}\ncore id\t\t: {core}\n"
        for socket in range(sockets)
        for core in range(cores)
    ]
    (root / "proc" / "cpuinfo").write_text("\n".join(blocks))
    (root / "proc" / "meminfo").write_text("MemTotal:       536870912 kB\nMemFree:  1 kB\n")
    return root


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx-2080-ti"),
    ],
)
def test_names_that_the_driver_gives(name: str, expected: str) -> None:
    (entry,) = discover.parse_gpus(f"{name}, 8192\n")
    assert (entry.type, entry.count) == (expected, 1)
    assert entry.memory_gb == pytest.approx(8.59, abs=0.01)


def test_unequal_gpus_are_entries_of_one_host() -> None:
    entries = discover.parse_gpus("NVIDIA A100-SXM4-80GB, 81920\nNVIDIA A100-SXM4-80GB, 81920\nTesla T4, 15360\n")
    assert [(entry.type, entry.count) for entry in entries] == [("a100-sxm-80gb", 2), ("t4", 1)]
    with pytest.raises(ClusterError, match="no such device"):
        discover.parse_gpus("NVIDIA Q900, 81920\n")


def test_processors_with_affinity_and_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(tmp_path, "AMD EPYC 7742 64-Core Processor", sockets=2, cores=64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    entry = discover.discover_processors(None, root)
    assert (entry.type, entry.count, entry.share) == ("epyc-7742", 2, 0.5)
    assert entry.memory_gb == pytest.approx(274.9, abs=0.1)  # half of 512 GiB
    assert discover.discover_processors(16.0, root).share == 0.125


def test_a_processor_that_the_catalogue_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = machine(tmp_path, "Intel(R) Pentium(R) III", sockets=1, cores=1)
    assert discover.discover_processors(None, root).share == pytest.approx(1 / 96)
    assert "has no processor 'Intel(R) Pentium(R) III': it is taken for 1 of the 96 cores" in capsys.readouterr().err
    (root / "proc" / "cpuinfo").write_text("processor : 0\nmodel name\t: AMD EPYC\n")  # as virtual machines call it
    entry = discover.discover_processors(1.2, root)
    assert entry.device.name == "epyc-9654" and 0 < entry.share < 0.02


def test_the_machine_is_a_cluster_of_one_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "bin" / "nvidia-smi"
    driver.parent.mkdir()
    driver.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559'\necho 'NVIDIA H100 80GB HBM3, 81559'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{driver.parent}:{os.environ['PATH']}")
    found = discover.discover_local()
    assert found.device_count == 2 and cluster_file.parse(cluster_file.to_yaml(found)) == found
    driver.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n")
    with pytest.raises(ClusterError, match=r"does not answer\n  given: nvidia-smi .*version mismatch"):
        discover.discover_local()
