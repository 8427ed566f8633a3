"""Settings of the library that must change no value, and those that may change its last digits, in one script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf

from tests.epl.model import CLASSES, Rows, cross_entropy, dense, train

Result = dict[str, list[float]]
_Script = Callable[[Any, Rows, int], Result]


def _with(settings: dict[str, Any], dtype: Any = tf.float64) -> _Script:
    """Three layers, of which the middle ones are large enough to be divided, under these settings."""

    def script(epl: Any, rows: Rows, runs: int) -> Result:
        epl.init(epl.Config(settings))
        epl.set_default_strategy(epl.replicate(1))
        x, labels = rows.next()
        h = tf.cast(x, dtype)
        for layer in ("first", "second", "third"):
            h = dense(h, 64, layer, tf.tanh)
            tf.add_to_collection("checkpoints", h)
        loss = cross_entropy(labels, dense(h, CLASSES, "logits"))
        step = tf.train.get_or_create_global_step()
        # Adam divides by how large gradients are: where one is about 0, half precision decides its sign.
        adam, momentum = tf.train.AdamOptimizer(0.01), tf.train.MomentumOptimizer(0.1, 0.9)
        train_op = (adam if dtype == tf.float64 else momentum).minimize(loss, step)
        # For offload, a second device of the processor stands for an accelerator.
        return train(loss, train_op, runs, config=tf.ConfigProto(device_count={"CPU": 2}))

    return script


zero_v0, zero_v1, zero_v2 = (_with({"zero.level": level}) for level in ("v0", "v1", "v2"))
offload = _with({"offload.level": "v0"})
recompute_auto, recompute_collection = (_with({"gradient_checkpoint.type": kind}) for kind in ("auto", "collection"))
# These change single precision only.
wire_of_halves = _with({"communication.fp16": True}, tf.float32)
amp_dynamic, amp_fixed = (_with({"amp.level": "O1", "amp.loss_scale": to}, tf.float32) for to in ("dynamic", 128))
without_effect = _with(
    {
        "communication.sparse_as_dense": True,
        "communication.max_splits": 2,
        "communication.num_communicators": 3,
        "optimizer.num_apply_group": 2,
        "cluster.device_place_prefer_intra_node": False,
        "cluster.run_visible_devices": "0",
        "amp.debug_log": True,
        "gradient_checkpoint.check_gradients": True,
        "gradient_checkpoint.end_taskgraph": 1,
    }
)
