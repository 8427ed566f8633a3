"""Placements: text form, sizes, identities, and the reshard table against what ranks are seen to lack."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.ir.strategies import placements
from whale.ir.layout import (
    FIRST,
    REDUCTIONS,
    B,
    Partial,
    Placement,
    Shard,
    count_moved_bytes,
    divide_evenly,
    divide_proportionally,
    find_identity,
    local_shape,
    parse_placement,
    shard,
)

ITEM_BYTES = 8
P_SUM, P_MAX = Partial("sum"), Partial("max")


@given(placements)
def test_what_is_printed_reads_back_equal(placement: Placement) -> None:
    assert parse_placement(str(placement)) == placement


_NO_PLACEMENTS = """S S() S(0) S(0)[1,] S(0)[1,,2] S(0)[-1] S(-1)[1] S(0)[1 S(0)[1]* S(0)[1]*x S(0)[1]*0 S(0)*2[1]
P P() P(mean) P(sum P(sumx P(sum)*2 b BB B*2 O*1"""


@pytest.mark.parametrize("text", ["", "B ", *_NO_PLACEMENTS.split()])
def test_what_is_no_placement_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a placement"):
        parse_placement(text)


def test_texts() -> None:
    assert [str(p) for p in (B, FIRST, P_MAX, shard(1, (3, 0, 2)))] == ["B", "O", "P(max)", "S(1)[3,0,2]"]


@given(st.integers(0, 50), st.integers(1, 8))
def test_even_sizes(size: int, parts: int) -> None:
    sizes = divide_evenly(size, parts)
    assert sum(sizes) == size and len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1 and sorted(sizes, reverse=True) == list(sizes)


def test_a_dimension_of_several_runs() -> None:
    """Two batches behind each other: a coordinate holds its part of both."""
    s = shard(1, (3, 0, 2), 2)
    assert str(s) == "S(1)[3,0,2]*2" and s.extent == 10
    assert [s.local_size(i) for i in range(3)] == [6, 0, 4]
    assert [s.list_indices(i).tolist() for i in range(3)] == [[0, 1, 2, 5, 6, 7], [], [3, 4, 8, 9]]
    assert local_shape((2, 10), s, 2) == (2, 4)
    assert s != shard(1, (3, 0, 2)) and shard(1, (3, 2)).list_indices(1).tolist() == [3, 4]


def test_equal_splits_are_one_object_and_know_their_offsets() -> None:
    s = shard(0, (3, 0, 2))
    assert s is shard(0, (3, 0, 2)) and s == Shard(0, (3, 0, 2))
    assert [s.offset(i) for i in range(3)] == [0, 3, 3]


@pytest.mark.parametrize(
    ("shape", "placement", "coordinate", "expected"),
    [
        ((5, 4), shard(0, (3, 2)), 1, (2, 4)), ((5, 4), shard(1, (4, 0)), 1, (5, 0)), ((5, 4), B, 1, (5, 4)),
        ((5, 4), P_SUM, 0, (5, 4)), (None, shard(0, (3, 2)), 0, None), ((None, 4), shard(0, (3, 2)), 0, (3, 4)),
        ((), B, 0, ()),
    ],
)  # fmt: skip
def test_local_shape(shape, placement: Placement, coordinate: int, expected) -> None:
    assert local_shape(shape, placement, coordinate) == expected


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "int8", "int32", "int64", "uint8", "uint64", "bool"]
)
@pytest.mark.parametrize("op", REDUCTIONS)
def test_the_identity_changes_nothing(op: str, dtype: str) -> None:
    combine = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[op]  # bool: or, and
    if dtype == "bool":
        values = np.array([False, True])
    elif np.dtype(dtype).kind == "f":
        values = np.array([-np.inf, np.finfo(dtype).min, -1.0, 0.0, 2.5, np.inf], dtype)
    else:
        values = np.array([np.iinfo(dtype).min, 0, 3, np.iinfo(dtype).max], dtype)
    identity = np.array(find_identity(op, dtype), dtype)
    np.testing.assert_array_equal(combine(values, identity), values)
    np.testing.assert_array_equal(combine(identity, values), values)


def test_an_unknown_reduction_has_no_identity() -> None:
    with pytest.raises(
        ValueError, match="the reduction 'mean' has no identity element; those that have one are sum, max, min, prod"
    ):
        find_identity("mean", "float32")


# -- the bytes that changes of layout move


def _holds(placement: Placement, coordinate: int, shape: tuple[int, ...]) -> np.ndarray:
    """Which elements ``coordinate`` has (S, B, O) before or needs after."""
    mask = np.zeros(shape, bool)
    if isinstance(placement, Shard):
        run = np.zeros(sum(placement.sizes), bool)
        run[placement.offset(coordinate) : placement.offset(coordinate) + placement.sizes[coordinate]] = True
        mask[(slice(None),) * placement.dim + (np.tile(run, placement.blocks),)] = True
    elif placement == B or (placement == FIRST and coordinate == 0):
        mask[...] = True
    return mask


def _lacking(source: Placement, target: Placement, shape: tuple[int, ...], parts: int) -> int:
    """Bytes of elements that coordinates need and do not have."""
    return ITEM_BYTES * sum(int((_holds(target, i, shape) & ~_holds(source, i, shape)).sum()) for i in range(parts))


@st.composite
def moves(draw) -> tuple[tuple[int, int], int, Placement, Placement]:
    parts = draw(st.integers(1, 4))
    cut = st.lists(st.integers(0, 4), min_size=parts, max_size=parts)
    sizes = [draw(cut), draw(cut)]
    assume(all(sum(s) for s in sizes))
    blocks = draw(st.lists(st.integers(1, 2), min_size=2, max_size=2))
    shape = (blocks[0] * sum(sizes[0]), blocks[1] * sum(sizes[1]))

    def placement() -> Placement:
        kind = draw(st.sampled_from("BOSSS"))
        if kind != "S":
            return B if kind == "B" else FIRST
        dim = draw(st.integers(0, 1))
        wanted = tuple(draw(st.permutations(sizes[dim])))
        if draw(st.booleans()):
            return shard(dim, wanted, blocks[dim])
        return shard(dim, tuple(blocks[dim] * n for n in wanted))

    return shape, parts, placement(), placement()


@given(moves())
def test_moves_without_partial_sums_cost_what_ranks_lack(move) -> None:
    shape, parts, source, target = move
    tensor_bytes = ITEM_BYTES * shape[0] * shape[1]
    runs = [p for p in (source, target) if isinstance(p, Shard) and p.blocks > 1]
    if (
        runs
        and source != target
        and isinstance(source, Shard)
        and isinstance(target, Shard)
        and source.dim == target.dim
    ):
        assert count_moved_bytes(source, target, tensor_bytes, parts) == (parts - 1) * tensor_bytes, (
            "by way of the whole"
        )
        return
    assert count_moved_bytes(source, target, tensor_bytes, parts) == _lacking(source, target, shape, parts)


def _table(parts: int, tensor_bytes: int) -> dict[tuple[Placement, Placement], int]:
    """The same-devices column, for even splits."""
    p, t = parts, tensor_bytes
    s0, s1 = shard(0, (6,) * p), shard(1, (6,) * p)
    return {
        (s0, s0): 0, (s0, s1): (p - 1) * t // p, (s0, B): (p - 1) * t, (B, B): 0, (B, s0): 0, (B, P_SUM): 0,
        (s0, P_SUM): 0,
        (P_SUM, s0): (p - 1) * t, (P_SUM, B): 2 * (p - 1) * t, (P_SUM, P_SUM): 0,
        (P_SUM, P_MAX): (p - 1) * t,  # by way of S: the reduce-scatter, then a fill
        (FIRST, FIRST): 0, (FIRST, B): (p - 1) * t, (FIRST, s0): (p - 1) * t // p, (FIRST, P_SUM): 0,
        (B, FIRST): 0, (s0, FIRST): (p - 1) * t // p,
        (P_SUM, FIRST): (p - 1) * t,
    }  # fmt: skip


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_the_table(parts: int) -> None:
    tensor_bytes = ITEM_BYTES * (6 * parts) ** 2
    for (source, target), expected in _table(parts, tensor_bytes).items():
        assert count_moved_bytes(source, target, tensor_bytes, parts) == expected, f"{source} -> {target}"


def test_large_tensors_are_counted_exactly() -> None:
    tensor_bytes = 8 * 3 * (2**53 + 1)
    assert count_moved_bytes(FIRST, shard(0, (1, 1, 1)), tensor_bytes, 3) == 2 * tensor_bytes // 3


def test_an_empty_tensor_moves_nothing() -> None:
    for source in (B, FIRST, P_SUM, shard(0, (0, 0)), shard(1, (2, 1))):
        for target in (B, FIRST, shard(0, (0, 0)), shard(1, (1, 2))):
            assert count_moved_bytes(source, target, 0, 2) == 0


@given(st.integers(0, 60), st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any))
def test_proportional_sizes(size: int, weights: list[int]) -> None:
    sizes = divide_proportionally(size, tuple(weights))
    assert sum(sizes) == size
    assert all(n == 0 for n, w in zip(sizes, weights) if w == 0)
    assert all(a <= b for a, b in zip(sizes, divide_proportionally(size + 1, tuple(weights))))
    assert divide_proportionally(3 * sum(weights), tuple(weights)) == tuple(3 * w for w in weights)
    assert divide_proportionally(size, (4,) * len(weights)) == divide_evenly(size, len(weights))


def test_a_part_is_rounded_and_not_cut_off() -> None:
    """Sainte-Laguë's 7 of 53, 24 and 23; d'Hondt's method would give 4, 2 and 1."""
    assert divide_proportionally(7, (53, 24, 23)) == (3, 2, 2)


def test_with_a_halo_a_coordinate_holds_what_is_there_of_its_neighbours() -> None:
    s = shard(0, (3, 0, 3, 2), 1, (1, 2))
    assert [s.find_span(i) for i in range(4)] == [(0, 5), (3, 3), (2, 8), (5, 8)]
    assert [s.local_size(i) for i in range(4)] == [5, 0, 6, 3]
