"""Captures of v1 graphs: the part that is fetched, any tensor fed, shapes inferred for what is fed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

from tests.capture.roundtrip import NORMALISED, ProgramSession
from whale.capture.v1 import GraphCapture, capture_graph
from whale.errors import CaptureError
from whale.ir.program import Program
from whale.passes.normalize.folding.fold import fold
from whale.passes.normalize.inline import inline

pytestmark = pytest.mark.core
v1 = tf.compat.v1


@pytest.fixture
def graph() -> Iterator[tf.Graph]:
    with tf.Graph().as_default() as made:
        yield made


def _dense() -> tuple[tf.Tensor, tf.Tensor, tf.Operation]:
    x = v1.placeholder(tf.float32, [None, 3], "x")
    with v1.variable_scope("dense"):
        kernel = v1.get_variable("kernel", [3, 2], initializer=v1.ones_initializer(), use_resource=True)
    hidden = tf.nn.relu(tf.matmul(x, kernel), name="hidden")
    loss = tf.reduce_mean(hidden * tf.cast(tf.shape(hidden)[0], tf.float32), name="loss")
    return x, loss, v1.train.GradientDescentOptimizer(0.1).minimize(loss)


def _loose(program: Program) -> list[str]:
    graphs = [program, *program.functions.values()]
    return [n.name for g in graphs for n in g.nodes for t in n.outputs if not t.is_static and t.dtype != "variant"]


def test_shapes_are_those_that_are_fed(graph: tf.Graph) -> None:
    x, loss, train = _dense()
    captured = capture_graph(graph, [loss, train], {x: (4, 3)})
    program = fold(inline(captured.program))
    assert captured.fed == ("x:0",)
    assert captured.inputs == ("x",)
    assert program.by_name["hidden"].outputs[0].shape == (4, 2)
    assert not _loose(program)
    assert [(v.name, v.type.shape, v.node) for v in program.variables] == [("dense/kernel", (3, 2), "dense/kernel")]
    assert captured.variables[0].variable in v1.global_variables()
    assert program.effects == (train.name,)


def test_only_what_is_fetched(graph: tf.Graph) -> None:
    x, loss, _ = _dense()
    program = capture_graph(graph, [loss], {x: (4, 3)}).program
    assert "ResourceApplyGradientDescent" not in {n.op for n in program.nodes}


def test_values_through_a_session_with_intermediate_feeds(graph: tf.Graph) -> None:
    x, loss, train = _dense()
    initialise = v1.global_variables_initializer()
    hidden = graph.get_tensor_by_name("hidden:0")
    value = np.arange(12, dtype=np.float32).reshape(4, 3)
    with v1.Session(graph=graph) as real:
        real.run(initialise)
        expected = [
            real.run([loss, train], {x: value})[0],
            real.run(loss, {x: value}),
            real.run([loss, hidden], {hidden: value[:, :2]}),
        ]
    session = ProgramSession(graph, NORMALISED)
    session.run(initialise)
    found = [
        session.run([loss, train], {x: value})[0],
        session.run(loss, {x: value}),
        session.run([loss, hidden], {hidden: value[:, :2]}),
    ]
    session.close()
    for a, b in zip(tf.nest.flatten(expected), tf.nest.flatten(found), strict=True):
        np.testing.assert_array_equal(a, b)


def test_one_output_of_several_is_fed(graph: tf.Graph) -> None:
    x = v1.placeholder(tf.float32, [2, 4], "x")
    a, b = tf.split(x, 2, axis=1)
    total = a + 10 * b
    session = ProgramSession(graph)
    result = session.run(total, {x: np.ones((2, 4)), b: np.full((2, 2), 3.0)})
    session.close()
    assert result.tolist() == [[31.0, 31.0], [31.0, 31.0]]


def test_feeds_that_nothing_reads_are_left_out(graph: tf.Graph) -> None:
    x, loss, _ = _dense()
    other = v1.placeholder(tf.float32, [None], "other")
    captured = capture_graph(graph, [loss], {other: (3,), x: (4, 3)})
    assert captured.fed == ("x:0",)


def test_placeholder_with_default_may_be_fed_or_not(graph: tf.Graph) -> None:
    keep = v1.placeholder_with_default(tf.constant(0.5), [], "keep")
    double = keep * 2
    session = ProgramSession(graph)
    assert session.run(double) == 1.0
    assert session.run(double, {keep: 4.0}) == 8.0
    session.close()


def test_second_fetch_set_reuses_the_first(graph: tf.Graph) -> None:
    x, loss, train = _dense()
    capture = GraphCapture(graph)
    capture.capture([loss, train], {x: (4, 3)})
    assert len(capture._typed) == 1
    capture.capture([loss], {x: (4, 3)})
    assert len(capture._typed) == 1
    capture.capture([loss], {x: (5, 3)})
    assert len(capture._typed) == 2


def test_a_graph_that_grew_is_read_again(graph: tf.Graph) -> None:
    x, loss, _ = _dense()
    capture = GraphCapture(graph)
    capture.capture([loss], {x: (4, 3)})
    square = loss * loss
    program = capture.capture([square], {x: (4, 3)}).program
    assert program.by_name[program.outputs[0].node].op == "Mul"


def test_missing_and_misfitting_feeds_are_named(graph: tf.Graph) -> None:
    x, loss, _ = _dense()
    with pytest.raises(CaptureError, match="has no value") as missing:
        capture_graph(graph, [loss], {})
    assert missing.value.facts["op"] == "x"
    with pytest.raises(CaptureError, match="does not fit") as misfit:
        capture_graph(graph, [loss], {x: (4, 5)})
    assert misfit.value.facts["op"] == "x:0"


def test_reference_variables_are_refused(graph: tf.Graph) -> None:
    kernel = v1.get_variable("kernel", [2], use_resource=False)
    with pytest.raises(CaptureError, match="reference variable") as error:
        capture_graph(graph, [kernel + 1.0], {})
    assert error.value.facts["op"] == "kernel"
    assert "enable_resource_variables" in error.value.action


def test_only_tensors_and_operations_are_fetched(graph: tf.Graph) -> None:
    x, loss, _ = _dense()
    with pytest.raises(CaptureError, match="neither a tensor nor an operation"):
        capture_graph(graph, [[loss]], {x: (4, 3)})


def test_frames_are_refused(graph: tf.Graph) -> None:
    before = tf.compat.v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    try:
        (result,) = tf.nest.flatten(tf.while_loop(lambda i: i < 3, lambda i: i + 1, [tf.constant(0)]))
    finally:
        if before:
            v1.enable_control_flow_v2()
    with pytest.raises(CaptureError, match="control flow of version 1") as error:
        capture_graph(graph, [result], {})
    assert "enable_control_flow_v2" in error.value.action


def test_loops_take_the_sizes_that_are_fed(graph: tf.Graph) -> None:
    x = v1.placeholder(tf.float32, [None, 5], "x")
    kernel = v1.get_variable("kernel", [5, 5], initializer=v1.ones_initializer(), use_resource=True)
    state = tf.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, tf.tanh(tf.matmul(s, kernel) + x)), [0, x * 2])[1]
    gradient = tf.gradients(tf.reduce_sum(state), kernel)[0]
    captured = capture_graph(graph, [state, gradient], {x: (4, 5)})
    program = fold(inline(captured.program))
    assert program.find_type(captured.program.outputs[0]).shape == (4, 5)
    assert not _loose(program)
    assert not {n.op for body in program.functions.values() for n in body.nodes} & {"BroadcastGradientArgs", "Shape"}
    value = np.linspace(-1, 1, 20, dtype=np.float32).reshape(4, 5)
    initialise = v1.global_variables_initializer()
    with v1.Session(graph=graph) as real:
        real.run(initialise)
        expected = real.run([state, gradient], {x: value})
    session = ProgramSession(graph, NORMALISED)
    session.run(initialise)
    found = session.run([state, gradient], {x: value})
    session.close()
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_loop_whose_state_grows_stays_loose(graph: tf.Graph) -> None:
    x = v1.placeholder(tf.float32, [None, 2], "x")
    invariant = [tf.TensorShape([None, 2])]
    grown = tf.while_loop(lambda s: tf.shape(s)[0] < 9, lambda s: tf.concat([s, s], 0), [x], invariant)
    (grown,) = tf.nest.flatten(grown)
    captured = capture_graph(graph, [grown], {x: (3, 2)})
    assert captured.program.find_type(captured.program.outputs[0]).shape == (None, 2)
    session = ProgramSession(graph, NORMALISED)
    assert session.run(grown, {x: np.ones((3, 2))}).shape == (12, 2)
    session.close()
