"""The other half of the table: control flow, input, saving, hooks."""

from __future__ import annotations

import glob
import os
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from tests.tf1.programs import FEATURES, Numbers, batches, joined, linear, numbers, program, trained, weight


class Cell:
    """A recurrent cell, for versions of TensorFlow that have none."""

    output_size = state_size = 3

    def __call__(self, inputs: Any, state: Any, scope: Any = None) -> Any:
        with tf.variable_scope(scope or "cell", reuse=tf.AUTO_REUSE):
            made = tf.tanh(tf.concat([inputs, state], 1) @ weight("kernel", (inputs.shape[-1] + 3, 3)))
        return made, made

    def get_initial_state(self, inputs: Any = None, batch_size: Any = None, dtype: Any = None) -> Any:
        return tf.zeros([batch_size, 3], dtype)

    zero_state = get_initial_state


def _sequences() -> tuple[Any, Any]:
    x = tf.placeholder(tf.float64, [None, FEATURES])
    return x, tf.reshape(tf.tile(x, [1, 3]), [-1, 3, FEATURES])


def _minimized(x: Any, loss: Any) -> Numbers:
    return trained(x, [loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss)])


@program
def dynamic_rnn(folder: str) -> Numbers:
    x, sequences = _sequences()
    outputs, state = tf.nn.dynamic_rnn(Cell(), sequences, dtype=tf.float64)
    return _minimized(x, tf.reduce_mean(tf.square(outputs)) + tf.reduce_mean(state))


@program
def dynamic_rnn_with_lengths(folder: str) -> Numbers:
    x, sequences = _sequences()
    lengths = 1 + tf.cast(x[:, 0] > 0, tf.int32)
    outputs, state = tf.nn.dynamic_rnn(Cell(), sequences, lengths, dtype=tf.float64)
    return _minimized(x, tf.reduce_mean(tf.square(outputs)) + tf.reduce_mean(state))


@program
def static_rnn(folder: str) -> Numbers:
    x, sequences = _sequences()
    outputs, _ = tf.nn.static_rnn(Cell(), tf.unstack(sequences, 3, 1), tf.zeros([tf.shape(x)[0], 3], tf.float64))
    return _minimized(x, tf.reduce_mean(tf.square(tf.stack(outputs))))


@program
def two_graphs_with_loops(folder: str) -> Numbers:
    found = dynamic_rnn(folder)
    with tf.Graph().as_default():
        return [*found, *dynamic_rnn_with_lengths(folder), *tensor_array(folder)]


@program
def tensor_array(folder: str) -> Numbers:
    with tf.Graph().as_default():
        x, sequences = _sequences()
        array = tf.TensorArray(tf.float64, 3)
        w = weight("weight", (FEATURES, 3))
        _, array = tf.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, a.write(i, sequences[:, i] @ w)), [0, array])
        return _minimized(x, tf.reduce_mean(tf.square(array.stack())))


def _old(run: Any) -> Numbers:
    """Control flow of version 1 in any case, as a graph has that was built before the switch."""
    tf.disable_control_flow_v2()
    from tensorflow.python.ops import control_flow_util

    before, control_flow_util.ENABLE_CONTROL_FLOW_V2 = control_flow_util.ENABLE_CONTROL_FLOW_V2, False
    try:
        found: Numbers = run()
    finally:
        control_flow_util.ENABLE_CONTROL_FLOW_V2 = before
    return found


def _while_loop() -> Numbers:
    x = tf.placeholder(tf.float64, [None, FEATURES])
    w = weight("weight", (FEATURES, FEATURES))
    _, made = tf.while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, tf.tanh(v @ w)), [tf.constant(0), x])
    return _minimized(x, tf.reduce_mean(tf.square(made)))


def _cond() -> Numbers:
    x, loss = linear()
    step = tf.train.get_or_create_global_step()
    rate = tf.cond(step < 1, lambda: tf.constant(0.1, tf.float64), lambda: tf.constant(0.01, tf.float64))
    return trained(x, [loss, tf.train.GradientDescentOptimizer(rate).minimize(loss, step)])


@program
def while_loop(folder: str) -> Numbers:
    return _while_loop()


@program
def while_loop_of_version_1(folder: str) -> Numbers:
    return _old(_while_loop)


@program
def cond(folder: str) -> Numbers:
    return _cond()


@program
def cond_of_version_1(folder: str) -> Numbers:
    return _old(_cond)


@program
def reference_variable(folder: str) -> Numbers:
    x = tf.placeholder(tf.float64, [None, FEATURES])
    w = tf.get_variable("w", [FEATURES, 1], tf.float64, tf.ones_initializer(), use_resource=False)
    return _minimized(x, tf.reduce_mean(tf.square(x @ w)))


@program
def case_and_map_fn(folder: str) -> Numbers:
    x = tf.placeholder(tf.float64, [None, FEATURES])
    w = weight()
    rows = tf.map_fn(lambda row: tf.reduce_sum(row[:, None] * w), x)
    kind = tf.case([(tf.size(x) > 1000, lambda: tf.constant(2.0, tf.float64))], lambda: tf.constant(1.0, tf.float64))
    return _minimized(x, tf.reduce_mean(tf.square(rows)) * kind)


@program
def scan(folder: str) -> Numbers:
    x, sequences = _sequences()
    w = weight("weight", (FEATURES, FEATURES))
    made = tf.scan(lambda a, v: tf.tanh(a @ w + v), tf.transpose(sequences, [1, 0, 2]), tf.zeros_like(x))
    return _minimized(x, tf.reduce_mean(tf.square(made)))


# -- input


def _from(batch: Any, before: Any = None, count: int = 3) -> Numbers:
    """Trains on batches that a graph brings in."""
    loss = tf.reduce_mean(tf.square(batch @ weight() - 1.0))
    train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        if before is not None:
            before(session)
        coordinator = tf.train.Coordinator()
        threads = tf.train.start_queue_runners(session, coordinator)
        found = [numbers(session.run([loss, train])) for _ in range(count)]
        coordinator.request_stop()
        session.run(_closing(), options=None) if threads else None
        coordinator.join(threads, stop_grace_period_secs=5, ignore_live_threads=True)
        return [*joined(found), *numbers(session.run(tf.global_variables()))]


def _closing() -> Any:
    return [runner.cancel_op for runner in tf.get_collection(tf.GraphKeys.QUEUE_RUNNERS)]


def _dataset() -> Any:
    return tf.data.Dataset.from_tensor_slices(np.concatenate(batches())).batch(12)


@program
def one_shot_iterator(folder: str) -> Numbers:
    return _from(tf.data.make_one_shot_iterator(_dataset()).get_next())


@program
def initializable_iterator(folder: str) -> Numbers:
    iterator = tf.data.make_initializable_iterator(_dataset().shuffle(3, seed=2))
    return _from(iterator.get_next(), lambda session: session.run(iterator.initializer))


@program
def iterator_of_a_placeholder(folder: str) -> Numbers:
    data = tf.placeholder(tf.float64, [None, FEATURES])
    iterator = tf.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices(data).batch(12))
    feed = {data: np.concatenate(batches())}
    return _from(iterator.get_next(), lambda session: session.run(iterator.initializer, feed))


@program
def reinitializable_iterator(folder: str) -> Numbers:
    iterator = tf.data.Iterator.from_structure(tf.float64, [None, FEATURES])
    return _from(iterator.get_next(), lambda session: session.run(iterator.make_initializer(_dataset())))


@program
def feedable_iterator(folder: str) -> Numbers:
    handle = tf.placeholder(tf.string, [])
    own = tf.data.make_one_shot_iterator(_dataset())
    batch = tf.data.Iterator.from_string_handle(handle, tf.float64, [None, FEATURES]).get_next()
    loss = tf.reduce_mean(tf.square(batch @ weight() - 1.0))
    train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        name = session.run(own.string_handle())
        return joined(numbers(session.run([loss, train], {handle: name})) for _ in range(3))


@program
def until_the_data_ends(folder: str) -> Numbers:
    batch = tf.data.make_one_shot_iterator(_dataset()).get_next()
    total = tf.reduce_sum(batch)
    found: Numbers = []
    with tf.Session() as session:
        while True:
            try:
                found += numbers(session.run(total))
            except tf.errors.OutOfRangeError:
                return found


@program
def queue_runner(folder: str) -> Numbers:
    queue = tf.FIFOQueue(32, tf.float64, [FEATURES])
    rows = tf.constant(np.concatenate(batches()))
    tf.train.add_queue_runner(tf.train.QueueRunner(queue, [queue.enqueue_many([rows])]))
    return _from(queue.dequeue_many(12))


@program
def input_producer(folder: str) -> Numbers:
    row = tf.train.slice_input_producer([np.concatenate(batches())], shuffle=False)[0]
    return _from(tf.train.batch([row], 12))


@program
def queue_filled_by_runs(folder: str) -> Numbers:
    x = tf.placeholder(tf.float64, [None, FEATURES])
    queue = tf.FIFOQueue(64, tf.float64, [FEATURES])
    fill = queue.enqueue_many([x])
    return _from(queue.dequeue_many(12), lambda session: [session.run(fill, {x: rows}) for rows in batches()] and None)


@program
def py_func(folder: str) -> Numbers:
    x = tf.placeholder(tf.float64, [None, FEATURES])
    doubled = tf.reshape(tf.py_func(lambda v: v * 2.0, [x], tf.float64), [-1, FEATURES])
    return _minimized(x, tf.reduce_mean(tf.square(doubled @ weight())))


@program
def tables(folder: str) -> Numbers:
    x = tf.placeholder(tf.float64, [None, FEATURES])
    keys = tf.constant(["a", "b", "c"])
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, tf.constant([2, 0, 1], tf.int64)), -1)
    number = table.lookup(tf.gather(tf.constant(["a", "b", "c", "d"]), tf.cast(tf.abs(x[:, 0]), tf.int32) % 4))
    loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(weight("table", (4, 3)), tf.maximum(number, 0))))
    train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), tf.tables_initializer()])
        return joined(numbers(session.run([loss, number, train], {x: rows})) for rows in batches())


# -- saving, hooks, summaries


@program
def saver(folder: str) -> Numbers:
    x, loss = linear()
    train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
    keeper, path = tf.train.Saver(max_to_keep=2), os.path.join(folder, "model")
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for number, rows in enumerate(batches()):
            session.run(train, {x: rows})
            keeper.save(session, path, number)
    with tf.Session() as session:
        keeper.restore(session, tf.train.latest_checkpoint(folder))
        found = numbers(session.run([loss, train], {x: batches()[0]}))
        return [*found, *numbers(session.run(tf.global_variables())), len(glob.glob(f"{path}-*.index"))]


@program
def import_meta_graph(folder: str) -> Numbers:
    path = os.path.join(folder, "model")
    with tf.Graph().as_default():
        x, loss = linear()
        train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        tf.add_to_collection("all", loss)
        tf.add_to_collection("all", train)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train, {x: batches()[0]})
            tf.train.Saver().save(session, path)
    keeper = tf.train.import_meta_graph(f"{path}.meta")
    with tf.Session() as session:
        keeper.restore(session, path)
        loss, train = tf.get_collection("all")
        found = [numbers(session.run([loss, train], {"x:0": rows})) for rows in batches()]
        return [*joined(found), *numbers(session.run(tf.global_variables()))]


@program
def frozen_graph(folder: str) -> Numbers:
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float64, [None, FEATURES], "x")
        tf.identity(tf.tanh(x @ weight()), "y")
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            names = ["y"]
            frozen = tf.graph_util.convert_variables_to_constants(session, session.graph_def, names)
    (y,) = tf.import_graph_def(frozen, return_elements=["y:0"])
    with tf.Session() as session:
        return numbers(session.run(y, {"import/x:0": batches()[0]}))


@program
def init_from_checkpoint(folder: str) -> Numbers:
    path = os.path.join(folder, "model")
    with tf.Graph().as_default(), tf.Session() as session:
        made = weight("old")
        session.run(tf.global_variables_initializer())
        tf.train.Saver([made]).save(session, path)
    x, loss = linear()
    tf.train.init_from_checkpoint(path, {"old": "weight"})
    return _minimized(x, loss)


@program
def summaries(folder: str) -> Numbers:
    x, loss = linear()
    tf.summary.scalar("loss", loss)
    tf.summary.histogram("weight", tf.trainable_variables()[0])
    merged = tf.summary.merge_all()
    with tf.control_dependencies([merged]):  # else the histogram is of before or after, on one device too
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    with tf.Session() as session:
        writer = tf.summary.FileWriter(folder, session.graph)
        session.run(tf.global_variables_initializer())
        found: Numbers = []
        for number, rows in enumerate(batches()):
            text, _ = session.run([merged, train], {x: rows})
            writer.add_summary(text, number)
            if values := tf.Summary.FromString(text).value:  # the first rank's; others have none
                found += [values[0].simple_value, values[1].histo.sum]
        writer.close()
    return found


def _monitored(folder: str, **more: Any) -> Numbers:
    x, loss = linear()
    train = tf.train.AdamOptimizer(0.1).minimize(loss, tf.train.get_or_create_global_step())
    found: Numbers = []
    with tf.train.MonitoredTrainingSession(checkpoint_dir=folder, **more) as session:
        for rows in batches(6):
            if session.should_stop():
                break
            found += numbers(session.run([loss, train], {x: rows}))
    return [*found, float(str(tf.train.latest_checkpoint(folder)).rpartition("-")[2])]


@program
def monitored_session(folder: str) -> Numbers:
    return _monitored(folder, save_checkpoint_steps=2, save_summaries_steps=1, log_step_count_steps=1)


@program
def hooks(folder: str) -> Numbers:
    seen: Numbers = []

    class Seen(tf.train.SessionRunHook):  # type: ignore[misc]
        def before_run(self, run_context: Any) -> Any:
            return tf.train.SessionRunArgs(tf.train.get_global_step())

        def after_run(self, run_context: Any, run_values: Any) -> None:
            seen.append(float(run_values.results))

    extra = [tf.train.StopAtStepHook(last_step=4), tf.train.StepCounterHook(2), Seen()]
    return [*_monitored(folder, hooks=extra, save_checkpoint_secs=1000), *seen]


@program
def scaffold(folder: str) -> Numbers:
    made = tf.get_variable("ready", [], tf.float64, tf.zeros_initializer())
    given = tf.train.Scaffold(init_fn=lambda scaffold, session: session.run(made.initializer))
    return _monitored(folder, scaffold=given, save_checkpoint_steps=3)


@program
def goes_on_from_a_checkpoint(folder: str) -> Numbers:
    found = _monitored(folder, save_checkpoint_steps=2)
    with tf.Graph().as_default():
        return [*found, *_monitored(folder, save_checkpoint_steps=2)]


@program
def supervisor(folder: str) -> Numbers:
    x, loss = linear()
    train = tf.train.AdamOptimizer(0.1).minimize(loss, tf.train.get_or_create_global_step())
    with tf.train.Supervisor(logdir=folder, save_model_secs=1000).managed_session() as session:
        return joined(numbers(session.run([loss, train], {x: rows})) for rows in batches())


@program
def singular_monitored_session(folder: str) -> Numbers:
    x, loss = linear()
    train = tf.train.AdamOptimizer(0.1).minimize(loss, tf.train.get_or_create_global_step())
    with tf.train.SingularMonitoredSession(hooks=[tf.train.NanTensorHook(loss)]) as session:
        return joined(numbers(session.run([loss, train], {x: rows})) for rows in batches())


@program
def interactive_session(folder: str) -> Numbers:
    x, loss = linear()
    train = tf.train.AdamOptimizer(0.1).minimize(loss)
    session = tf.InteractiveSession()
    tf.global_variables_initializer().run()
    found: Numbers = []
    for rows in batches():
        train.run({x: rows})
        found += numbers(loss.eval({x: rows}))
    session.close()
    return found


@program
def partial_run(folder: str) -> Numbers:
    x, loss = linear()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        handle = session.partial_run_setup([loss], [x])
        return numbers(session.partial_run(handle, loss, {x: batches()[0]}))


@program
def callables(folder: str) -> Numbers:
    x, loss = linear()
    train = tf.train.AdamOptimizer(0.1).minimize(loss)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        step = session.make_callable([loss, train], [x])
        return joined(numbers(step(rows)) for rows in batches())


@program
def scatter_updates(folder: str) -> Numbers:
    x = tf.placeholder(tf.float64, [None, FEATURES])
    table = weight("table", (6, 3))
    rows = tf.cast(tf.abs(x[:, 0]) * 2, tf.int32) % 6
    return trained(x, [tf.group(tf.scatter_add(table, rows, x[:, :3])), tf.reduce_sum(x)])
