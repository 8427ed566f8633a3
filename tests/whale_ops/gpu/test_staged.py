"""Exchanges of devices through the host's memory in pieces: results, and counters beside what is promised.

The device is the host's memory, whose copies a thread carries out later (late_copies.h); some ranks have none.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.whale_ops.gpu.host_device import build_host_device
from tests.whale_ops.gpu.opened import Opened, device_of, opened_ranks
from tests.whale_ops.harness import each, ranks, read_trace
from whale.errors import CommError
from whale_ops import Communicator

PIECES = 4  # that are under way at a time (core/device/staged.h)
SIZE = 3
FAILS, HANGS, CANNOT_PIN, SLOW = 1, 2, 3, 4  # ordinals of devices that do so


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_host_device(tmp_path_factory.mktemp("device"))


def mixed(library: Path, buffer_bytes: int, ordinal: int = 0) -> Callable[[Communicator], None]:
    """Opens a device for all but the second rank."""
    return lambda comm: comm.open_device("" if comm.rank == 1 else library, "pinned", ordinal, buffer_bytes)


def counted(comm: Communicator, begin: str) -> dict[str, tuple[int, int]]:
    """(calls, logical bytes) of every key that begins so."""
    return {c.key: (c.calls, c.logical_bytes) for c in comm.counters() if c.key.startswith(begin)}


@pytest.mark.parametrize("hosts", [(), (2, 1)], ids=["one host", "two hosts"])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 512, 1000], ids=lambda n: f"{n} elements")
def test_pieces_and_bytes_are_those_that_are_promised(library: Path, count: int, hosts: tuple[int, ...]) -> None:
    """Pieces of 64 float64; lengths that are multiples of that, and others."""
    piece_bytes = 512
    values = [np.random.default_rng(rank).standard_normal(count) for rank in range(SIZE)]
    with opened_ranks(SIZE, mixed(library, PIECES * piece_bytes), hosts) as three:
        results = three.together(lambda rank: three.reduce(rank, [tf.constant(values[rank])], "x"))
        for (total,) in results:
            np.testing.assert_allclose(total, sum(values), rtol=1e-14, atol=1e-15)
        pieces = math.ceil(8 * count / piece_bytes)
        logical = 0
        for comm in three.comms:
            ((calls, of_rank),) = counted(comm, "device/staged/").values()
            assert calls == pieces
            logical += of_rank
            assert counted(comm, "device/copied") == {
                "device/copied in": (pieces, 8 * count),
                "device/copied out": (pieces, 8 * count),
            }
        assert logical == 2 * (SIZE - 1) * 8 * count  # as of an all-reduce that is not cut


def test_every_kind_moves_what_it_should(library: Path) -> None:
    """Uneven parts along an inner dimension, tensors that travel together, shapes that are told, 16 bits on the way."""
    shares, halves, piece_bytes = [3, 0, 2], [1, 2, 1], 96  # four float64 of each rank
    whole = np.arange(5.0 * 4 * 5).reshape(5, 4, 5)
    parts = np.split(whole, np.cumsum(shares)[:-1], axis=2)
    told = [tf.TensorShape((2, 5)), tf.TensorShape((31,))]

    def body(rank: int) -> list[tf.Tensor]:
        mine = tf.constant(parts[rank])
        attrs = {"split_axis": 1, "split_sizes": halves, "concat_axis": 2, "concat_sizes": shares}
        send = three.exchange("send", rank, tf.fill((rank + 9, 2), float(rank)), key="s", peer=(rank + 1) % SIZE)
        with tf.control_dependencies([send]):
            heard = [tf.fill(shape, 7.0 if rank == 2 else 0.0) for shape in told]
        return [
            three.exchange("all_gather", rank, mine, key="g", axis=2, sizes=shares),
            three.exchange("all_to_all", rank, mine, key="a", **attrs),
            three.exchange("reduce_scatter", rank, tf.constant(whole * (rank + 1)), key="r", axis=2, sizes=shares),
            *three.exchange("broadcast", rank, heard, key="b", root=2, shapes=told),
            three.exchange("recv", rank, key="s", peer=(rank - 1) % SIZE, T=tf.float32, shape=[None, 2]),
            *three.reduce(rank, [tf.fill((40,), float(rank + 1))] * 2, "n", wire_dtype="bfloat16", reduction="max"),
        ]

    with opened_ranks(SIZE, mixed(library, PIECES * piece_bytes)) as three:
        results = three.together(body)
        calls = {key: number for key, (number, _) in counted(three.comms[0], "device/staged/").items()}
        narrow = sum(counted(comm, "device/staged/n")["device/staged/n"][1] for comm in three.comms)
        out = counted(three.comms[0], "device/copied out")["device/copied out"][1]
    for rank, got in enumerate(results):
        np.testing.assert_array_equal(got[0], whole)
        np.testing.assert_array_equal(got[1], np.split(whole, np.cumsum(halves)[:-1], axis=1)[rank])
        np.testing.assert_array_equal(got[2], parts[rank] * 6)
        assert all((heard == 7.0).all() for heard in got[3:5])
        source = (rank - 1) % SIZE
        np.testing.assert_array_equal(got[5], np.full((source + 9, 2), source, np.float32))
        assert all((total == 3.0).all() for total in got[6:])
    # The longest part of a rank: 5 x 4 x 3 of 60 elements, 5 x 2 x 3 of the exchange, 4 at a time; tensors in a row.
    assert calls == {
        "device/staged/g": 15,
        "device/staged/a": 8,
        "device/staged/r": 15,
        "device/staged/b": 2,
        "device/staged/s/0to1": 1,
        "device/staged/s/2to0": 1,
        "device/staged/n": 4,
    }
    assert narrow == 2 * (SIZE - 1) * 2 * 80  # bfloat16 on the way
    assert out == 8 * (60 + 60 + 100) + 4 * (18 + 80)


def test_copies_overlap_the_network(library: Path, tmp_path: Path) -> None:
    """While a piece travels others are copied: shorter than one after the other, and to be seen in the trace."""
    pieces, link_s = 12, 8e-3
    trace = tmp_path / "trace"
    descriptor = os.open(trace, os.O_WRONLY | os.O_CREAT)

    def slow(comm: Communicator) -> None:
        comm.set_link(link_s, 0)
        comm.open_device(library, "pinned", SLOW, PIECES * 512)

    with opened_ranks(2, slow) as pair:
        pair.comms[0].trace_start(descriptor)
        pair.together(lambda rank: pair.reduce(rank, [tf.ones((64 * pieces,), tf.float64)], "x"))
        pair.comms[0].trace_stop()
        (out,) = (c for c in pair.comms[0].counters() if c.key == "device/copied out")
    os.close(descriptor)
    events = [event for event in read_trace(trace) if "dur" in event and event["cat"] != "waiting"]
    travels = [e for e in events if e["args"]["key"] == "device/staged/x"]
    copies = [e for e in events if e["args"]["key"].startswith("device/copied")]
    assert len(travels) == out.calls == pieces and len(copies) == 2 * pieces

    def under_way(one: dict, other: dict) -> bool:
        return one["ts"] < other["ts"] + other["dur"] and other["ts"] < one["ts"] + one["dur"]

    beside = sum(any(under_way(copy, travel) for travel in travels) for copy in copies)
    assert beside >= pieces, f"only {beside} of {len(copies)} copies beside what travels"
    most = max(sum(t["ts"] <= at < t["ts"] + t["dur"] for t in travels) for at in [t["ts"] for t in travels])
    assert 2 <= most <= PIECES, "several pieces travel at a time, and no more than have a place"


@pytest.mark.parametrize("ordinal", [FAILS, HANGS], ids=["fails", "hangs"])
def test_a_device_that_fails_is_an_error_on_all_ranks_within_a_second(library: Path, ordinal: int) -> None:
    def one_of_them(comm: Communicator) -> None:
        device_of(library, "pinned", ordinal if comm.rank == 2 else 0, PIECES * 64)(comm)

    with opened_ranks(SIZE, one_of_them) as three:
        ended_s: list[float] = []

        def body(rank: int) -> list[tf.Tensor]:
            return three.reduce(rank, [tf.ones((100,), tf.float64)], "x")

        if ordinal == HANGS:
            threading.Timer(0.2, three.comms[2].abort, ["rank 2 has had enough"]).start()
        start_s = time.perf_counter()
        for error in three.each(body):
            said = "fallen off the bus" if ordinal == FAILS else "had enough"
            assert isinstance(error, tf.errors.OpError) and said in error.message
            ended_s.append(time.perf_counter() - start_s)
        assert max(ended_s) < 1.2


def test_memory_that_cannot_be_pinned_is_refused(library: Path) -> None:
    with ranks(2) as comms:
        errors = each(comms, device_of(library, "pinned", CANNOT_PIN, 64))
        assert all(isinstance(error, CommError) and "can be pinned" in str(error) for error in errors)


def test_a_rank_without_a_device_takes_part_in_no_other_way(library: Path) -> None:
    with ranks(2) as comms:
        errors = each(comms, device_of("", "nccl", 0, 64))
        assert all(isinstance(error, CommError) and "by 'pinned' only" in str(error) for error in errors)


def test_devices_with_pieces_of_other_sizes_hear_it(library: Path) -> None:
    def open_rank(comm: Communicator) -> None:
        comm.open_device(library, "pinned", 0, 1024 * (comm.rank + 1))

    with opened_ranks(2, open_rank) as pair:
        assert isinstance(pair, Opened)
        for error in pair.each(lambda rank: pair.reduce(rank, [tf.zeros(400)], "x")):
            assert isinstance(error, tf.errors.OpError) and "in pieces of" in error.message
