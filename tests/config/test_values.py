"""Meshes and emulated networks: text that can be read is read, and printed as it was; other text is refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from whale.config.values import EmulatedNetwork, Link, Mesh, parse_network
from whale.errors import ConfigError

pytestmark = pytest.mark.core


def test_a_mesh_is_a_mapping_and_a_value() -> None:
    mesh = Mesh(stage=2, data=3, tensor=4)
    assert dict(mesh) == {"stage": 2, "data": 3, "tensor": 4} and mesh.size == 24
    assert str(mesh) == "stage=2,data=3,tensor=4" and repr(mesh) == "Mesh(stage=2, data=3, tensor=4)"
    assert Mesh.parse(str(mesh)) == mesh == pickle.loads(pickle.dumps(mesh)) and hash(Mesh.parse(str(mesh))) == hash(
        mesh
    )
    assert mesh != Mesh(data=3, stage=2, tensor=4) and mesh != dict(mesh)
    assert not Mesh() and Mesh.parse(" ") == Mesh() and Mesh().size == 1


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2"])
def test_a_size_is_a_positive_integer(size: Any) -> None:
    with pytest.raises(ConfigError, match=f"given: data={size!r}"):
        Mesh(data=size)


@pytest.mark.parametrize(
    "text", ["data", "data=", "data=0", "data=-2", "2=data", "data=2,data=2", "a b=2", "data=2;tensor=2"]
)
def test_a_mesh_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="stage=2,data=2,tensor=2"):
        Mesh.parse(text)


def test_an_emulated_network() -> None:
    assert parse_network("latency_us=50,bandwidth_MBps=200") == EmulatedNetwork(Link(50 * 1e-6, 200e6))
    assert parse_network("bandwidth_MBps=1").link == Link(0.0, 1e6)
    assert parse_network("latency_us=0").link == Link(0.0, float("inf"))
    assert parse_network("hosts=2+3") == EmulatedNetwork(None, (2, 3))
    assert parse_network("hosts=1+1, latency_us=5") == EmulatedNetwork(Link(5 * 1e-6, float("inf")), (1, 1))
    assert parse_network("") == EmulatedNetwork()


@pytest.mark.parametrize(
    "text",
    [
        "latency_us",
        "latency_us=-1",
        "bandwidth_MBps=0",
        "latency_us=1,latency_us=2",
        "mtu=9000",
        "latency_us=nan",
        "hosts=",
        "hosts=2+0",
        "hosts=2+two",
        "hosts=2,hosts=2",
    ],
)
def test_a_network_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="correct the part"):
        parse_network(text)
