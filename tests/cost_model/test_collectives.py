"""Communication times: no rank alone communicates, more bandwidth never hurts, formulas at their limits."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model import hardware
from cost_model.kernels import collectives
from cost_model.kernels.collectives import ALL_REDUCE, COLLECTIVES, Group, make_group, point_to_point_s
from whale.ir.layout import Partial, Replicate, Shard, count_moved_bytes

NVSWITCH, HDR = hardware.find_link("nvswitch2"), hardware.find_network("infiniband-hdr-200")
BYTES = st.floats(1, 1e11)


def over(size: int, per_host: int, nics: int = 8, groups: int = 1) -> Group:
    return make_group(size, per_host, NVSWITCH, HDR, nics, groups)


@pytest.mark.parametrize("name", [*COLLECTIVES, *ALL_REDUCE])
def test_one_rank_does_not_communicate(name: str) -> None:
    formula = COLLECTIVES.get(name) or ALL_REDUCE[name]
    assert formula(over(1, 1), 1e9) in (0.0, math.inf)  # inf: not an algorithm for one host


@given(BYTES, st.sampled_from([(2, 2), (8, 8), (16, 8), (64, 8), (64, 1), (6, 4)]), st.floats(1, 4))
def test_more_bandwidth_or_fewer_bytes_are_never_slower(size: float, shape: tuple[int, int], factor: float) -> None:
    here = over(*shape)
    wider = replace(here, link_bytes_per_s=here.link_bytes_per_s * factor)
    faster = replace(wider, host_bytes_per_s=here.host_bytes_per_s * factor)
    for formula in {**COLLECTIVES, **ALL_REDUCE}.values():
        assert formula(faster, size) <= formula(wider, size) <= formula(here, size)
        assert formula(here, size / factor) <= formula(here, size)


@given(BYTES, st.integers(2, 64))
def test_an_all_reduce_costs_at_most_its_two_halves(size: float, ranks: int) -> None:
    here = over(ranks, 8)
    halves = collectives.reduce_scatter_s(here, size) + collectives.all_gather_s(here, size)
    assert collectives.ring_all_reduce_s(here, size) <= halves * 1.0001
    assert collectives.all_gather_s(here, size) <= collectives.ring_all_reduce_s(here, size) * 1.0001


def test_large_messages_reach_the_measured_bus_bandwidth() -> None:
    def bus_gb_per_s(here: Group, size: float) -> float:
        return 2 * (here.size - 1) / here.size * size / collectives.all_reduce_s(here, size) / 1e9

    # github.com/NVIDIA/nccl-tests issues 100 and 149 (eight A100), 119 (24 A100 and four adapters per host), 212
    # (H100).
    assert bus_gb_per_s(over(8, 8), 4e9) == pytest.approx(232, rel=0.02)
    assert 0.8 < bus_gb_per_s(over(24, 8, nics=4), 4e9) / 96 < 1.05
    h100 = make_group(8, 8, hardware.find_link("nvswitch3"))
    assert bus_gb_per_s(h100, 8e9) == pytest.approx(480, rel=0.02)
    # Small ones are latency: 1 MB over eight A100 takes about 60 us in the same reports.
    assert 30e-6 < collectives.all_reduce_s(over(8, 8), 1e6) < 80e-6


def test_groups_that_share_adapters_share_their_bandwidth() -> None:
    alone, crowded = over(8, 1, groups=1), over(8, 1, groups=8)
    assert collectives.ring_all_reduce_s(crowded, 1e10) == pytest.approx(
        8 * collectives.ring_all_reduce_s(alone, 1e10), rel=0.01
    )
    narrow = make_group(8, 1, NVSWITCH, HDR, 8, 8, oversubscription=2.0)
    assert collectives.all_gather_s(narrow, 1e10) == pytest.approx(
        2 * collectives.all_gather_s(crowded, 1e10), rel=0.01
    )


def test_a_ring_that_leaves_from_far_devices_is_bound_by_what_adapters_read_there() -> None:
    near, far = over(16, 2, nics=4, groups=4), make_group(16, 2, NVSWITCH, HDR, 4, 4, adapter_bytes_per_s=6.1e9)
    assert (near.host_bytes_per_s, far.host_bytes_per_s) == (HDR.bytes_per_s, 6.1e9)
    assert make_group(16, 2, NVSWITCH, HDR, 4, 4, adapter_bytes_per_s=1e12) == near
    # On one host no adapter takes part.
    assert make_group(2, 2, NVSWITCH, HDR, 4, 4, adapter_bytes_per_s=6.1e9) == over(2, 2, nics=4, groups=4)


def test_a_message_takes_its_latency_and_its_bytes() -> None:
    assert point_to_point_s(1e9, 1e9, 14) == pytest.approx(1.0, rel=1e-4)
    assert point_to_point_s(0, 1e9, 14) == pytest.approx(22.4e-6)


def test_all_to_all_is_bound_by_adapters_between_hosts() -> None:
    here = over(16, 8)
    # 8 of 16 parts leave each host, of each of its eight ranks.
    assert collectives.all_to_all_s(here, 1e9) == pytest.approx(1e9 * 8 / 16 * 8 / here.host_bytes_per_s, rel=0.05)


@pytest.mark.parametrize("hosts, top, groups, top_groups", [(2, 2, 0, 0), (4, 3, 0, 0), (4, 3, 4, 2), (2, 3, 4, 1)])
def test_a_token_has_experts_on_as_many_hosts_as_draws_of_them_say(
    hosts: int, top: int, groups: int, top_groups: int
) -> None:
    """Hosts are drawn alike for each of a token's experts: among all, or among those of the groups drawn first."""
    able = min(hosts, top_groups * -(-hosts // groups)) if groups else hosts
    draws = list(itertools.product(range(able), repeat=top))
    mean = sum(len(set(one)) for one in draws) / len(draws)
    routed = collectives.RoutedTokens(1.0, 1.0, top, 8 * hosts, groups, top_groups)
    assert routed.count_hosts(hosts) == pytest.approx(mean)


def test_tokens_that_cross_once_to_each_host_take_less_of_the_adapters() -> None:
    here, size = over(64, 8), 8e10
    each = collectives.RoutedTokens(size, size, 8, 256)
    assert collectives.exchange_tokens_s(here, each) == 2 * collectives.all_to_all_s(here, size)
    once = replace(each, once=True)
    # 7 of 8 copies leave a host, or 7 of 8 of the hosts that a token goes to.
    part = collectives.exchange_tokens_s(here, once) / collectives.exchange_tokens_s(here, each)
    assert part == pytest.approx(once.count_hosts(8) / 8, rel=1e-3)
    limited = replace(once, groups=8, top_groups=4)
    assert limited.count_hosts(8) < 4 < once.count_hosts(8)
    assert collectives.exchange_tokens_s(here, limited) < collectives.exchange_tokens_s(here, once)
    half = replace(limited, there_bytes=size / 2)  # in a dtype half as large
    both = [collectives.exchange_tokens_s(here, one) for one in (limited, half)]
    assert both[1] / both[0] == pytest.approx(0.75, rel=1e-3)


def test_tokens_that_go_once_to_each_rank_take_less_of_the_links() -> None:
    host, size = over(8, 8), 8e10
    each = collectives.RoutedTokens(size, size, 8, 64)
    once = replace(each, once=True)
    part = collectives.exchange_tokens_s(host, once) / collectives.exchange_tokens_s(host, each)
    # Eight ranks have eight experts each, on 5.25 of which a token's eight are.
    draws = 8 * (1 - (7 / 8) ** 8)
    assert once.count_ranks(8, 1) == pytest.approx(draws)
    assert part == pytest.approx(draws / 8, rel=1e-3)
    # With an expert on each rank there is nothing to send together.
    alone = replace(once, experts=8)
    assert collectives.exchange_tokens_s(host, alone) == collectives.exchange_tokens_s(host, replace(alone, once=False))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bytes_on_the_links_are_those_of_the_table_of_reshards(ranks: int) -> None:
    """For large tensors a collective takes as long as its share of the logical bytes does on each rank's link."""
    size = 2**40 * ranks**2
    whole, partial = Replicate(), Partial("sum")
    first, second = (Shard(dim, (2**20,) * ranks) for dim in (0, 1))
    here = over(ranks, 8)
    for formula, source, target, ranks_tensor in (
        (collectives.ring_all_reduce_s, partial, whole, size),
        (collectives.reduce_scatter_s, partial, first, size),
        (collectives.all_gather_s, first, whole, size),
        (collectives.all_to_all_s, first, second, size / ranks),
    ):
        logical = count_moved_bytes(source, target, size, ranks)
        assert formula(here, ranks_tensor) == pytest.approx(logical / ranks / here.link_bytes_per_s, rel=1e-3)
