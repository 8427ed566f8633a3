"""Sessions whose variables lie in the host's memory; a second device of the processor stands for an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.draws import one_of
from whale.errors import ConfigError
from whale.runtime.compile.offload import count_offloaded_bytes
from whale.runtime.context import require_current

Start = Callable[..., None]
v1 = tf.compat.v1
STEPS = 3
TWO_DEVICES = v1.ConfigProto(device_count={"CPU": 2})


class Net:
    """Two products in float64."""

    def __init__(self, scope: Callable[[], Any] = lambda: tf.name_scope("model")) -> None:
        draw = np.random.default_rng(3).standard_normal
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.x, self.y = v1.placeholder(tf.float64, [None, 12]), v1.placeholder(tf.float64, [None, 4])
            first, second = (
                v1.get_variable(name, initializer=0.3 * draw(shape), use_resource=True)
                for name, shape in (("first", (12, 24)), ("second", (24, 4)))
            )
            with scope():
                h = tf.tanh(self.x @ first)
            with scope():
                self.loss = tf.reduce_mean(tf.square(h @ second - self.y))
            step = v1.train.get_or_create_global_step()
            self.train = v1.train.AdamOptimizer(0.01).minimize(self.loss, step)
            self.start, self.variables = v1.global_variables_initializer(), v1.global_variables()
            self.saver = v1.train.Saver()

    def trained(self, session: Any, path: str) -> list[np.ndarray]:
        """Losses, what a checkpoint has that is written before the first step and read again, and all variables."""
        draw = np.random.default_rng(0).standard_normal
        batch = {self.x: draw((8, 12)), self.y: draw((8, 4))}
        session.run(self.start)
        found = [session.run(self.loss, batch)]
        self.saver.save(session, path)
        found += [session.run([self.loss, self.train], batch)[0] for _ in range(STEPS)]
        found += session.run(self.variables)
        self.saver.save(session, f"{path}_trained")
        self.saver.restore(session, path)
        found.append(session.run(self.loss, batch))
        self.saver.restore(session, f"{path}_trained")
        return [*found, session.run(self.loss, batch), *session.run(self.variables)]


@pytest.mark.parametrize(
    ("how", "level"),
    one_of(3, [("replica", "parameters"), ("zero", "optimizer"), ("stages", "optimizer")], several=True),
)
def test_state_lies_in_the_hosts_memory(ranks: Start, tmp_path: Path, how: str, level: str) -> None:
    plain = Net()
    with v1.Session(graph=plain.graph) as session:
        expected = plain.trained(session, str(tmp_path / "plain"))
    more = {"zero": {"memory.zero": 1, "memory.zero_min_bytes": 0}, "stages": {"pipeline.micro_batches": 2}}.get(
        how, {}
    )
    ranks(2, **{"memory.offload": level, **more})
    net = Net(wh.stage) if how == "stages" else Net()
    with wh.Session(graph=net.graph, config=TWO_DEVICES) as session:
        found = net.trained(session, str(tmp_path / "spread"))
        before, metadata = count_offloaded_bytes(), v1.RunMetadata()
        batch = {net.x: np.zeros((16, 12)), net.y: np.zeros((16, 4))}
        session.run(net.train, batch, v1.RunOptions(output_partition_graphs=True), metadata)
        copied = tuple(now - then for now, then in zip(count_offloaded_bytes(), before))
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, 1e-12, 1e-12)
    assert copied == require_current().reports.offloaded["session"] and min(copied) > 0
    where: dict[str, set[str]] = {}
    for graph in metadata.partition_graphs:
        for node in graph.node:
            where.setdefault(node.op, set()).add(node.device.rpartition("/")[2])
    # Stages compute in functions, of micro-batches.
    computing = where["WhaleCall" if how == "stages" else "MatMul"]
    assert where["ResourceApplyAdam"] == {"device:CPU:0"} and computing == {"device:CPU:1"}, where


def test_a_session_without_another_device_is_refused(ranks: Start) -> None:
    ranks(2, **{"memory.offload": "optimizer"})
    net = Net()
    with pytest.raises(ConfigError, match="device is the host"):
        wh.Session(graph=net.graph)
