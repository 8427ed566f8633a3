"""Listings of the first Whale's paper in ranks of this process; `python -m tests.epl.listings` runs all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import whale as wh
from tests.epl import listings
from whale.errors import PlanError

RANKS = {"communication.in_process_ranks": 4}


@pytest.fixture
def started() -> Iterator[None]:
    wh.init(RANKS)
    yield
    wh.shutdown()


@pytest.mark.core
@pytest.mark.parametrize("name", ["pipeline", "data_parallel_pipeline", "task_graphs"])
def test_listing(name: str) -> None:
    assert listings.difference(getattr(listings, name)) <= listings.LIMIT


def test_bare_keys_of_the_first_whale() -> None:
    config = wh.Config({"num_micro_batch": 8, "num_task_graph": 2})
    assert config["pipeline.micro_batches"] == 8 and config["pipeline.stages"] == 2
    assert config.but({"num_micro_batch": 4})["pipeline.micro_batches"] == 4
    assert config["num_micro_batch"] == 8


def test_a_second_init_begins_again(started: None) -> None:
    wh.set_default_strategy(wh.split())
    wh.init({**RANKS, "pipeline.micro_batches": 2})
    from whale.runtime.context import require_current

    context = require_current()
    assert context.config["pipeline.micro_batches"] == 2 and not context.scoping.split_everything and context.size == 4
    with pytest.raises(wh.ClusterError, match="connected") as error:
        wh.init({**RANKS, "communication.in_process_ranks": 2})
    assert "communication.in_process_ranks=2" in str(error.value)


REFUSED: dict[str, tuple[Any, str]] = {
    "replica": (lambda: wh.replica(3).__enter__(), "device_count=3, 4 ranks"),
    "split": (lambda: (wh.split(2).__enter__(), wh.split(4).__enter__()), "2 ranks before"),
    "stage": (lambda: wh.stage(device_count=2).__enter__(), "name the ranks"),
    "schedule": (lambda: wh.pipeline(2, strategy="PreferForward").__enter__(), "pipeline.schedule='1f1b'"),
    "modes": (lambda: wh.auto_parallel(wh.recompute), "given: modes=recompute"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_is_refused(started: None, name: str) -> None:
    call, said = REFUSED[name]
    with pytest.raises(PlanError) as error:
        call()
    assert said in str(error.value)


def test_hosts_give_way_to_ranks(started: None) -> None:
    by_hosts = wh.cluster("127.0.0.1:8001,127.0.0.1:8002", None, "worker", 0, {"row": 2})
    assert by_hosts == wh.cluster({"row": 2}) == wh.cluster(worker_hosts="a:1", layout={"row": 2})
    assert wh.cluster("a:1,b:2") == wh.cluster("all")
