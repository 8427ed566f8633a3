"""Script for `whale run`: trains a linear model on data that each rank reads or brings for itself.

    data_on_ranks.py rows|files|own SHARES FOLDER        (SHARES: 5,3 or even)

Every rank writes the losses, the batches that the steps saw and the weights. A plain TensorFlow run is `train` with
`tf.function` on the same batches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

SAMPLES, BATCH, EPOCHS = 19, 6, 2  # the last batch of an epoch has one row: fewer than there are ranks


def samples() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(SAMPLES, 3)), generator.normal(size=(SAMPLES, 1))


def batches() -> tf.data.Dataset:
    """Shuffled anew in each epoch, then transformed."""
    dataset = tf.data.Dataset.from_tensor_slices(samples()).shuffle(SAMPLES, seed=5)
    return dataset.map(lambda x, y: (2 * x, y)).batch(BATCH)


def train(function: Callable[..., Any], epochs: Iterable[Iterable[Any]]) -> dict[str, np.ndarray]:
    """Steps on (x, y) with momentum; after each epoch the loss on its last batch, by a step of its own."""
    w, speed = tf.Variable(np.full((3, 1), 0.5)), tf.Variable(np.zeros((3, 1)))

    def loss_of(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(tf.tanh(x @ w) - y))

    @function
    def step(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = loss_of(x, y)
        speed.assign(0.9 * speed + tape.gradient(loss, w))
        w.assign_sub(0.1 * speed)
        return loss, tf.concat([x, y], 1)

    evaluate = function(loss_of)
    found: dict[str, np.ndarray] = {}
    for epoch, elements in enumerate(epochs):
        for index, (x, y) in enumerate(elements):
            loss, seen = step(x, y)
            found |= {f"{epoch}/{index}/loss": loss.numpy(), f"{epoch}/{index}/seen": seen.numpy()}
        found[f"{epoch}/evaluated"] = evaluate(x, y).numpy()
    return found | {"variable/w": w.numpy(), "variable/speed": speed.numpy()}


def train_session(make: Callable[..., Any], epochs: Iterable[Iterable[Any]]) -> dict[str, np.ndarray]:
    """The same model in a graph, fed with each batch."""
    v1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default():
        x, y = v1.placeholder(tf.float64, [None, 3]), v1.placeholder(tf.float64, [None, 1])
        w = v1.get_variable("w", [3, 1], tf.float64, initializer=v1.constant_initializer(0.5))
        loss = tf.reduce_mean(tf.square(tf.tanh(x @ w) - y))
        update = v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        start = v1.global_variables_initializer()
    found: dict[str, np.ndarray] = {}
    with make(graph=graph) as session:
        session.run(start)
        for epoch, elements in enumerate(epochs):
            for index, (rows, labels) in enumerate(elements):
                feeds = {x: rows, y: labels}
                found[f"{epoch}/{index}/loss"], _ = session.run([loss, update], feeds)
            found[f"{epoch}/evaluated"] = session.run(loss, feeds)
        return found | {"variable/w": session.run(w)}


def kept(dataset: Iterable[Any]) -> list[list[Any]]:
    """The batches of each epoch, read before a graph is entered, in which no dataset can be."""
    return [list(dataset) for _ in range(EPOCHS)]


def cut(rank: int) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Batches of one of two ranks of its own: of other sizes on each, and in each step."""
    first = [(4, 6), (3, 3), (0, 2), (1, 0)]
    x, y = samples()
    found, start = [], 0
    for sizes in first:
        begin, end = start + sum(sizes[:rank]), start + sum(sizes[: rank + 1])
        found.append((x[begin:end], y[begin:end]))
        start += sum(sizes)
    return [found] * EPOCHS


def whole() -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """What the two ranks of `cut` bring together."""
    epochs = zip(cut(0), cut(1))
    return [[tuple(np.concatenate(pair) for pair in zip(*step)) for step in zip(*epoch)] for epoch in epochs]


def files(folder: str) -> tf.data.Dataset:
    """Rows of three text files, of 7, 2 and 10."""
    names = [str(Path(folder, f"{i}.csv")) for i in range(3)]
    lines = tf.data.TextLineDataset(names)
    parsed = lines.map(lambda line: tf.strings.to_number(tf.strings.split(line, ","), tf.float64))
    return parsed.map(lambda row: (tf.ensure_shape(row[:3], [3]), tf.ensure_shape(row[3:], [1]))).batch(BATCH)


def refused(call: Callable[[], Any], *facts: str) -> None:
    """Asserts that a call is refused on this rank, for these reasons."""
    from whale.errors import ProgramError

    try:
        call()
    except ProgramError as error:
        assert all(fact in str(error) for fact in facts), error
    else:
        raise AssertionError(f"not refused: {facts}")


def goes_on(folder: Path) -> None:
    """Asserts that an iterator that is restored yields the batches of the one that was saved, in its second epoch."""
    import whale as wh

    first, second = wh.shard(batches()), wh.shard(batches())
    list(first)
    iterator, other = iter(first), iter(second)
    for _ in range(2):
        next(iterator)
    path = wh.CheckpointManager(tf.train.Checkpoint(data=iterator), folder / "saved", 1).save()
    wh.CheckpointManager(tf.train.Checkpoint(data=other), folder / "saved", 1).restore(path).assert_consumed()
    rest, others = list(iterator), list(other)
    assert len(rest) == len(others) == SAMPLES // BATCH + 1 - 2
    for (x, _), (y, _) in zip(rest, others):
        assert x.sizes == y.sizes and np.array_equal(x.local, y.local)


def main() -> None:
    import whale as wh
    from whale.runtime.start import check_replicas

    mode, shares, folder = sys.argv[1:]
    rows = [] if shares == "even" else [int(part) for part in shares.split(",")]
    wh.init(wh.Config({"batch.shares": rows, "batch.mode": "local" if mode == "own" else "global"}))
    rank, total = wh.rank(), wh.function(tf.reduce_sum)
    if mode == "own":
        results = {f"function/{name}": value for name, value in train(wh.function, cut(rank)).items()}
        results |= {f"session/{name}": value for name, value in train_session(wh.Session, cut(rank)).items()}
        refused(lambda: total(np.zeros((2, 3 + rank))), "rank 0 has float64[2, 3], rank 1 has float64[2, 4]")
    else:
        dataset = wh.shard(batches()) if mode == "rows" else wh.shard(files(folder), by="file")
        results = train(wh.function, [dataset] * EPOCHS)
    if mode == "rows":
        read = wh.shard(batches())
        results |= {f"session/{name}": v for name, v in train_session(wh.Session, kept(read)).items()}
        x, _ = next(iter(dataset))
        given = "rank 0 passes parts of input_tensor with shares [4, 0, 2], rank 2 passes no parts"
        refused(lambda: total(np.zeros(x.shape) if rank == 2 else x), given)
        goes_on(Path(folder))
    check_replicas()
    np.savez(Path(folder, f"{rank}.npz"), **results)
    wh.shutdown()


if __name__ == "__main__":
    main()
