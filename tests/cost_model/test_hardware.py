"""The hardware catalogue and cluster files: every figure has a source, every mistake a line and a key."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cost_model import hardware
from cost_model.cluster import cluster_file
from whale.errors import ClusterError

ASKED_FOR = """p100 v100-pcie-16gb v100-sxm2-16gb v100-sxm2-32gb t4 a10 l4 l40s a100-40gb a100-80gb h100-pcie
h100-sxm-80gb h200 b200 rtx-2080-ti rtx-3090 rtx-4090 titan-rtx"""
NETWORK_RATES = {"ethernet-10g": 1.25, "ethernet-100g": 12.5, "roce-400": 50, "infiniband-hdr-200": 25}

GOOD = """\
name: lab
networks: {fabric: {type: infiniband-hdr-200}}
hosts:
  - name: new
    count: 2
    devices:
      - {type: a100-sxm-80gb, count: 8}
    networks: {fabric: {nics: 8}}
  - name: old
    devices: [{type: v100-sxm2-16gb, count: 4}, {type: t4, share: 0.5}]
    networks: {fabric: {nics: 1}}
"""


def entries(table):
    return {entry.name: entry for entry in table.values()}.values()


def test_every_figure_has_a_source() -> None:
    missing = []
    for table in (
        hardware.load_devices(),
        hardware.load_links(),
        hardware.load_networks(),
        hardware.load_efficiencies(),
    ):
        for entry in entries(table):
            given = {name for name in entry.__struct_fields__ if getattr(entry, name) not in (None, 1.0)}
            figures = given - {"name", "kind", "aliases", "sources", "efficiency", "topology"}
            missing += [f"{entry.name}.{name}" for name in sorted(figures) if not entry.find_source(name)]
            unused = {key for keys in entry.sources for key in keys.split(",")} - set(entry.__struct_fields__)
            missing += [f"{entry.name}: a source of {key}, which it does not have" for key in unused]
    assert missing == []


def test_devices_and_what_they_refer_to_exist() -> None:
    assert {hardware.find_device(name).kind for name in ASKED_FOR.split()} == {"gpu"}
    assert any(entry.kind == "cpu" for entry in entries(hardware.load_devices()))
    for entry in entries(hardware.load_devices()):
        assert entry.efficiency in hardware.load_efficiencies()
        assert hardware.find_link(entry.host_link).topology == "host"
        assert entry.link is None or hardware.find_link(entry.link).topology != "host"
        # Narrower numbers are never slower.
        peaks = [entry.peak_tflops[t] for t in ("float64", "float32", "float16", "float8") if t in entry.peak_tflops]
        assert peaks == sorted(peaks)
    for name, rate in NETWORK_RATES.items():
        assert hardware.find_network(name).gb_per_s == rate


def test_names_are_forgiving_and_errors_name_the_nearest() -> None:
    assert hardware.find_device("A100_80GB") is hardware.find_device("a100")
    with pytest.raises(ClusterError, match="no such device\n  given: a100-sxm-90gb\n  expected: a100-sxm-80gb"):
        hardware.find_device("a100-sxm-90gb")
    with pytest.raises(ClusterError, match="v100-sxm2-32gb does not compute in bfloat16"):
        hardware.find_device("v100").peak_flops_per_s("bfloat16")


def test_a_cluster_file_round_trips() -> None:
    read = cluster_file.parse(GOOD)
    assert cluster_file.parse(cluster_file.to_yaml(read)) == read
    assert read.device_count == 2 * 8 + 4 + 1
    name, entry, nics = read.find_path(read.hosts[0], read.hosts[1])
    assert (name, entry.type, nics) == ("fabric", "infiniband-hdr-200", 1)
    assert read.hosts[0].devices[0].intra_link().name == "nvswitch2"
    assert read.hosts[1].devices[1].intra_link().name == "pcie3-x16"


@pytest.mark.parametrize(
    ("old", "new", "where", "what"),
    [
        ("a100-sxm-80gb", "a100-sxm-90gb", "c.yaml:7, key hosts[0].devices[0].type", "expected: a100-sxm-80gb"),
        ("count: 8", "count: -8", "c.yaml:7, key hosts[0].devices[0].count", "expected `int` >= 1"),
        ("nics: 8", "nix: 8", "c.yaml:8, key hosts[0].networks", "unknown field `nix`"),
        ("infiniband-hdr-200", "infiniband-hdr", "c.yaml:2, key networks.fabric.type", "expected: infiniband-hdr-200"),
        ("fabric: {nics: 1}", "fabrik: {nics: 1}", "c.yaml:11, key hosts[1].networks.fabrik", "expected: fabric"),
        ("name: lab\n", "", "c.yaml:1", "missing required field `name`"),
        ("count: 4", "count: four", "c.yaml:10, key hosts[1].devices[0].count", "expected `int`, got `str`"),
        ("share: 0.5", "share: 1.5", "c.yaml:10, key hosts[1].devices[1].share", "expected `float` <= 1.0"),
        ("{type: t4", "{typ: t4", "c.yaml:10, key hosts[1].devices[1].typ", "unknown field `typ`"),
        ("{type: t4", "{type: t4, memory_gb: 99", "c.yaml:10, key hosts[1].devices[1].memory_gb", "at most 16.0 GB"),
        ("name: old", "name: new", "c.yaml:9, key hosts[1].name", "two entries of hosts have one name"),
        ("nics: 8}}", "nics: 8}", "c.yaml:9", "not YAML"),
        ("nics: 8", "nics: 8, far_gb_per_s: 0", "c.yaml:8, key hosts[0].networks", "expected `float` > 0.0"),
        ("    networks: {fabric: {nics: 1}}\n", "", "c.yaml:9, key hosts[1]", "attached to no network"),
    ],
)
def test_mistakes_name_line_and_key(old: str, new: str, where: str, what: str) -> None:
    assert old in GOOD
    with pytest.raises(ClusterError) as caught:
        cluster_file.parse(GOOD.replace(old, new), "c.yaml")
    assert where in str(caught.value) and what in str(caught.value)


def test_the_published_schema_is_the_one_that_is_checked() -> None:
    assert json.loads(cluster_file.SCHEMA.read_text()) == cluster_file.make_schema()


def test_importing_loads_nothing_heavy() -> None:
    code = "import cost_model.analytic.predict, cost_model.validation.cases, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"tensorflow", "keras", "matplotlib", "scipy", "networkx", "numpy"} & set(done.stdout.split())
