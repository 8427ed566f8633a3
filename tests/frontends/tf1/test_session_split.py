"""Variables of sessions that lie split: first values part by part, training, Savers, and what is asked for before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from tests.draws import one_of
from tests.runtime.variables.test_deferred import INPUTS, OUTPUTS, V1_NAMES, raw, v1_initializers
from whale.frontends.tf1.session import MonitoredTrainingSession
from whale.frontends.tf1.variables import SessionVariables

Start = Callable[..., None]
v1 = tf.compat.v1


class Net:
    """Two products under Adam in a graph, float64; ``u`` with an initial value that has no seed of its own."""

    def __init__(self, scope: Any = None) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            v1.set_random_seed(3)
            self.x = v1.placeholder(tf.float64, [8, 40])
            with scope() if scope else tf.name_scope("net"):
                w = v1.get_variable("w", [40, 60], tf.float64, use_resource=True)
                u = v1.get_variable("u", [60, 20], tf.float64, v1.truncated_normal_initializer(), use_resource=True)
                self.loss = tf.reduce_mean(tf.square(tf.tanh(self.x @ w) @ u - 1))
            self.train = v1.train.AdamOptimizer(0.01, epsilon=1e-3).minimize(self.loss)
            self.start = v1.global_variables_initializer()
            self.missing = v1.report_uninitialized_variables()
            self.variables = v1.global_variables()
            self.saver = v1.train.Saver(max_to_keep=None)
        self.batch = {self.x: np.random.default_rng(0).normal(size=(8, 40))}

    def story(self, session: Callable[..., Any], path: str) -> list[np.ndarray]:
        """Everything that is seen of a training with restoring, another start, and another session."""
        seen = []

        def train(count: int = 1) -> None:
            seen.extend(running.run([self.loss, self.train], self.batch)[0] for _ in range(count))

        with session(graph=self.graph) as running:
            assert len(running.run(self.missing)) == len(self.variables)
            running.run(self.start)
            assert not running.run(self.missing).size
            train(2)
            saved = self.saver.save(running, path)
            seen += running.run(self.variables)
            train()
            running.run(self.start)  # random numbers go on
            train()
            self.saver.restore(running, saved)
            train()
            seen += running.run(self.variables)
        with session(graph=self.graph) as running:
            self.saver.restore(running, saved)
            again = self.saver.save(running, path + "_again")  # before anything is known of layouts
            train()
            seen += running.run(self.variables)
        for one in (saved, again):
            with v1.Session(graph=self.graph) as running:  # plain TensorFlow reads them
                self.saver.restore(running, one)
                seen += running.run(self.variables)
        return seen


def settled(session: wh.Session) -> SessionVariables:
    return session._variables


@pytest.mark.core
@pytest.mark.parametrize("how", one_of(3, [3, "data=2,tensor=2", "tensor=2,data=2", "2x2 zero"]))
def test_a_session_trains_what_lies_split(ranks: Start, tmp_path: Path, how: int | str) -> None:
    wanted = Net().story(v1.Session, str(tmp_path / "alone"))
    if isinstance(how, int):
        ranks(3, **{"memory.zero": how, "memory.zero_min_bytes": 0})
        net = Net()
    elif how == "2x2 zero":
        ranks(4, **{"mesh": wh.Mesh(tensor=2), "memory.zero": 1, "memory.zero_min_bytes": 0})
        net = Net(wh.split)
    else:
        ranks(4, mesh=wh.Mesh.parse(how))
        net = Net(wh.split)
    found = net.story(wh.Session, str(tmp_path / "spread"))
    for value, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-10, atol=1e-12)
    assert not list(tmp_path.glob("*part-*"))


@pytest.mark.core
def test_first_values_are_parts_of_those_of_one_device(ranks: Start) -> None:
    def program() -> tuple[Any, ...]:
        with tf.Graph().as_default() as graph:
            v1.set_random_seed(11)
            made = [
                v1.get_variable(name, (INPUTS, OUTPUTS), initializer=make, use_resource=True)
                for name, make in v1_initializers().items()
            ]
            x = v1.placeholder(tf.float32, (4, INPUTS))
            loss = tf.add_n([tf.reduce_mean(tf.square(x @ v)) for v in made])
            step = v1.train.GradientDescentOptimizer(0.0).minimize(loss)
            return graph, made, x, step, v1.global_variables_initializer()

    graph, made, _, _, start = program()
    with v1.Session(graph=graph) as alone:
        alone.run(start)
        wanted = alone.run(made)
    ranks(3, **{"memory.zero": 3, "memory.zero_min_bytes": 0})
    graph, made, x, step, start = program()
    with wh.Session(graph=graph) as session:
        session.run(start)
        held = settled(session)
        assert all(
            held.find_deferred(name) is not None and held.read(name, 1, tf.float32).size == 0 for name in V1_NAMES
        )
        session.run(step, {x: np.ones((4, INPUTS))})
        for name, value in zip(V1_NAMES, wanted, strict=True):
            parts = [held.read(name, position, tf.float32) for position in range(3)]
            assert [len(part) for part in parts] == [11, 11, 11]
            assert (raw(np.concatenate(parts)) == raw(value)).all(), name


def test_what_is_asked_for_before_is_whole_and_then_cut(ranks: Start) -> None:
    net = Net()
    with v1.Session(graph=net.graph) as alone:
        alone.run(net.start)
        wanted = alone.run(net.variables)
        evaluated = alone.run(net.loss, net.batch)
        alone.run(net.train, net.batch)
        after = alone.run(net.variables)
    ranks(2, **{"memory.zero": 1, "memory.zero_min_bytes": 0})
    net = Net()
    with wh.Session(graph=net.graph) as session:
        session.run(net.start)
        for value, other in zip(session.run(net.variables), wanted, strict=True):
            assert (raw(value) == raw(other)).all()
        np.testing.assert_allclose(session.run(net.loss, net.batch), evaluated)  # here weights lie whole
        session.run(net.train, net.batch)
        assert settled(session).read("w", 1, tf.float64).shape == (20, 60)
        session.run(net.loss, net.batch)
        for value, other in zip(session.run(net.variables), after, strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-12)


def test_a_save_that_reads_more_than_it_writes(ranks: Start, tmp_path: Path) -> None:
    ranks(2, **{"memory.zero": 3, "memory.zero_min_bytes": 0})
    net = Net()
    with net.graph.as_default():
        path = tf.constant(str(tmp_path / "model"))
        w, norm = net.variables[0].read_value(), tf.norm(net.variables[1])
        save = tf.raw_ops.SaveV2(prefix=path, tensor_names=["w", "norm"], shape_and_slices=["", ""], tensors=[w, norm])
    with wh.Session(graph=net.graph) as session:
        session.run(net.start)
        session.run(save)
        value, length = session.run([w, norm])
        reader = tf.train.load_checkpoint(str(tmp_path / "model"))
        np.testing.assert_array_equal(reader.get_tensor("w"), value)
        np.testing.assert_allclose(reader.get_tensor("norm"), length)
        session.run(net.train, net.batch)
        _, u = session.run([save, net.variables[1]])  # is brought to the rank that writes
        np.testing.assert_array_equal(u, session.run(net.variables[1]))
        session.run(net.train, net.batch)


def test_a_checkpoint_without_a_variable_is_refused_as_ever(ranks: Start, tmp_path: Path) -> None:
    ranks(2, **{"memory.zero": 3, "memory.zero_min_bytes": 0})
    net = Net()
    with net.graph.as_default():
        one = v1.train.Saver(net.variables[:1])
    with wh.Session(graph=net.graph) as session:
        session.run(net.start)
        path = one.save(session, str(tmp_path / "model"))
        with pytest.raises(tf.errors.NotFoundError):
            net.saver.restore(session, path)
        one.restore(session, path)
        session.run(net.train, net.batch)


def test_a_monitored_session_saves_and_goes_on(ranks: Start, tmp_path: Path) -> None:
    def trained(session: Callable[..., Any], folder: str) -> tuple[list[float], list[np.ndarray]]:
        losses = []
        for steps in (3, 5):  # the second one begins where the first one ended
            net = Net()
            with net.graph.as_default():
                step = v1.train.get_or_create_global_step()
                with tf.control_dependencies([net.train]):
                    train = v1.assign_add(step, 1, use_locking=True)
                variables = v1.trainable_variables()
                scaffold = v1.train.Scaffold(saver=v1.train.Saver(sharded=True, max_to_keep=2))
                hooks = [v1.train.StopAtStepHook(last_step=steps)]
                with session(checkpoint_dir=folder, save_checkpoint_steps=2, scaffold=scaffold, hooks=hooks) as running:
                    while not running.should_stop():
                        losses.append(running.run([net.loss, train], net.batch)[0])
        with v1.Session(graph=net.graph) as running:
            scaffold.saver.restore(running, tf.train.latest_checkpoint(folder))
            return losses, running.run(variables)

    wanted = trained(v1.train.MonitoredTrainingSession, str(tmp_path / "alone"))
    ranks(2, **{"memory.zero": 3, "memory.zero_min_bytes": 0})
    found = trained(MonitoredTrainingSession, str(tmp_path / "spread"))
    assert len(found[0]) == 5
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-12)
    for value, other in zip(found[1], wanted[1], strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-10)


@pytest.mark.parametrize(("level", "share"), one_of(2, [(1, 1.0), (3, 1.5)], several=True))
def test_a_weight_that_is_read_for_its_norm_too_is_not_gathered_for_it(ranks: Start, level: int, share: float) -> None:
    def moved(config: dict[str, Any]) -> int:
        ranks(2, **config)
        net = Net()
        with net.graph.as_default():
            w = next(v for v in net.variables if v.op.name == "w")
            loss = net.loss + 0.1 * tf.nn.l2_loss(w)
            train = v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
            with wh.Session(graph=net.graph) as session:
                session.run(v1.global_variables_initializer())
                plan = session.plan([loss, train], net.batch)
        wh.shutdown()
        return plan.logical_bytes

    plain = moved({})
    assert plain * share * 0.9 < moved({"memory.zero": level, "memory.zero_min_bytes": 0}) <= plain * share + 64


def test_fewer_experts_than_ranks_are_read_in_a_run_of_their_own(ranks: Start) -> None:
    """Two ranks have an expert each, the others none; a run that only reads them finds them so."""
    start = np.random.default_rng(2).normal(size=(2, 12, 12))
    graph = tf.Graph()
    ranks(4)
    with graph.as_default():
        x = v1.placeholder(tf.float64, [8, 12])
        with wh.split():
            inner = v1.get_variable("inner", initializer=start, use_resource=True)
        loss = tf.reduce_mean(tf.square(tf.einsum("BM,EMH->EBH", x, inner) - 1))
        train = v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        begin = v1.global_variables_initializer()
    with wh.Session(graph=graph) as session:
        session.run(begin)
        np.testing.assert_allclose(session.run(inner), start)
        session.run(train, {x: np.ones((8, 12))})
        assert not np.allclose(session.run(inner), start)
