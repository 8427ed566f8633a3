"""Some features together, on eight ranks, beside the same program on one device."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

import whale as wh
from tests.combinations.features import RANKS, Feature, limit_of, mesh_of
from tests.combinations.program import OF_PROGRAM, Net, batches, rows_of, scopes_of
from tests.whale_ops.gpu.host_device import build_host_device, host_devices
from whale.capture.sharded import ShardedTensor
from whale.errors import REPORT_FAULT, WhaleError
from whale.kernels import clusters
from whale.passes.analysis.batch import rows_of_ranks
from whale.runtime.start import check_replicas

Values = dict[str, np.ndarray]
IN_PROCESS = {"communication.in_process_ranks": RANKS}


def outcome(features: Sequence[Feature], folder: str = "") -> tuple[str, str]:
    """("equal", figure), ("refused", why) or ("WRONG", what), of ranks in this process.

    Args:
      folder: of all ranks, where this process is one of them.
    """
    limit = limit_of(features)
    try:
        error, where = spread(features, folder)
    except WhaleError as error:
        said = str(error)
        return "WRONG" if REPORT_FAULT in said else "refused", said
    except Exception as wrong:
        return "WRONG", f"{type(wrong).__name__}: {str(wrong)[:300]}"
    return ("equal", f"{error:.1e}") if error <= limit else ("WRONG", f"{where} differs by {error:.1e}")


def spread(features: Sequence[Feature], folder: str = "") -> tuple[float, str]:
    """The largest difference from one device, and of what.

    Raises:
      WhaleError: the features are refused together.
      AssertionError: the plan divides nothing.
    """
    marks = frozenset(itertools.chain.from_iterable(f.marks for f in features))
    marks |= {"four"} if any(f.axes.get("stage") == 4 for f in features) else set()
    dtype = "float64" if all(f.limit <= 1e-10 for f in features) else "float32"
    config: dict[str, Any] = {"batch.random": "global", **({} if folder else IN_PROCESS)}
    plain = dict(config)
    for feature in features:
        config.update(feature.config)
    config["mesh"] = mesh_of(features)
    wanted = alone(marks & OF_PROGRAM, dtype)
    with contextlib.ExitStack() as stack:
        if marks & {"host device", "mixed devices"}:
            stack.enter_context(host_devices(_host_device(), mixed="mixed devices" in marks))
        saved = ""
        if "saved" in marks:
            saved = folder or stack.enter_context(tempfile.TemporaryDirectory())
        if "session" in marks:
            found = _in_session(marks, dtype, config, plain, saved)
        else:
            found = _in_function(marks, dtype, config, plain, saved)
    worst = {name: float(np.max(np.abs(found[name] - value))) for name, value in wanted.items()}
    where = max(worst, key=lambda name: worst[name])
    return worst[where], where


def named(net: Net, values: Sequence[np.ndarray]) -> Values:
    """Values of what is compared; names that Keras makes count what was made before, and several have the same."""
    return {f"{re.sub('_[0-9]+', '', v.name)} {i}": value for i, (v, value) in enumerate(zip(net.kept, values))}


def values_of(net: Net) -> Values:
    return named(net, [v.numpy() for v in net.kept])


@cache
def alone(marks: frozenset[str], dtype: str) -> Values:
    """Losses and weights after some steps on one device."""
    net, losses = Net(marks, dtype), []
    step = tf.function(lambda x, y: net.update(x, y, lambda i: contextlib.nullcontext()))
    for x, y in batches(marks, dtype):
        losses.append(float(step(tf.constant(x), tf.constant(y))))
    return {"losses": np.array(losses), **values_of(net)}


@cache
def _host_device() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="whale_host_device_"))
    atexit.register(shutil.rmtree, folder)
    return build_host_device(folder)


@contextlib.contextmanager
def _run(config: dict[str, Any]) -> Iterator[None]:
    wh.init(config)
    try:
        yield
    finally:
        wh.shutdown()


def _in_function(
    marks: frozenset[str], dtype: str, config: dict[str, Any], plain: dict[str, Any], folder: str
) -> Values:
    """Losses and weights of ``wh.function``.

    Args:
      plain: the configuration of another run, over one axis, that has made the first step and saved it, where the mark
        is ``saved``.
    """
    data, losses = batches(marks, dtype), []
    if "saved" in marks:
        with _run(plain):
            net = Net(marks, dtype)
            no_scopes = scopes_of(frozenset())
            step = wh.function(lambda x, y: net.update(x, y, no_scopes))
            losses.append(float(step(*map(tf.constant, data[0]))))
            path = wh.CheckpointManager(tf.train.Checkpoint(net=net), f"{folder}/saved", 1).save()
    with _run(config), contextlib.ExitStack() as stack:
        net, scope = Net(marks, dtype), scopes_of(marks)
        if "xla" in marks:
            stack.enter_context(mock.patch.object(clusters, "LEAST_BYTES", 0))
        step = wh.function(lambda x, y: net.update(x, y, scope), jit_compile=True if "xla" in marks else None)
        if "saved" in marks:
            wh.CheckpointManager(tf.train.Checkpoint(net=net), f"{folder}/saved", 1).restore(path)
        for batch in _as_passed(data[len(losses) :], marks, config):
            losses.append(float(step(*batch)))
        plan = next(iter(step._steps.values())).compiled.plan
        assert plan.logical_bytes > 0 or "auto" in marks, "nothing is divided"
        check_replicas()
        return {"losses": np.array(losses), **values_of(net)}


def _as_passed(
    data: Sequence[tuple[np.ndarray, np.ndarray]], marks: frozenset[str], config: dict[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """What this rank passes to the step of each batch."""
    if "shard" in marks:
        rows = tf.data.Dataset.from_tensor_slices(tuple(np.concatenate(part) for part in zip(*data)))
        yield from wh.shard(rows.batch(rows_of(marks)))
        return
    mine = slice(None)
    if "local" in marks:
        counts = rows_of_ranks(rows_of(marks), RANKS, config.get("batch.shares", ()))
        first = sum(counts[: wh.rank()])
        mine = slice(first, first + counts[wh.rank()])
    for x, y in data:
        yield tf.constant(x[mine]), tf.constant(y[mine])


def _in_session(
    marks: frozenset[str], dtype: str, config: dict[str, Any], plain: dict[str, Any], folder: str
) -> Values:
    """The same in a session of TensorFlow 1; arguments as of ``_in_function``."""
    data, losses, path = batches(marks, dtype), [], ""

    def trained(config: dict[str, Any], marks: frozenset[str], scoped: frozenset[str], first: int, end: int) -> Values:
        nonlocal path
        with _run(config):
            passed = list(_as_passed(data[first:end], scoped, config))
            fed = [[t if isinstance(t, ShardedTensor) else t.numpy() for t in batch] for batch in passed]
            with tf.Graph().as_default() as graph:
                net = Net(marks, dtype)
                x, y = (tf.compat.v1.placeholder(dtype, (None, *t.shape[1:])) for t in fed[0])
                loss = net.loss(x, y, scopes_of(scoped))
                train = net.trained_by(loss)
                saver = tf.compat.v1.train.Saver()
                with wh.Session(graph=graph) as session:
                    session.run(tf.compat.v1.global_variables_initializer())
                    if path:
                        saver.restore(session, path)
                    losses.extend(session.run([loss, train], {x: a, y: b})[0] for a, b in fed)
                    if not path and folder:
                        path = saver.save(session, f"{folder}/saved")
                    return named(net, session.run(net.kept))

    if folder:
        trained(plain, marks & OF_PROGRAM, frozenset(), 0, 1)
    weights = trained(config, marks, marks, len(losses), len(data))
    return {"losses": np.array(losses), **weights}
