"""Scripts of TensorFlow 1 as they are: after ``wh.init`` their sessions are spread, after ``wh.shutdown`` no more."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.client import session as session_module

import whale as wh
from tests.draws import one_of
from whale.frontends.tf1.session import InteractiveSession
from whale.ir.layout import Shard
from whale.runtime.context import find_running

v1 = tf.compat.v1
Start = Callable[..., None]


def regression(learning_rate: float = 0.1) -> tuple[tf.Tensor, tf.Tensor, Any]:
    """(x, loss, train_op) of a graph that is being built."""
    x = v1.placeholder(tf.float64, [None, 3], "x")
    weight = v1.get_variable("weight", [3, 1], tf.float64, v1.constant_initializer(0.5))
    loss = tf.reduce_mean(tf.square(tf.matmul(x, weight) - 1.0))
    step = v1.train.get_or_create_global_step()
    return x, loss, v1.train.MomentumOptimizer(learning_rate, 0.9).minimize(loss, step)


def batches(count: int = 3) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.normal(size=(6, 3)) for _ in range(count)]


def trained(make: Callable[[], Any], first: bool = True) -> list[float]:
    with tf.Graph().as_default():
        x, loss, train = regression()
        with make() as session:
            if first:
                session.run(v1.global_variables_initializer())
            return [float(session.run([loss, train], {x: rows})[0]) for rows in batches()]


@pytest.mark.core
def test_sessions_are_spread_while_a_run_goes_on(ranks: Start) -> None:
    plain = trained(v1.Session)
    ranks(2)
    assert trained(v1.Session) == pytest.approx(plain, rel=1e-12)
    context = find_running()
    assert context is not None
    assert context.programs == 2
    assert trained(session_module.Session) == pytest.approx(plain, rel=1e-12)
    assert trained(lambda: v1.train.MonitoredTrainingSession(), first=False) == pytest.approx(plain, rel=1e-12)
    assert trained(lambda: v1.train.MonitoredTrainingSession("", False), first=False) == pytest.approx(plain, rel=1e-12)
    assert trained(lambda: v1.train.SingularMonitoredSession(), first=False) == pytest.approx(plain, rel=1e-12)
    assert isinstance(v1.Session(graph=tf.Graph()), wh.Session)
    interactive = v1.InteractiveSession(graph=tf.Graph())
    assert isinstance(interactive, InteractiveSession)
    interactive.close()
    assert context.programs > 5
    wh.shutdown()
    assert type(v1.Session(graph=tf.Graph())) is session_module.Session
    assert trained(v1.Session) == plain
    ranks(2)
    assert isinstance(v1.Session(graph=tf.Graph()), wh.Session)


def test_a_script_that_names_whales_session_itself(ranks: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trained(v1.Session)
    ranks(2)
    monkeypatch.setattr(v1, "Session", wh.Session)
    assert trained(v1.Session) == pytest.approx(plain, rel=1e-12)


def test_what_is_not_spread_is_left_alone(ranks: Start) -> None:
    wh.init(solo=True)
    assert type(v1.Session(graph=tf.Graph())) is session_module.Session
    wh.shutdown()
    wh.init()
    assert type(v1.Session(graph=tf.Graph())) is session_module.Session
    assert isinstance(wh.Session(graph=tf.Graph()), wh.Session)


def test_a_supervisor_acts_between_runs(ranks: Start, tmp_path: Path) -> None:
    def run(folder: str) -> list[float]:
        with tf.Graph().as_default():
            x, loss, train = regression()
            supervisor = v1.train.Supervisor(is_chief=False, logdir=str(tmp_path / folder), save_model_secs=1000)
            with supervisor.managed_session() as session:
                return [float(session.run([loss, train], {x: rows})[0]) for rows in batches()]

    plain = trained(v1.Session)
    ranks(2)
    assert run("whale") == pytest.approx(plain, rel=1e-12)
    assert v1.train.latest_checkpoint(str(tmp_path / "whale")) == str(tmp_path / "whale" / "model.ckpt-0")
    # The threads of a supervisor ended with it.
    context = find_running()
    assert context is not None
    trained(v1.Session)
    assert context.hooks.between_runs == []


def test_sync_replicas_is_the_optimizer_that_it_wraps(ranks: Start, capfd: pytest.CaptureFixture[str]) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[float]:
        with tf.Graph().as_default():
            x = v1.placeholder(tf.float64, [None, 3], "x")
            weight = v1.get_variable("weight", [3, 1], tf.float64, v1.constant_initializer(0.5))
            loss = tf.reduce_mean(tf.square(tf.matmul(x, weight) - 1.0))
            optimizer = wrap(v1.train.MomentumOptimizer(0.1, 0.9))
            train = optimizer.minimize(loss, v1.train.get_or_create_global_step())
            sync = isinstance(optimizer, v1.train.SyncReplicasOptimizer)
            hooks = [optimizer.make_session_run_hook(True)] if sync else []
            with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
                return [float(session.run([loss, train], {x: rows})[0]) for rows in batches()]

    ranks(2)
    plain = run(lambda optimizer: optimizer)
    assert run(lambda optimizer: v1.train.SyncReplicasOptimizer(optimizer, 2)) == plain
    assert "SyncReplicasOptimizer is replaced by the optimizer that it wraps" in capfd.readouterr().err
    with pytest.raises(wh.ProgramError, match="must aggregate one batch of each replica"):
        run(lambda optimizer: v1.train.SyncReplicasOptimizer(optimizer, 4, total_num_replicas=2))


def test_variables_and_loops_that_can_be_distributed_are_turned_on(
    ranks: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    v1.disable_resource_variables()
    try:
        ranks(2)
        assert v1.resource_variables_enabled()
        assert capfd.readouterr().err.count("turned on resource variables for graphs") == 1
        v1.disable_resource_variables()  # as disable_v2_behavior does
        assert v1.resource_variables_enabled()
        wh.shutdown()
        assert not v1.resource_variables_enabled()
    finally:
        v1.enable_resource_variables()


def test_a_variable_fetched_beside_its_update_is_read_after_it(ranks: Start) -> None:
    def run() -> list[tuple[float, ...]]:
        with tf.Graph().as_default():
            x, _, train = regression()
            step = v1.train.get_or_create_global_step()
            (weight,) = v1.trainable_variables()
            average = v1.train.ExponentialMovingAverage(0.9, step)
            with tf.control_dependencies([train]):
                both = average.apply([weight])
            fetched = [both, step, weight, average.average(weight)]
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                results = [session.run(fetched, {x: rows}) for rows in batches()]
                return [(float(s), float(w[0, 0]), float(a[0, 0])) for _, s, w, a in results]

    v1.disable_resource_variables()  # a reference is read when the run ends
    v1.disable_control_flow_v2()
    try:
        plain = run()
    finally:
        v1.enable_resource_variables()
        v1.enable_control_flow_v2()
    assert [step for step, _, _ in plain] == [1, 2, 3]
    ranks(2)
    np.testing.assert_allclose(run(), plain, rtol=1e-12)


@pytest.mark.parametrize(
    "optimizer", one_of(2, [v1.train.AdamOptimizer, lambda rate: v1.train.MomentumOptimizer(rate, 0.9)])
)
@pytest.mark.parametrize("outside", [True, False])
def test_updates_built_inside_an_open_replica_go_where_the_split_variable_lies(
    ranks: Start, optimizer: Callable[[float], Any], outside: bool
) -> None:
    def run(replica: Callable[[], Any], split: Callable[[], Any]) -> tuple[list[float], Any]:
        def weight() -> Any:
            return v1.get_variable("weight", [4, 6], tf.float64, v1.constant_initializer(0.3))

        with tf.Graph().as_default():
            x, y = v1.placeholder(tf.float64, [None, 4]), v1.placeholder(tf.int64, [None])
            made = weight() if outside else None
            with replica():
                first = v1.get_variable("first", [4, 4], tf.float64, v1.constant_initializer(0.2))
                hidden = tf.tanh(x @ first)
                with split():
                    logits = hidden @ (weight() if made is None else made) * np.arange(6.0)
                    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
                train = optimizer(0.1).minimize(tf.reduce_mean(losses))
            generator = np.random.default_rng(0)
            feeds = [{x: generator.normal(size=(8, 4)), y: generator.integers(6, size=8)} for _ in range(3)]
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                found = [float(session.run([losses, train], feed)[0].mean()) for feed in feeds]
                plan = session.plan(train, feeds[0]) if isinstance(session, wh.Session) else None
                return found, plan

    plain, _ = run(contextlib.nullcontext, contextlib.nullcontext)
    ranks(2)
    found, plan = run(wh.replica, wh.split)
    np.testing.assert_allclose(found, plain, rtol=1e-10)
    assert isinstance(plan.variables["weight"], Shard)


SCRIPT = """
import sys, numpy as np, tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
import whale as wh
wh.init()
x = tf.placeholder(tf.float64, [None, 3])
weight = tf.get_variable("weight", [3, 1], tf.float64, tf.constant_initializer(0.5))
loss = tf.reduce_mean(tf.square(tf.matmul(x, weight) - 1.0))
tf.summary.scalar("loss", loss)
step = tf.train.get_or_create_global_step()
train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, step)
rng = np.random.default_rng(0)
with tf.train.MonitoredTrainingSession(
    is_chief=wh.rank() == 0, checkpoint_dir=sys.argv[1], save_checkpoint_steps=1, save_summaries_steps=1
) as session:
    losses = [float(session.run([loss, train], {x: rng.normal(size=(6, 3))})[0]) for _ in range(7)]
print("losses", losses[:3])
print("latest", tf.train.latest_checkpoint(sys.argv[1])[-6:])
wh.shutdown()
wh.init()
print("again", wh.size())
"""


@pytest.mark.core
def test_one_rank_writes_what_a_script_saves(launcher: Any, tmp_path: Path) -> None:
    plain = trained(v1.Session)
    done = launcher.run("-np", "2", launcher.script(SCRIPT), str(tmp_path / "model"))
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    found = [line.partition("losses ")[2] for line in done.stdout.splitlines() if "losses" in line]
    assert len(found) == 2
    for text in found:
        assert np.allclose(json.loads(text), plain, rtol=1e-12, atol=0)
    assert done.stdout.count("latest ckpt-7") == 2
    assert done.stdout.count("again 2") == 2
    assert len(list((tmp_path / "model").glob("events.out.tfevents.*"))) == 1
    assert len(list((tmp_path / "model").glob("model.ckpt-*.index"))) == 5  # the oldest were deleted, once
