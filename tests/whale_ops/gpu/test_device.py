"""Exchanges in a device's memory, with the host's memory as device (host_device.cc): everything but CUDA itself."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework.kernels import get_registered_kernels_for_op

import whale_ops
from tests.whale_ops.gpu.host_device import build_host_device
from tests.whale_ops.gpu.opened import Opened, device_of, opened_ranks
from tests.whale_ops.harness import each, ranks
from whale.errors import CommError
from whale.ir.ops import ON_DEVICE
from whale_ops import build


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_host_device(tmp_path_factory.mktemp("device"))


@pytest.fixture
def opened(library: Path) -> Iterator[Callable[..., Opened]]:
    """Opens `size` ranks; `fault` as in host_device.cc. They are closed at the end."""
    with ExitStack() as stack:

        def open_ranks(size: int, fault: str = "", buffer_bytes: int = 1 << 20) -> Opened:
            return stack.enter_context(opened_ranks(size, device_of(library, fault, 0, buffer_bytes)))

        yield open_ranks


SHAPES = [(2, 3), (), (0,), (31, 7), (5,)]


@pytest.mark.parametrize(
    ("dtype", "wire", "reduction", "value"),
    [
        ("float64", "", "sum", 6.0),
        ("float32", "float16", "sum", 6.0),
        ("float32", "bfloat16", "max", 3.0),
        ("bfloat16", "", "prod", 6.0),
        ("float16", "", "min", 1.0),
    ],
)
def test_tensors_become_those_of_all_ranks(
    opened: Callable[..., Opened], dtype: str, wire: str, reduction: str, value: float
) -> None:
    ranks_3 = opened(3, buffer_bytes=64)  # most tensors travel in parts

    def body(rank: int) -> list[tf.Tensor]:
        tensors = [tf.fill(shape, tf.cast(rank + 1, dtype)) for shape in SHAPES]
        return ranks_3.reduce(rank, tensors, "x", reduction=reduction, wire_dtype=wire)

    for result in ranks_3.together(body):
        for tensor, shape in zip(result, SHAPES):
            np.testing.assert_array_equal(tensor.astype(np.float64), np.full(shape, value))
    assert [t.dtype for t in result] == [tf.as_dtype(dtype).as_numpy_dtype] * len(SHAPES)


GROUP = [2, 0, 3]  # of four ranks; rank 1 is in none
SHARES = [3, 0, 2]


def parts_of(dim: int) -> list[np.ndarray]:
    """What the ranks of GROUP have of a tensor that is cut along ``dim``, by their place in it."""
    whole = np.arange(5.0 * 4 * 5).reshape(5, 4, 5)
    return np.split(whole, np.cumsum(SHARES)[:-1], axis=dim)


@pytest.mark.parametrize("dtype", ["float64", "int32", "bool"])
@pytest.mark.parametrize("dim", [0, 2])
def test_groups_gather_and_exchange_uneven_parts(opened: Callable[..., Opened], dim: int, dtype: str) -> None:
    four, parts = opened(4), [part.astype(dtype) for part in parts_of(dim)]
    whole, halves = np.concatenate(parts, dim), [1, 2, 1]

    def body(rank: int) -> list[tf.Tensor]:
        if rank not in GROUP:
            return []
        mine = tf.constant(parts[GROUP.index(rank)])
        attrs = {"split_axis": 1, "split_sizes": halves, "concat_axis": dim, "concat_sizes": SHARES}
        return [
            four.exchange("all_gather", rank, mine, ranks=GROUP, axis=dim, sizes=SHARES),
            four.exchange("all_to_all", rank, mine, key="y", ranks=GROUP, **attrs),
        ]

    for rank, got in enumerate(four.together(body)):
        if rank in GROUP:
            np.testing.assert_array_equal(got[0], whole)
            place = GROUP.index(rank)
            np.testing.assert_array_equal(got[1], np.split(whole, np.cumsum(halves)[:-1], axis=1)[place])


@pytest.mark.parametrize("dim", [0, 2])
def test_groups_share_out_sums_and_hear_one_rank(opened: Callable[..., Opened], dim: int) -> None:
    four, parts = opened(4), parts_of(dim)
    whole = np.concatenate(parts, dim)
    shapes = [tf.TensorShape(part.shape) for part in parts[::2]]

    def body(rank: int) -> list[tf.Tensor]:
        if rank not in GROUP:
            return []
        place = GROUP.index(rank)
        sums = four.exchange(
            "reduce_scatter", rank, tf.constant(whole * (place + 1)), ranks=GROUP, axis=dim, sizes=SHARES
        )
        told = [tf.constant(part) for part in parts[::2]] if place == 1 else [tf.zeros((), tf.float64)] * 2
        return [sums, *four.exchange("broadcast", rank, told, key="y", ranks=GROUP, root=1, shapes=shapes)]

    for rank, got in enumerate(four.together(body)):
        if rank in GROUP:
            np.testing.assert_array_equal(got[0], parts[GROUP.index(rank)] * 6)
            for tensor, part in zip(got[1:], parts[::2]):
                np.testing.assert_array_equal(tensor, part)


def test_tensors_go_from_rank_to_rank_with_their_shapes(opened: Callable[..., Opened]) -> None:
    three = opened(3)

    def body(rank: int) -> list[tf.Tensor]:
        sent = tf.fill((rank + 1, 2), float(rank))
        three.exchange("send", rank, sent, peer=(rank + 1) % 3)
        return [three.exchange("recv", rank, peer=(rank - 1) % 3, T=tf.float32, shape=[None, 2])]

    for rank, (got,) in enumerate(three.together(body)):
        source = (rank - 1) % 3
        np.testing.assert_array_equal(got, np.full((source + 1, 2), source))


def test_a_tensor_of_another_shape_than_is_expected_is_refused(opened: Callable[..., Opened]) -> None:
    pair = opened(2)

    def body(rank: int) -> list[tf.Tensor]:
        if rank == 0:
            with tf.control_dependencies([pair.exchange("send", rank, tf.zeros((2, 3)), peer=1)]):
                return [tf.zeros(())]
        return [pair.exchange("recv", rank, peer=0, T=tf.float32, shape=[3, 2])]

    for error in pair.each(body):
        assert isinstance(error, tf.errors.OpError) and "sends shape [2,3], expected [3,2]" in error.message


def test_an_input_that_is_read_again_stays_as_it_is(opened: Callable[..., Opened]) -> None:
    pair = opened(2)

    def body(rank: int) -> list[tf.Tensor]:
        x = tf.fill((4,), float(rank + 1)) * 2.0
        return [*pair.reduce(rank, [x], "x"), x]

    for rank, (total, own) in enumerate(pair.together(body)):
        assert total.tolist() == [6.0] * 4
        assert own.tolist() == [2.0 * (rank + 1)] * 4


@pytest.mark.parametrize("size", [1, 4])
def test_orders_of_their_own_become_one(opened: Callable[..., Opened], size: int) -> None:
    """Every rank is ready in another order, steps overlap, and some operations wait for others on one rank only.

    The device refuses what the ranks launch in different orders: all have different sizes.
    """
    opened_ranks = opened(size)
    count, steps = 20, 3

    def of_rank(rank: int) -> Callable[[], list[tf.Tensor]]:
        draw = np.random.default_rng(rank)

        @tf.function
        def step() -> list[tf.Tensor]:
            found: dict[int, tf.Tensor] = {}
            for i in draw.permutation(count // 2) * 2:
                x = tf.fill((i + 1,), 1.0)
                for _ in range(draw.integers(0, 4)):  # ready later
                    noise = tf.random.normal((60, 60))
                    x += 0.0 * tf.reduce_sum(noise @ noise)
                (found[i],) = opened_ranks.reduce(rank, [x], f"op {i}")
                wait = [found[i]] if (rank + i // 2) % 3 == 0 else []
                with tf.control_dependencies(wait):
                    (found[i + 1],) = opened_ranks.reduce(rank, [tf.fill((i + 2,), 2.0)], f"op {i + 1}")
            return [found[i] for i in range(count)]

        return step

    calls = [of_rank(rank) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(lambda call: [call() for _ in range(steps)], calls))
    for step in itertools.chain(*results):
        for i, tensor in enumerate(step):
            np.testing.assert_array_equal(tensor, np.full(i + 1, size * (1.0 + i % 2)))


@pytest.mark.parametrize(
    "tensors",
    [(tf.zeros(4), tf.zeros(5)), (tf.zeros(4), tf.zeros(4, tf.float64)), (tf.zeros((2, 2)), tf.zeros((4, 1)))],
    ids=["length", "dtype", "shape"],
)
def test_ranks_that_disagree_hear_it(opened: Callable[..., Opened], tensors: Sequence[tf.Tensor]) -> None:
    three = opened(3)
    errors = three.each(lambda rank: three.reduce(rank, [tensors[rank // 2]], "gradient"))
    for error in errors:
        assert isinstance(error, tf.errors.OpError)
        assert "gradient" in error.message
        shown = [f"{t.shape.as_list()}".replace(" ", "") for t in tensors]
        assert any(text in error.message for text in (*shown, "double")), error.message


@pytest.mark.parametrize("fault", ["mark", "launch", "finish"])
def test_an_error_of_one_device_is_an_error_of_all_ranks(opened: Callable[..., Opened], fault: str) -> None:
    three = opened(3, fault)
    errors = three.each(lambda rank: three.reduce(rank, [tf.zeros(4)], "x"))
    said = {"mark": "no mark can be made", "launch": "nothing can be launched", "finish": "fallen off the bus"}[fault]
    if fault == "finish":  # the others' devices may have done it before
        errors = [*errors[1:2], *three.each(lambda rank: three.reduce(rank, [tf.zeros(4)], "y"))]
    for error in errors:
        assert isinstance(error, tf.errors.OpError) and said in error.message


def test_a_device_that_hangs_is_given_up_when_another_rank_fails(opened: Callable[..., Opened]) -> None:
    three = opened(3, "hang")

    def body(rank: int) -> list[tf.Tensor]:
        if rank == 2:
            time.sleep(0.05)
        return three.reduce(rank, [tf.zeros(4)], "x")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(three.each, body)
        time.sleep(0.1)
        three.comms[2].abort("rank 2 has had enough")
        for error in waiting.result():
            assert isinstance(error, tf.errors.OpError) and "had enough" in error.message


def test_a_rank_that_leaves_or_is_lost_wakes_the_others(opened: Callable[..., Opened]) -> None:
    for leaves in (True, False):
        three = opened(3)

        def body(rank: int, three: Opened = three) -> list[tf.Tensor]:
            return three.reduce(rank, [tf.zeros(4)], "x") if rank != 2 else [tf.zeros(())]

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(three.each, body)
            time.sleep(0.05)
            three.comms[2].close_device()
            if leaves:
                three.comms[2].leave()
            for comm in three.comms[: 0 if leaves else 2]:
                comm.lose(2, "was killed")
            for error in waiting.result()[:2]:
                assert isinstance(error, tf.errors.OpError) and "rank 2" in error.message


def test_a_device_that_one_rank_cannot_open_is_open_on_none(library: Path) -> None:
    with ranks(2) as comms:
        for error in each(comms, lambda c: c.open_device(library, "open", 0, 64)):
            assert isinstance(error, CommError) and "no such device" in str(error)


def test_tensors_elsewhere_and_devices_that_are_closed_are_refused(opened: Callable[..., Opened]) -> None:
    pair = opened(2, "elsewhere")
    for error in pair.each(lambda rank: pair.reduce(rank, [tf.zeros(4)], "x")):
        assert "lie on a CPU" in error.message and "remove tf.device" in error.message
    for comm in pair.comms:
        comm.close_device()
    for error in pair.each(lambda rank: pair.reduce(rank, [tf.zeros(4)], "x")):
        assert "has opened no device" in error.message


def test_a_library_of_other_sources_is_refused(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert whale_ops.count_devices(library) == 1
    monkeypatch.setattr(build, "compute_core_digest", lambda: "of other sources")
    with pytest.raises(CommError, match="built from other sources"):
        whale_ops.count_devices(library)
    with pytest.raises(CommError, match="could not be loaded"):
        whale_ops.count_devices(library.with_name("none.so"))


def test_the_ops_have_kernels_for_gpus_and_their_inputs_shapes() -> None:
    ops = whale_ops.load_ops()
    for op in (*ON_DEVICE.values(), "WhaleCall", "WhaleHold"):
        kernels = get_registered_kernels_for_op(op).kernel
        assert sorted(k.device_type for k in kernels) == ["CPU", "GPU"], op
    with tf.Graph().as_default():
        inputs = [tf.compat.v1.placeholder(tf.float32, shape) for shape in [(3, None), None, ()]]
        with tf.device("/device:GPU:0"):
            outputs = ops.whale_device_all_reduce(inputs, communicator="c", rank=1, key="k")
    assert [str(o.shape) for o in outputs] == [str(i.shape) for i in inputs]
    assert outputs[0].op.device == "/device:GPU:0"
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError, TypeError)):
        ops.whale_device_all_reduce([tf.zeros(3, tf.int32)], communicator="c", rank=0, key="k")
