"""What capturing and normalising a large step does, by which it takes no more time than a user would notice.

The seconds are what `python -m benchmarks.start` prints.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import CodeType, FrameType

import numpy as np
import pytest
import tensorflow as tf

from whale.capture import attrs
from whale.capture.function import capture_function
from whale.capture.graph import read_graph
from whale.passes.normalize.folding.fold import fold
from whale.passes.normalize.inline import inline

# Calls of Python functions for each node, of all functions together: 21 when this was written.
_MOST_CALLS = 30
_MOST_DECODED = 0.1  # attributes for each node: they are read where they lie; 0.016 when this was written


@pytest.mark.long
def test_resnet50_is_captured_inlined_and_folded_in_few_calls_for_each_node() -> None:
    model = tf.keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10)
    optimizer = tf.keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    criterion = tf.keras.losses.SparseCategoricalCrossentropy()

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = criterion(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    captured = capture_function(step, [np.zeros((8, 64, 64, 3), np.float32), np.zeros(8, np.int32)])
    graph = captured.function.graph
    variables = [
        (graph.get_tensor_by_name(f"{v.node}:0"), v.name, v.type.dtype, v.type.shape)
        for v in captured.program.variables
    ]
    calls: Counter[CodeType] = Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls[frame.f_code] += 1

    sys.setprofile(count)
    try:
        program = read_graph(
            graph,
            name="step",
            inputs=graph.inputs,
            variables=variables,
            outputs=graph.outputs,
            effects=graph.control_outputs,
        )
        functions = len(program.functions)
        program = fold(inline(program))
    finally:
        sys.setprofile(None)
    nodes = len(program.nodes)
    assert nodes > 9000
    assert calls.total() <= _MOST_CALLS * nodes, calls.most_common(10)
    assert calls[attrs.decode.__code__] <= _MOST_DECODED * nodes
    # TensorFlow writes the whole graph at each call: once for the step, once for each function that updates variables.
    assert calls[tf.Graph.as_graph_def.__code__] == 1 + functions
