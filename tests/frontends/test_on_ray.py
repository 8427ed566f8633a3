"""``whale.ray.run`` with a Ray that does at once what it is asked; a real one is no dependency of the tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import whale.ray
from whale.errors import ClusterError, InstallError
from whale.frontends import on_ray


class Ray(SimpleNamespace):
    """Bundles lie on ``places``, a number of a node for each; there is room, or none."""

    def __init__(self, places: list[int], room: bool = True) -> None:
        super().__init__(places=places, room=room, held=[], asked={})
        self.exceptions = SimpleNamespace(RayTaskError=type("RayTaskError", (Exception,), {"cause": None}))

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def nodes(self) -> list[dict[str, str]]:
        return [{"NodeID": f"node{n}", "NodeManagerAddress": f"10.0.0.{n}"} for n in range(3)]

    def remote(self, **asked: Any) -> Callable[..., Any]:
        self.asked = asked
        return lambda function: SimpleNamespace(remote=lambda *args: (function, args))

    def get(self, call: Any) -> Any:
        function, args = call
        return function(*args)

    def placement_group(self, bundles: list[dict[str, int]], strategy: str) -> Any:
        assert strategy == "PACK"
        self.held.append(bundles)
        return SimpleNamespace(wait=lambda timeout_s: self.room)

    def remove_placement_group(self, group: Any) -> None:
        self.held.pop()

    def placement_group_table(self, group: Any) -> dict[str, Any]:
        return {"bundles_to_node_id": {bundle: f"node{n}" for bundle, n in enumerate(self.places)}}


def installed(monkeypatch: pytest.MonkeyPatch, ray: Any) -> Any:
    strategies = ModuleType("ray.util.scheduling_strategies")
    strategies.PlacementGroupSchedulingStrategy = lambda group, **at: at  # type: ignore[attr-defined]
    for name in ("ray", "ray.util.placement_group"):
        monkeypatch.setitem(sys.modules, name, ray)
    monkeypatch.setitem(sys.modules, "ray.util", ModuleType("ray.util"))
    monkeypatch.setitem(sys.modules, strategies.__name__, strategies)
    return ray


def test_ranks_of_one_node_are_started_by_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = installed(monkeypatch, Ray([1, 1]))

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)

    def call(number: int) -> tuple[int, int]:
        return number + int(os.environ["WHALE_RANK"]) * int(os.environ["OMP_NUM_THREADS"]), hash("a word")

    (first, one), (second, other) = whale.ray.run(call, (5,), np=2, cpus_per_rank=3)
    assert (first, second, one) == (5, 8, other)  # sets of text have one order, as under `whale run`
    assert ray.asked["num_cpus"] == 3 and ray.asked["scheduling_strategy"] == {"placement_group_bundle_index": 0}
    assert ray.held == []


def test_ranks_of_several_nodes_are_started_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, Ray([2, 0, 2]))
    monkeypatch.setattr(on_ray, "launch_pickled", lambda call, np, hosts, threads, verbose: [hosts])
    assert whale.ray.run(print, np=3) == ["10.0.0.2:2,10.0.0.0:1"]


def test_a_cluster_without_room_and_a_failed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = installed(monkeypatch, Ray([0, 0, 0], room=False))
    with pytest.raises(ClusterError, match=r"no room for the ranks\n.*3 ranks of 1 CPUs each, after 2 s\n.*2 CPUs"):
        whale.ray.run(print, np=3, timeout_s=2)
    assert ray.held == []
    ray.room = True

    def fail(*args: Any) -> None:
        error = ray.exceptions.RayTaskError()
        error.cause = ClusterError("the run that was started to call the function has failed")
        raise error

    monkeypatch.setattr(on_ray, "launch_pickled", fail)
    with pytest.raises(ClusterError, match="to call the function has failed"):
        whale.ray.run(print, np=3)
    assert ray.held == []


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InstallError, match="pip install ray"):
        whale.ray.run(print)
