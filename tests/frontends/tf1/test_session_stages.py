"""Variables of sessions with stages: what runs without stages read and write, Savers, and ZeRO."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.draws import one_of
from whale.errors import ProgramError

Start = Callable[..., None]
v1 = tf.compat.v1
ZERO_1, ZERO_3 = ({"memory.zero": level, "memory.zero_min_bytes": 0} for level in (1, 3))
PIPELINE = {"mesh.auto_parallel": True, "pipeline.stages": 2}


class Net:
    """Two products, each of a stage, in float64; two optimizers, and operations that are of no stage."""

    def __init__(self, stage: Callable[[], Any] = nullcontext, parts: int = 0) -> None:
        self.graph = tf.Graph()
        cut = v1.fixed_size_partitioner(parts) if parts else None
        with self.graph.as_default(), v1.variable_scope("net", use_resource=True, partitioner=cut):
            v1.set_random_seed(3)
            self.x = v1.placeholder(tf.float64, [None, 40])
            with stage():
                w = v1.get_variable("w", [40, 60], tf.float64)
                hidden = tf.tanh(self.x @ w)
            with stage():
                self.u = v1.get_variable("u", [60, 20], tf.float64)
                self.loss = tf.reduce_mean(tf.square(hidden @ self.u - 1))
        with self.graph.as_default():
            self.train = v1.train.MomentumOptimizer(0.5, 0.9).minimize(self.loss)
            self.other = v1.train.GradientDescentOptimizer(0.3).minimize(self.loss)
            self.variables = v1.global_variables()
            self.norm = tf.linalg.global_norm(self.variables)
            self.halve = v1.assign(self.variables[0], 0.5 * self.variables[0])
            self.start = v1.global_variables_initializer()
            self.saver = v1.train.Saver(max_to_keep=None)
        self.batch = {self.x: np.random.default_rng(0).normal(size=(8, 40))}

    def trained(self, running: Any, which: str = "train") -> float:
        return float(running.run([self.loss, getattr(self, which)], self.batch)[0])

    def story(self, session: Callable[..., Any], path: str) -> list[np.ndarray]:
        """Everything that is seen of a training with other runs between its steps, and of its checkpoints."""
        seen: list[Any] = []
        with session(graph=self.graph) as running:
            running.run(self.start)
            seen += [self.trained(running), running.run(self.norm), self.trained(running)]
            seen += [self.trained(running, "other"), running.run(self.loss, self.batch), self.trained(running)]
            running.run(self.halve)
            saved = self.saver.save(running, path)
            seen += [self.trained(running), *running.run(self.variables)]
            self.saver.restore(running, saved)
            again = self.saver.save(running, path + "_again")
            seen += [running.run(self.loss, self.batch), self.trained(running), *running.run(self.variables)]
        for one in (saved, again):
            with v1.Session(graph=self.graph) as running:  # plain TensorFlow reads them
                self.saver.restore(running, one)
                seen += running.run(self.variables)
        return seen


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[np.ndarray]:
    return Net().story(v1.Session, str(tmp_path_factory.mktemp("alone") / "model"))


@pytest.mark.parametrize("how", one_of(3, [{}, ZERO_1, ZERO_3]), ids=["plain", "zero 1", "zero 3"])
def test_runs_between_the_steps_of_a_pipeline(
    ranks: Start, wanted: list[np.ndarray], tmp_path: Path, how: dict[str, Any]
) -> None:
    ranks(4, **how)
    found = Net(wh.stage).story(wh.Session, str(tmp_path / "spread"))
    for value, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-10, atol=1e-12)


def test_a_rank_holds_its_part_of_its_own_stage(ranks: Start) -> None:
    ranks(4, **ZERO_1)
    net = Net(wh.stage)
    with wh.Session(graph=net.graph) as session:
        session.run(net.start)

        def elements(name: str) -> list[int]:
            return [session._variables.read(f"net/{name}", rank, tf.float64).size for rank in range(4)]

        for _ in range(2):
            net.trained(session)
            assert sorted(elements("w")) == sorted(elements("w/Momentum")) == [0, 0, 1200, 1200]
            assert sorted(elements("u/Momentum")) == [0, 0, 600, 600]
            session.run(net.norm)
            assert elements("w") == [2400] * 4


def test_what_auto_parallel_chooses_is_sharded(ranks: Start, wanted: list[np.ndarray], tmp_path: Path) -> None:
    ranks(4, **PIPELINE, **ZERO_1)
    found = Net().story(wh.Session, str(tmp_path / "spread"))
    for value, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-10, atol=1e-12)


def test_slices_of_partitioned_variables_are_saved_whole(ranks: Start, tmp_path: Path) -> None:
    values = []
    for session in (v1.Session, wh.Session):
        net = Net(parts=2)
        if session is wh.Session:
            ranks(2, **ZERO_3)
        with session(graph=net.graph) as running:
            running.run(net.start)
            net.trained(running)
            path = net.saver.save(running, str(tmp_path / session.__module__))
        values.append([tf.train.load_variable(path, name) for name in ("net/w", "net/u", "net/u/Momentum")])
    for value, other in zip(*values):
        np.testing.assert_allclose(value, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("how", one_of(2, [ZERO_1, {}]), ids=["zero 1", "whole"])
def test_a_value_that_is_loaded_is_the_variables(ranks: Start, how: dict[str, Any]) -> None:
    ranks(2, **how)
    net = Net()
    with wh.Session(graph=net.graph) as session:
        session.run(net.start)
        for _ in range(2):
            net.u.load(np.full(net.u.shape, 0.1), session)
            np.testing.assert_array_equal(session.run(net.u), np.full(net.u.shape, 0.1))
            net.trained(session)


@pytest.mark.parametrize("how", [{}, ZERO_1], ids=["whole", "zero 1"])
def test_a_run_that_trains_and_saves_trains_on_every_rank(ranks: Start, tmp_path: Path, how: dict[str, Any]) -> None:
    """What is saved waits for the training; it ran on the first rank alone once, as what saves does."""

    def trained(session: Callable[..., Any], path: str) -> list[Any]:
        net = Net()
        names = [v.op.name for v in net.variables]
        with net.graph.as_default(), tf.control_dependencies([net.train]):
            values = [v.read_value() for v in net.variables]
            save = tf.raw_ops.SaveV2(
                prefix=tf.constant(path), tensor_names=names, shape_and_slices=[""] * len(names), tensors=values
            )
        with net.graph.as_default(), tf.control_dependencies([save]):
            late = v1.assign(net.variables[0], 0 * net.variables[0])
        with session(graph=net.graph) as running:
            running.run(net.start)
            losses = [running.run([net.loss, save], net.batch)[0], net.trained(running)]
            if session is wh.Session:
                with pytest.raises(ProgramError, match=r"save in one Session\.run"):
                    running.run(late, net.batch)
        reader = tf.train.load_checkpoint(path)
        return losses + [reader.get_tensor(name) for name in names]

    wanted = trained(v1.Session, str(tmp_path / "alone"))
    ranks(2, **how)
    for value, other in zip(trained(wh.Session, str(tmp_path / "spread")), wanted, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-10)
