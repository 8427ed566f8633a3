"""The hardware catalogue and cluster files: every figure has a source, every mistake a line and a key."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cost_model import hardware
from cost_model.cluster import cluster_file, yaml_files
from cost_model.cluster.pools import Machines
from cost_model.kernels.collectives import make_group
from cost_model.kernels.compute import find_rates
from whale.errors import ClusterError

ASKED_FOR = """p100 v100-pcie-16gb v100-sxm2-16gb v100-sxm2-32gb t4 a10 l4 l40s a100-40gb a100-80gb h100-pcie
h100-sxm-80gb h200 b200 rtx-2080-ti rtx-3090 rtx-4090 titan-rtx gb200 gb300 b300 gh200 gh200-144gb h100-nvl h100-96gb
h20 h800 a800 a100-pcie-40gb a100-pcie a40 a30 a6000 rtx-6000-ada rtx-pro-6000 5090 p100-sxm2 mi250x mi300x mi325x
mi355x"""
ACCELERATORS = "tpu-v4 tpu-v5e tpu-v5p tpu-v6e trainium2 gaudi2 gaudi3 910b 910c"
LINKS = "nvlink5-nvl72 nvlink-c2c xgmi3 infinity-fabric-host nvswitch1 pcie4-tree"
NETWORK_RATES = {"ethernet-10g": 1.25, "ethernet-100g": 12.5, "roce-400": 50, "infiniband-hdr-200": 25}
NETWORK_RATES |= {f"ethernet-{g}g": g / 8 for g in (50, 200, 400, 800)}
NETWORK_RATES |= {"infiniband-xdr-800": 100, "omni-path-100": 12.5, "slingshot-11": 25, "efa-v2": 12.5, "efa-v3": 25}

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
            given = {name for name in entry.__struct_fields__ if getattr(entry, name) not in (None, 1.0, {})}
            figures = given - {"name", "kind", "aliases", "sources", "efficiency", "topology"}
            missing += [f"{entry.name}.{name}" for name in sorted(figures) if not entry.find_source(name)]
            unused = {key for keys in entry.sources for key in keys.split(",")} - set(entry.__struct_fields__)
            missing += [f"{entry.name}: a source of {key}, which it does not have" for key in unused]
    assert missing == []


def test_devices_and_what_they_refer_to_exist() -> None:
    assert {hardware.find_device(name).kind for name in ASKED_FOR.split()} == {"gpu"}
    assert {hardware.find_device(name).kind for name in ACCELERATORS.split()} == {"accelerator"}
    assert {hardware.find_link(name).name for name in LINKS.split()} == set(LINKS.split())
    assert any(entry.kind == "cpu" for entry in entries(hardware.load_devices()))
    for entry in entries(hardware.load_devices()):
        assert entry.efficiency in hardware.load_efficiencies()
        assert hardware.find_link(entry.host_link).topology == "host"
        assert entry.link is None or hardware.find_link(entry.link).topology != "host"
        # Narrower numbers are never slower.
        peaks = [
            entry.peak_tflops[t]
            for t in ("float64", "float32", "float16", "float8", "float4")
            if t in entry.peak_tflops
        ]
        assert peaks == sorted(peaks)
    for name, rate in NETWORK_RATES.items():
        assert hardware.find_network(name).gb_per_s == rate


def test_names_are_forgiving_and_errors_name_the_nearest() -> None:
    assert hardware.find_device("A100_80GB") is hardware.find_device("a100")
    with pytest.raises(ClusterError, match="no such device\n  given: a100-sxm-90gb\n  expected: a100-sxm-80gb"):
        hardware.find_device("a100-sxm-90gb")
    with pytest.raises(ClusterError, match="no such device\n  given: MI300A\n  expected: mi300x"):
        hardware.find_device("MI300A")
    with pytest.raises(ClusterError, match="no such device\n  given: xi3090\n  expected: one of a10, "):
        hardware.find_device("xi3090")  # no family has that name, however alike the digits
    with pytest.raises(ClusterError, match="no such network\n  given: infinband-xdr\n  expected: infiniband-xdr-800"):
        hardware.find_network("infinband-xdr")
    for name in ("hdr", "HDR", "ib-hdr", "InfiniBand HDR", "hdr_200"):
        assert hardware.find_network(name).name == "infiniband-hdr-200"
    assert hardware.find_network("200GbE").name == "ethernet-200g"
    assert cluster_file.parse(GOOD.replace("infiniband-hdr-200", "HDR")).networks["fabric"].type == "HDR"
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


def test_figures_of_the_catalogue_may_be_overridden() -> None:
    text = GOOD.replace(
        "count: 8}", "count: 8, peak_tflops: {float16: 280, float8: 500}, memory_gb: 160, link_gb_per_s: 200}"
    )
    text = text.replace("share: 0.5", "memory_gb_per_s: 300, host_link_gb_per_s: 8")
    text = text.replace("hdr-200}", "hdr-200, gb_per_s: 20, latency_us: 40}")
    read = cluster_file.parse(text)
    assert cluster_file.parse(cluster_file.to_yaml(read)) == read
    new, old = read.hosts[0].devices[0], read.hosts[1].devices[1]
    assert (new.device.memory_bytes, new.device.peak_flops_per_s("float8")) == (160e9, 500e12)
    assert find_rates(new.device, "float16").matmul_flops_per_s == pytest.approx(
        280 / 312 * find_rates(hardware.find_device("a100"), "float16").matmul_flops_per_s
    )
    assert new.device.peak_flops_per_s("float32") == 19.5e12  # as in the catalogue
    assert new.intra_link().bytes_per_s == pytest.approx(200 / 300 * hardware.find_link("nvswitch2").bytes_per_s)
    assert old.device.memory_bytes_per_s == 300e9
    assert old.intra_link() == old.host_link()
    assert Machines(read).pools[2].host_bytes_per_s == old.host_link().bytes_per_s == pytest.approx(8e9 * 0.76)
    network = read.networks["fabric"].network
    assert (network.gb_per_s, network.step_us.simple, network.step_us.ll) == (20, 40, 40)
    assert list(read.list_overridden()) == [
        "fabric: gb_per_s 20 (25 in the catalogue)",
        "fabric: latency_us 40 (14 in the catalogue)",
        "new/a100-sxm-80gb: memory_gb 160 (85.9 in the catalogue)",
        "new/a100-sxm-80gb: link_gb_per_s 200 (300 in the catalogue)",
        "new/a100-sxm-80gb: peak_tflops.float16 280 (312 in the catalogue)",
        "new/a100-sxm-80gb: peak_tflops.float8 500 (not in the catalogue)",
        "old/t4: memory_gb_per_s 300 (320 in the catalogue)",
        "old/t4: host_link_gb_per_s 8 (15.75 in the catalogue)",
    ]
    assert list(cluster_file.parse(GOOD).list_overridden()) == []


def test_groups_of_a_mesh_have_the_links_between_their_own_devices() -> None:
    mesh, switch = hardware.find_link("xgmi3"), hardware.find_link("nvswitch3")
    whole = mesh.bytes_per_s
    assert [mesh.bytes_per_s_among(n) / whole for n in (2, 4, 8)] == [pytest.approx(n / 7) for n in (1, 3, 7)]
    assert {switch.bytes_per_s_among(n) for n in (2, 4, 8)} == {switch.bytes_per_s}
    assert make_group(2, 2, mesh).link_bytes_per_s == pytest.approx(whole / 7)
    assert make_group(16, 8, mesh, hardware.find_network("roce-400"), 8).link_bytes_per_s == whole


def test_a_key_that_stands_twice_is_an_error_with_its_line() -> None:
    twice = GOOD.replace("    count: 2\n", "    count: 2\n    count: 3\n")
    with pytest.raises(ClusterError, match=r"a key twice\n  given: c.yaml:6, key count, which line 5 has already"):
        cluster_file.parse(twice, "c.yaml")
    for path in hardware.catalogue.FOLDER.rglob("*.yaml"):
        yaml_files.YamlFile(path.read_text(), path.name, "catalogue")


@pytest.mark.parametrize(
    ("old", "new", "where", "what"),
    [
        ("a100-sxm-80gb", "a100-sxm-90gb", "c.yaml:7, key hosts[0].devices[0].type", "expected: a100-sxm-80gb"),
        ("count: 8", "count: -8", "c.yaml:7, key hosts[0].devices[0].count", "this has to be a whole number >= 1"),
        ("nics: 8", "nix: 8", "c.yaml:8, key hosts[0].networks", "unknown field `nix`"),
        ("infiniband-hdr-200", "infiniband-hdd", "c.yaml:2, key networks.fabric.type", "expected: infiniband-hdr-200"),
        ("fabric: {nics: 1}", "fabrik: {nics: 1}", "c.yaml:11, key hosts[1].networks.fabrik", "expected: fabric"),
        ("name: lab\n", "", "c.yaml:1", "missing required field `name`\n  next: add `name: ...`"),
        ("hosts:", "nodes:", "key nodes", "unknown field `nodes`\n  expected: hosts"),
        ("devices: [", "gpus: [", "key hosts[1].gpus", "unknown field `gpus`\n  expected: devices"),
        (
            "{type: t4",
            "{type: t4, memory_gb: 16GB",
            "memory_gb",
            "a number or nothing\n  given: 16GB\n  next: write the",
        ),
        (
            "[{type: v100-sxm2-16gb, count: 4}, {type: t4, share: 0.5}]",
            "{type: t4}",
            "hosts[1].devices",
            "list, [...]\n  g",
        ),
        ("count: 4", "count: four", "c.yaml:10, key hosts[1].devices[0].count", "this has to be a whole number"),
        ("share: 0.5", "share: 1.5", "c.yaml:10, key hosts[1].devices[1].share", "this has to be a number <= 1.0"),
        ("{type: t4", "{typ: t4", "c.yaml:10, key hosts[1].devices[1].typ", "unknown field `typ`"),
        (
            "{type: t4",
            "{type: t4, memory_gb: 999",
            "c.yaml:10, key hosts[1].devices[1].memory_gb",
            "at most 128; the catalogue",
        ),
        ("{type: t4", "{type: t4, link_gb_per_s: 9", "c.yaml:10, key hosts[1].devices[1].link_gb_per_s", "no link but"),
        ("{type: t4", "{type: t4, peak_tflops: {fp16: 9}", "hosts[1].devices[1].peak_tflops.fp16", "expected: float16"),
        ("{type: t4", "{type: t4, peak_tflops: {float16: 65e12}", "devices[1].peak_tflops.float16", "at most 520; the"),
        (
            "hdr-200",
            "hdr-200, gb_per_s: 300",
            "c.yaml:2, key networks.fabric.gb_per_s",
            "at most 200; the catalogue has 25",
        ),
        ("hdr-200", "hdr-200, latency_us: 0", "c.yaml:2, key networks", "this has to be a number > 0.0"),
        ("name: old", "name: new", "c.yaml:9, key hosts[1].name", "two entries of hosts have the same name"),
        ("nics: 8}}", "nics: 8}", "c.yaml:9", "not YAML"),
        ("nics: 8", "nics: 8, far_gb_per_s: 0", "c.yaml:8, key hosts[0].networks", "this has to be a number > 0.0"),
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
