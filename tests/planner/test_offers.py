"""Offers ranked by time and cost, and jobs packed on one cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from cost_model.cluster import cluster_file
from whale.errors import PlanError
from whale.planner import ask, offers
from whale.planner.analytic_search.candidates import Constraints

DESCRIBED = "gpt:layers=16,hidden=4096,heads=32,sequence=1024,batch=256"
HOST = "{{name: {device}, count: {count}, devices: [{{type: {device}, count: 4}}], networks: {{ib: {{nics: 1}}}}}}"
OFFERS = """offers:
  - {name: slow, cluster: slow.yaml, price_per_hour: 10.0}
  - {name: fast, cluster: fast.yaml, price_per_hour: 90.0}
  - {name: tiny, cluster: {name: tiny, hosts: [{name: t, devices: [{type: t4, count: 1, memory_gb: 1}]}]}}
"""


def _cluster(*kinds: tuple[str, int]) -> str:
    hosts = ", ".join(HOST.format(device=device, count=count) for device, count in kinds)
    return f"{{name: some, networks: {{ib: {{type: infiniband-hdr-200}}}}, hosts: [{hosts}]}}"


def test_offers_are_ranked_by_time_and_the_cheapest_is_named(tmp_path: Path) -> None:
    (tmp_path / "slow.yaml").write_text(_cluster(("v100-sxm2-32gb", 1)))
    (tmp_path / "fast.yaml").write_text(_cluster(("h100-sxm-80gb", 1)))
    (tmp_path / "offers.yaml").write_text(OFFERS)
    transformer, batch = ask.describe(DESCRIBED)
    assert batch is not None
    found = offers.read_offers(str(tmp_path / "offers.yaml"))
    answers = offers.rank(found, batch, transformer, None, "megatron-2022", Constraints(budget_s=0.2))
    assert [a.offer.name for a in answers] == ["fast", "slow", "tiny"]
    assert answers[2].plan is None and "fits" in answers[2].why
    fast, slow = answers[0], answers[1]
    assert fast.plan is not None and slow.plan is not None
    cheapest = min((fast, slow), key=lambda a: a.cost_per_million_rows)
    expected = cheapest.offer.price_per_hour / 3600 * cheapest.plan.predicted.step_s / batch * 1e6  # type: ignore[union-attr]
    assert cheapest.cost_per_million_rows == pytest.approx(expected)
    row = next(line for line in offers.ranking(answers) if "cheapest" in line)
    assert row.startswith(cheapest.offer.name)


def test_jobs_share_the_hosts_of_a_cluster(tmp_path: Path) -> None:
    jobs = [offers.Job("short", DESCRIBED, 1e5), offers.Job("long", DESCRIBED, 4e5)]
    machines = cluster_file.parse(_cluster(("a100-sxm-80gb", 3), ("v100-sxm2-32gb", 2)))
    packed = offers.pack(jobs, machines, "megatron-2022", 0.1)
    for kind, host in enumerate(machines.hosts):
        assert sum(one.hosts[kind] for one in packed) <= host.count
    assert all(one.plan.problems() == [] for one in packed)
    short, long = packed
    assert sum(long.hosts) > sum(short.hosts) > 0
    assert long.hours < offers.Packed(long.job, short.hosts, short.plan).hours  # than on the other one's hosts
    with pytest.raises(PlanError, match="do not fit on the cluster together"):
        offers.pack(jobs, cluster_file.parse(_cluster(("a100-sxm-80gb", 1))), "megatron-2022", 0.1)


def test_a_file_that_is_none_of_offers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("offers: [{nam: x}]")
    with pytest.raises(PlanError, match="cannot be read"):
        offers.read_offers(str(path))
