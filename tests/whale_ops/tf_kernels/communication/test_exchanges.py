"""The TensorFlow ops, all ranks in one graph: values, shapes, running side by side, errors, cancellation."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

import whale_ops
from tests.whale_ops import harness
from tests.whale_ops.harness import ranks
from whale.errors import CommError

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def ops():
    return whale_ops.load_ops()


def handles(ops, communicators):
    return [ops.whale_communicator(communicator=c.name, rank=c.rank) for c in communicators]


def together(communicators, ops, body):
    """body(handle, rank) of every rank inside one tf.function, as numpy."""

    @tf.function
    def step():
        return [body(handle, rank) for rank, handle in enumerate(handles(ops, communicators))]

    return tf.nest.map_structure(lambda t: t.numpy(), step())


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "int8", "uint64", "bool", "complex64"])
@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (300, 1000)])
def test_all_reduce(ops, dtype: str, shape: tuple[int, ...]) -> None:
    kind = tf.as_dtype(dtype)
    with ranks(3) as communicators:
        results = together(
            communicators,
            ops,
            lambda h, r: ops.whale_all_reduce(h, [tf.cast(tf.fill(shape, r + 1), kind)], key="x")[0],
        )
    for result in results:
        assert result.dtype == kind.as_numpy_dtype
        np.testing.assert_array_equal(result, np.full(shape, 6 if kind != tf.bool else True, kind.as_numpy_dtype))


@pytest.mark.parametrize("reduction, expected", [("sum", 7), ("prod", 8), ("min", 1), ("max", 4)])
def test_a_group_of_tensors_is_reduced_as_one_message(ops, reduction: str, expected: int) -> None:
    shapes = [(2, 3), (), (0,), (100, 1000)]
    with ranks(3) as communicators:
        for _ in range(3):
            results = together(
                communicators,
                ops,
                lambda h, r: ops.whale_all_reduce(
                    h, [tf.fill(s, 2.0**r) for s in shapes], key="g", reduction=reduction
                ),
            )
            for result in results:
                for value, shape in zip(result, shapes):
                    np.testing.assert_array_equal(value, np.full(shape, expected, np.float32))
        assert {(c.key, c.kind) for c in communicators[0].counters()} == {("g", "AllReduce")}


@pytest.mark.parametrize(
    "algorithm", ["direct", "pairwise", "ring", "halving-doubling", "tree", "hierarchical", "leader"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_element_of_a_group_comes_back_to_its_place(ops, algorithm: str, dtype: str) -> None:
    """Tensors that fill a message, share one or lie in two; half of them are read again afterwards."""
    counts = [3, 0, 70_000, 1, 200_000, 5, 66_000, 2]
    with ranks(4, hosts=(2, 2)) as communicators:
        for communicator in communicators:
            communicator.set_algorithm(algorithm)

        def body(handle, rank: int):
            given = [tf.cast(tf.range(n) % 31 + n % 7 + rank, dtype) for n in counts]
            return given[::2], ops.whale_all_reduce(handle, given, key="g")

        results = together(communicators, ops, body)
    for rank, (kept, reduced) in enumerate(results):
        for n, value in zip(counts[::2], kept):
            np.testing.assert_array_equal(value.astype(int), np.arange(n) % 31 + n % 7 + rank)
        for n, value in zip(counts, reduced):
            np.testing.assert_array_equal(value.astype(int), 4 * (np.arange(n) % 31 + n % 7) + 6)


def test_an_input_that_is_still_used_is_not_overwritten(ops) -> None:
    def body(handle, rank):
        x = tf.constant(normal(1000)) * (rank + 1)
        return x, ops.whale_all_reduce(handle, [x], key="x")[0], x + 0

    with ranks(2) as communicators:
        for rank, (x, total, again) in enumerate(together(communicators, ops, body)):
            np.testing.assert_array_equal(x, normal(1000) * (rank + 1))
            np.testing.assert_array_equal(again, x)
            np.testing.assert_allclose(total, normal(1000) * 3, rtol=1e-6)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("known", [True, False])
def test_all_gather(ops, axis: int, known: bool) -> None:
    sizes = [2, 0, 5]
    whole = normal(*[7 if d == axis else 3 for d in range(3)])
    parts = np.split(whole, np.cumsum(sizes)[:-1], axis)
    attributes = {"sizes": sizes} if known else {}
    with ranks(3) as communicators:
        for result in together(
            communicators, ops, lambda h, r: ops.whale_all_gather(h, [parts[r]], key="x", axis=axis, **attributes)[0]
        ):
            np.testing.assert_array_equal(result, whole)


@pytest.mark.parametrize("axis", [0, 1])
def test_several_tensors_are_gathered_as_one_message(ops, axis: int) -> None:
    sizes = [2, 0, 5]
    wholes = [normal(*[7 if d == axis else n for d in range(2)]) for n in (3, 1, 0, 40_000)]
    parts = [np.split(whole, np.cumsum(sizes)[:-1], axis) for whole in wholes]
    with ranks(3) as communicators:
        for _ in range(2):
            results = together(
                communicators,
                ops,
                lambda h, r: ops.whale_all_gather(h, [p[r] for p in parts], key="g", axis=axis, sizes=sizes),
            )
            for result in results:
                for value, whole in zip(result, wholes):
                    np.testing.assert_array_equal(value, whole)
        (counter,) = communicators[0].counters()
        assert (counter.kind, counter.calls) == ("AllGather", 2)
        assert counter.logical_bytes == 2 * sum(w.nbytes for w in wholes) // 7 * 2 * 2


@pytest.mark.parametrize("axis", [0, 1])
def test_reduce_scatter(ops, axis: int) -> None:
    sizes = [1, 4, 0]
    x = normal(*[5 if d == axis else 6 for d in range(2)])
    parts = np.split(x * 6, np.cumsum(sizes)[:-1], axis)
    with ranks(3) as communicators:
        results = together(
            communicators, ops, lambda h, r: ops.whale_reduce_scatter(h, x * (r + 1), key="x", axis=axis, sizes=sizes)
        )
    for result, part in zip(results, parts):
        assert result.shape == part.shape
        np.testing.assert_allclose(result, part, rtol=1e-6)


@pytest.mark.parametrize("split_axis, concat_axis", [(0, 1), (1, 0), (2, 1), (0, 2)])
def test_all_to_all(ops, split_axis: int, concat_axis: int) -> None:
    split_sizes, concat_sizes = [3, 1, 2], [0, 4, 1]
    dims = [2, 2, 2]
    dims[split_axis], dims[concat_axis] = 6, 5
    whole = np.arange(np.prod(dims)).reshape(dims).astype(np.int16)
    before = np.split(whole, np.cumsum(concat_sizes)[:-1], concat_axis)
    after = np.split(whole, np.cumsum(split_sizes)[:-1], split_axis)
    with ranks(3) as communicators:
        results = together(
            communicators,
            ops,
            lambda h, r: ops.whale_all_to_all(
                h,
                before[r],
                key="x",
                split_axis=split_axis,
                split_sizes=split_sizes,
                concat_axis=concat_axis,
                concat_sizes=concat_sizes,
            ),
        )
    for result, part in zip(results, after):
        np.testing.assert_array_equal(result, part)


@pytest.mark.parametrize("shapes", [[], [(2, 3), ()], [(None, 3), ()]])
def test_broadcast(ops, shapes: list) -> None:
    values = [normal(2, 3), np.float32(7)]

    def body(handle, rank):
        inputs = values if rank == 2 else [np.zeros((0,), np.float32)] * 2
        return ops.whale_broadcast(handle, [tf.constant(v) for v in inputs], key="x", root=2, shapes=shapes)

    with ranks(3) as communicators:
        for result in together(communicators, ops, body):
            np.testing.assert_array_equal(result[0], values[0])
            np.testing.assert_array_equal(result[1], values[1])


@pytest.mark.parametrize("shape", [None, (None, 3), (2, 3), (20_000, 3)])
def test_send_and_receive(ops, shape) -> None:
    x = normal(20_000 if shape == (20_000, 3) else 2, 3)

    def body(handle, rank):
        if rank == 1:
            with tf.control_dependencies([ops.whale_send(handle, x, key="x", peer=2)]):
                return tf.constant(0.0)
        return tf.constant(0.0) if rank == 0 else ops.whale_recv(handle, key="x", peer=1, T=tf.float32, shape=shape)

    with ranks(3) as communicators:
        np.testing.assert_array_equal(together(communicators, ops, body)[2], x)


def test_receiving_another_shape_than_expected_is_an_error(ops) -> None:
    @tf.function
    def step(name):
        for rank in range(2):
            handle = ops.whale_communicator(communicator=name, rank=rank)
            if rank == 0:
                ops.whale_send(handle, tf.zeros((2, 3)), key="x", peer=1)
            else:
                out = ops.whale_recv(handle, key="x", peer=0, T=tf.float32, shape=(3, 2))
        return out

    with (
        ranks(2) as communicators,
        pytest.raises(tf.errors.InvalidArgumentError, match=r"sends shape \[2,3\], expected \[3,2\]"),
    ):
        step(communicators[0].name)


def test_barrier_and_check_in_a_subgroup(ops) -> None:
    def body(handle, rank):
        if rank == 1:
            return tf.constant(1)
        made = [
            ops.whale_barrier(handle, key="b", ranks=[0, 2]),
            ops.whale_check(handle, key="c", fingerprint="abc", what="train_step", ranks=[0, 2]),
        ]
        with tf.control_dependencies(made):
            return tf.constant(1)

    with ranks(3) as communicators:
        assert [int(x) for x in together(communicators, ops, body)] == [1, 1, 1]
        # One message each way: between hosts each further one is as long as the link.
        found = {c.key: c.calls for c in communicators[0].counters()}
        assert found == {"b": 1, "c": 1}


def test_check_names_the_ranks_and_what_each_runs(ops) -> None:
    def body(handle, rank):
        what = "fit" if rank == 1 else "evaluate"
        with tf.control_dependencies([ops.whale_check(handle, key="c", fingerprint=what[:2], what=what)]):
            return tf.constant(1)

    with ranks(3) as communicators, pytest.raises(tf.errors.InvalidArgumentError) as caught:
        together(communicators, ops, body)
    assert "ranks 0 and 2: evaluate" in str(caught.value) and "rank 1: fit" in str(caught.value)


def test_a_disagreement_fails_the_step_on_every_rank(ops) -> None:
    outcomes = []

    def run(handle_name, rank):
        @tf.function
        def step():
            handle = ops.whale_communicator(communicator=handle_name, rank=rank)
            return ops.whale_all_reduce(handle, [tf.zeros((3, 2 + rank))], key="grad")

        try:
            step()
        except tf.errors.OpError as error:
            outcomes.append(str(error))

    with ranks(2) as communicators:
        threads = [threading.Thread(target=run, args=(c.name, c.rank)) for c in communicators]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(harness.TIMEOUT_S)
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert "'grad'" in outcome and "[3,2]" in outcome and "[3,3]" in outcome


WAITS = 32
LATENCY_S = 0.5


def many(ops, name: str):
    """32 all-reduces of two ranks that depend on nothing; the same key twice would be merged by nobody either."""
    outputs = []
    for rank in range(2):
        handle = ops.whale_communicator(communicator=name, rank=rank)
        for i in range(WAITS):
            outputs += ops.whale_all_reduce(handle, [tf.ones(2)], key=f"op{i}")
        ops.whale_barrier(handle, key="unused")  # no output: must run all the same
        ops.whale_all_reduce(handle, [tf.ones(2)], key="dropped")  # an output that nobody reads
    return outputs


def assert_side_by_side(communicators, run, trace) -> None:
    """All of the ops are under way at once; on a quiet machine that takes little longer than one of them."""
    run()  # tracing and first-time costs
    before = {c.key: c.calls for c in communicators[0].counters()}
    for communicator in communicators:
        communicator.set_link(LATENCY_S, 0)
    for _ in range(3):
        with open(trace, "wb") as file:
            communicators[0].trace_start(file.fileno())
            run()
            communicators[0].trace_stop()
        reduces = sum(c.kind == "AllReduce" for c in communicators[0].counters())
        assert reduces >= WAITS
        harness.assert_side_by_side(trace, reduces, LATENCY_S)
    after = {c.key: c.calls for c in communicators[0].counters()}
    assert {key: after[key] - before[key] for key in after} == dict.fromkeys(before, 3)


def test_ops_run_side_by_side_in_a_function(ops, tmp_path) -> None:
    with ranks(2) as communicators:
        step = tf.function(lambda: many(ops, communicators[0].name))
        assert_side_by_side(communicators, step, tmp_path / "trace")
        assert "dropped" in {c.key for c in communicators[0].counters()}
        for output in step():
            np.testing.assert_array_equal(output, [2, 2])


@pytest.mark.parametrize("imported", [False, True])
def test_ops_run_side_by_side_in_a_session(ops, imported: bool, tmp_path) -> None:
    with ranks(2) as communicators:
        with tf.Graph().as_default() as graph:
            outputs = many(ops, communicators[0].name)
        names = [x.name for x in outputs] + [op.name for op in graph.get_operations() if "Barrier" in op.type]
        if imported:
            definition = graph.as_graph_def()
            with tf.Graph().as_default() as graph:
                tf.import_graph_def(definition, name="")
        with tf.compat.v1.Session(graph=graph) as session:
            assert_side_by_side(communicators, lambda: session.run(names), tmp_path / "trace")


def test_a_cancelled_step_ends_and_aborts(ops) -> None:
    def fail_later() -> np.float32:
        time.sleep(0.3)  # the all-reduce is under way by then
        raise ValueError("bad data")

    with ranks(2) as communicators:

        @tf.function
        def step():
            handle = ops.whale_communicator(communicator=communicators[0].name, rank=0)
            return ops.whale_all_reduce(handle, [tf.ones(2)], key="lonely"), tf.numpy_function(
                fail_later, [], tf.float32
            )

        with pytest.raises(tf.errors.OpError, match=r"bad data|cancelled"):
            step()  # or it would wait for ever
        with pytest.raises(CommError, match="'lonely' was cancelled on rank 0"):
            communicators[1].allgather_bytes("k", b"", harness.TIMEOUT_S)


def test_an_unknown_communicator_says_what_to_call(ops) -> None:
    with pytest.raises(tf.errors.UnavailableError, match=r"no communicator 'absent' .*wh.init"):
        ops.whale_communicator(communicator="absent", rank=0)


def test_what_communicates_is_distributed_communication(ops) -> None:
    """TensorFlow makes a lost rank's error in other ops an internal one, and takes the mark of exchanges away."""
    names = [*whale_ops.COMMUNICATING_OPS, "WhaleCommunicator", "WhaleCall"]
    assert [name for name in names if not op_def_registry.get(name).is_distributed_communication] == []


@pytest.mark.parametrize("end", ["abort", "leave"])
@pytest.mark.parametrize("where", ["eager", "function", "loop", "branch", "session"])
def test_an_error_of_an_exchange_is_marked(ops, where: str, end: str) -> None:
    with ranks(2) as communicators:

        def reduced():
            handle = ops.whale_communicator(communicator=communicators[0].name, rank=0)
            return ops.whale_all_reduce(handle, [tf.ones(2)], key="x")[0]

        def looped():
            return tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, x + reduced()), (0, tf.zeros(2)))

        def chosen():
            return tf.cond(tf.random.uniform([]) < 2, reduced, lambda: tf.zeros(2))

        with tf.Graph().as_default() as graph:
            fetched = reduced()
        run = {
            "eager": reduced,
            "function": tf.function(reduced),
            "loop": tf.function(looped),
            "branch": tf.function(chosen),
            "session": lambda: tf.compat.v1.Session(graph=graph).run(fetched),
        }[where]
        communicators[1].abort("the disk is full") if end == "abort" else communicators[1].leave(1.0)
        with pytest.raises(tf.errors.OpError, match="the disk is full" if end == "abort" else "has left") as caught:
            run()
    # A session raises it anew, without its mark.
    error = caught.value.__context__ if where == "session" else caught.value
    assert whale_ops.EXCHANGE_PAYLOAD in error.experimental_payloads


def test_an_error_before_an_exchange_is_not_marked(ops) -> None:
    with ranks(2) as communicators:
        handle = ops.whale_communicator(communicator=communicators[0].name, rank=0)
        with pytest.raises(tf.errors.InvalidArgumentError, match="is not one of the ranks") as caught:
            ops.whale_all_reduce(handle, [tf.ones(2)], key="x", ranks=[1])
    assert not caught.value.experimental_payloads


def test_eager_calls_work(ops) -> None:
    with ranks(1) as communicators:
        handle = ops.whale_communicator(communicator=communicators[0].name)
        np.testing.assert_array_equal(ops.whale_all_reduce(handle, [tf.ones(3)], key="x")[0], [1, 1, 1])


SHAPES = {
    "all_gather of several": (
        lambda o, h, x: o.whale_all_gather(h, [x(1, 5), x(1, None)], key="k", sizes=[1, 3])[1],
        (4, None),
    ),
    "all_reduce": (lambda o, h, x: o.whale_all_reduce(h, [x(2, None)], key="k")[0], (2, None)),
    "all_gather": (lambda o, h, x: o.whale_all_gather(h, [x(2, None)], key="k", axis=1, sizes=[1, 3])[0], (2, 4)),
    "all_gather of unknown sizes": (lambda o, h, x: o.whale_all_gather(h, [x(2, 5)], key="k", axis=1)[0], (2, None)),
    "reduce_scatter": (lambda o, h, x: o.whale_reduce_scatter(h, x(4, 3), key="k", sizes=[2, 2]), (2, 3)),
    "uneven reduce_scatter": (lambda o, h, x: o.whale_reduce_scatter(h, x(4, 3), key="k", sizes=[3, 1]), (None, 3)),
    "all_to_all": (
        lambda o, h, x: o.whale_all_to_all(
            h, x(4, 3), key="k", split_axis=0, split_sizes=[2, 2], concat_axis=1, concat_sizes=[3, 4]
        ),
        (2, 7),
    ),
    "broadcast": (lambda o, h, x: o.whale_broadcast(h, [x(0)], key="k", shapes=[(3, None)])[0], (3, None)),
    "recv": (lambda o, h, x: o.whale_recv(h, key="k", peer=1, T=tf.int8, shape=(3, 1)), (3, 1)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_static_shapes(ops, name: str) -> None:
    build, expected = SHAPES[name]
    with tf.Graph().as_default():
        handle = ops.whale_communicator(communicator="any")
        result = build(ops, handle, lambda *shape: tf.compat.v1.placeholder(tf.float32, shape))
    assert tuple(result.shape) == expected


WRONG = {
    "axis": (lambda o, h, x: o.whale_all_gather(h, [x(2)], key="k", axis=1), "axis is 1"),
    "sum of sizes": (lambda o, h, x: o.whale_reduce_scatter(h, x(4), key="k", sizes=[1, 2]), "add up to 3"),
    "own size": (lambda o, h, x: o.whale_all_gather(h, [x(4)], key="k", sizes=[1, 2]), "none of sizes"),
    "same axes": (
        lambda o, h, x: o.whale_all_to_all(
            h, x(4, 4), key="k", split_axis=0, split_sizes=[4], concat_axis=0, concat_sizes=[4]
        ),
        "two different dimensions",
    ),
    "shapes": (lambda o, h, x: o.whale_broadcast(h, [x(4), x(4)], key="k", shapes=[(4,)]), "one shape per input"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_shapes_are_refused_when_the_graph_is_built(ops, name: str) -> None:
    build, message = WRONG[name]
    with tf.Graph().as_default():
        handle = ops.whale_communicator(communicator="any")
        with pytest.raises(ValueError, match=message):
            build(ops, handle, lambda *shape: tf.compat.v1.placeholder(tf.float32, shape))


def test_strings_cannot_be_sent(ops) -> None:
    with ranks(1) as communicators, pytest.raises(tf.errors.InvalidArgumentError, match="no fixed element size"):
        handle = ops.whale_communicator(communicator=communicators[0].name)
        ops.whale_all_gather(handle, [tf.constant(["a"])], key="k")
