"""The eight listings of the first Whale's paper, on generated rows, beside one device: in ranks of this process.

python -m tests.epl.listings
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

import whale as wh
from tests.epl.model import dense

ROWS, WIDTH, CLASSES, STEPS, LIMIT = 24, 12, 8, 3, 1e-10
Part = Callable[[Any], Any]


def features(x: Any) -> Any:
    return dense(dense(x, 10, "first", tf.tanh), 16, "second", tf.nn.relu)


def classes(h: Any) -> Any:
    return dense(h, CLASSES, "classes")


def data_parallelism(x: Any) -> Any:
    cluster = wh.cluster()
    with cluster, wh.replica():
        return classes(features(x))


def model_parallelism(x: Any) -> Any:
    cluster = wh.cluster(layout={"average": 2})
    with wh.stage(devices=cluster.slices[0], name="features"):
        h = features(x)
    with wh.stage(devices=cluster.slices[1]):
        return classes(h)


def pipeline(x: Any) -> Any:
    """The number of micro-batches stands in the configuration, under the paper's name."""
    wh.init(wh.Config({**_ranks(), "num_micro_batch": 4}))
    with wh.replica(), wh.pipeline(strategy="PreferBackward", num_stages=2):
        with wh.stage():
            h = features(x)
        with wh.stage(device_count=1):
            return classes(h)


def operator_sharding(x: Any) -> Any:
    with wh.cluster("127.0.0.1:8001,127.0.0.1:8002", None, "worker", 0, {"all"}), wh.split():
        return classes(features(x))


def data_and_operator_sharding(x: Any) -> Any:
    """Many classes: features by rows, the last layer by classes."""
    with wh.replica(4):
        h = features(x)
    with wh.split(4, name="classification"):
        return classes(h)


def data_parallel_pipeline(x: Any) -> Any:
    """Rows of the cluster are replicas, its columns are stages."""
    cluster = wh.cluster(layout={"row": 2})
    with wh.replica(), wh.pipeline(num_micro_batch=2):
        with wh.stage(cluster.slices[0]):
            h = features(x)
        with wh.stage(cluster.slices[1]):
            return classes(h)


def automatic(x: Any) -> Any:
    wh.init(wh.Config({**_ranks(), "num_task_graph": 2, "num_micro_batch": 4}))
    with wh.auto_parallel([wh.pipeline, wh.replica]):
        return classes(features(x))


def task_graphs(x: Any) -> Any:
    """As the later paper writes it: each replicate is a task graph, and two are a pipeline."""
    wh.init(wh.Config({**_ranks(), "num_micro_batch": 4}))
    wh.auto_parallel(wh.replica)
    with wh.replicate(1):
        h = features(x)
    with wh.replicate(1):
        return classes(h)


def default_split(x: Any) -> Any:
    """Beside the listings: everything that is in no scope is split."""
    wh.set_default_strategy(wh.split())
    return classes(features(x))


LISTINGS: tuple[Callable[[Any], Any], ...] = (
    data_parallelism,
    model_parallelism,
    pipeline,
    operator_sharding,
    data_and_operator_sharding,
    data_parallel_pipeline,
    automatic,
    task_graphs,
    default_split,
)


def _ranks() -> dict[str, Any]:
    return {"communication.in_process_ranks": 4}


def trained(model: Part, session: Callable[[], Any]) -> dict[str, np.ndarray]:
    """Losses of some steps of one device's batch, and the weights."""
    draw = np.random.default_rng(6)
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float64, [ROWS, WIDTH])
        y = tf.placeholder(tf.int64, [ROWS])
        logits = model(x)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        step = tf.train.MomentumOptimizer(0.2, 0.9).minimize(loss)
        losses = []
        with session() as one:
            one.run(tf.global_variables_initializer())
            for _ in range(STEPS):
                fed = {x: draw.normal(size=(ROWS, WIDTH)), y: draw.integers(0, CLASSES, size=ROWS)}
                losses.append(one.run([loss, step], fed)[0])
            weights = one.run({v.op.name: v for v in tf.trainable_variables()})
    return {"losses": np.array(losses), **weights}


def difference(listing: Callable[[Any], Any]) -> float:
    """The largest difference of losses and weights from one device."""
    tf.enable_resource_variables()
    wanted = trained(lambda x: classes(features(x)), tf.Session)
    wh.init(_ranks())
    try:
        found = trained(listing, wh.Session)
    finally:
        wh.shutdown()
    assert found.keys() == wanted.keys()
    return max(float(np.max(np.abs(found[name] - value))) for name, value in wanted.items())


def main() -> int:
    """Returns the exit code: 1 when a listing is not as one device."""
    found = {}
    for listing in LISTINGS:
        try:
            found[listing.__name__] = difference(listing)
        except wh.WhaleError as error:  # the others go on
            found[listing.__name__] = float("inf")
            print(error)
        print(f"{listing.__name__:28} {found[listing.__name__]:.1e}", flush=True)
    good = sum(error <= LIMIT for error in found.values())
    print(f"{good} of {len(LISTINGS)} listings as one device, in float64 (TensorFlow {tf.__version__})")
    return int(good < len(LISTINGS))


if __name__ == "__main__":
    tf.disable_eager_execution()
    sys.exit(main())
