"""Optimizers, tapes and callbacks of Horovod's API on two ranks; run by test_exchanges.py.

The first argument is the Keras. Each rank has half of every global batch of 16 rows, so that averages of gradients are
those of one process.
"""

import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

import whale.horovod as hvd
from whale.frontends.horovod.callbacks import callback_classes

if sys.argv[1] == "keras":
    import keras

    import whale.horovod.keras as hvd_keras

    callbacks: Any = hvd_keras.callbacks
else:
    import tf_keras as keras

    callbacks = SimpleNamespace(**callback_classes("tf_keras"))

hvd.init()
r = hvd.rank()
rng = np.random.default_rng(0)
X = rng.normal(size=(64, 5))
Y = X @ rng.normal(size=(5, 1))
mine = np.concatenate([np.arange(16 * b + 8 * r, 16 * b + 8 * r + 8) for b in range(4)])
keras.backend.set_floatx("float64")


def model(seed: int):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([
        keras.layers.Input((5,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)
    ])  # fmt: skip


def fit(model, optimizer, x, y, batch: int, callbacks=(), epochs: int = 3):
    if optimizer is not None:
        model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
    return model.fit(
        x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks)
    ).history  # fmt: skip


def equal(one, other) -> None:
    for a, b in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)


# fit with the averages of gradients and metrics
adam = lambda: keras.optimizers.Adam(0.01, epsilon=1e-5)  # noqa: E731
whole, spread = model(3), model(3)
expected = fit(whole, adam(), X, Y, 16)
found = fit(
    spread, hvd.DistributedOptimizer(adam()), X[mine], Y[mine], 8,
    [callbacks.BroadcastGlobalVariablesCallback(0), callbacks.MetricAverageCallback()],
)  # fmt: skip
for name, values in expected.items():
    np.testing.assert_allclose(found[name], values, rtol=1e-9, err_msg=name)
equal(whole, spread)

# other first weights: after the first batch they are the root's
other = model(100 + r)
fit(other, hvd.DistributedOptimizer(adam()), X[mine], Y[mine], 8, [callbacks.BroadcastGlobalVariablesCallback(0)])
first, second = hvd.allgather_object(other.get_weights())
assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))

# two backward passes of 4 rows are one of 8
sgd_whole, accumulated = model(3), model(3)
fit(sgd_whole, keras.optimizers.SGD(0.1), X, Y, 16)
optimizer = hvd.DistributedOptimizer(
    keras.optimizers.SGD(0.1), backward_passes_per_step=2, average_aggregated_gradients=True
)
fit(accumulated, optimizer, X[mine], Y[mine], 4)
equal(sgd_whole, accumulated)

# groups, predivision and sums
for options in ({"groups": 2}, {"gradient_predivide_factor": 2.0}):
    again = model(3)
    fit(again, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options), X[mine], Y[mine], 8)
    equal(sgd_whole, again)
summed = model(3)
fit(summed, hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), op=hvd.Sum), X[mine], Y[mine], 8)
equal(sgd_whole, summed)

# a tape, with a layer whose gradients stay the rank's own
one, two = model(3), model(3)
o1, o2 = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)


@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((one(x) - y) ** 2)
    tape = hvd.DistributedGradientTape(tape)
    o1.apply_gradients(zip(tape.gradient(loss, one.trainable_variables), one.trainable_variables))
    return hvd.allreduce(loss)


for i in range(4):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((two(X[16 * i :][:16]) - Y[16 * i :][:16]) ** 2)
    o2.apply_gradients(zip(tape.gradient(loss, two.trainable_variables), two.trainable_variables))
    np.testing.assert_allclose(step(X[mine[8 * i :][:8]], Y[mine[8 * i :][:8]]), loss, rtol=1e-10)
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(one(X[mine[:8]]))
with tf.GradientTape() as plain:
    own = tf.reduce_sum(one(X[mine[:8]]))
own = plain.gradient(own, one.trainable_variables)
partial = hvd.PartialDistributedGradientTape(tape, local_layers=one.layers[0])
found = partial.gradient(loss, one.trainable_variables)
np.testing.assert_allclose(found[0], own[0] / 2)
np.testing.assert_allclose(found[2], hvd.allreduce(own[2]))

# learning rates
warm = callbacks.LearningRateWarmupCallback(initial_lr=0.2, warmup_epochs=2)
decay = callbacks.LearningRateScheduleCallback(initial_lr=0.2, multiplier=0.5, start_epoch=2)
history = fit(
    model(4), hvd.DistributedOptimizer(keras.optimizers.SGD(0.2)), X[mine], Y[mine], 8, [warm, decay], epochs=4
)
np.testing.assert_allclose(history["lr"], [0.15, 0.2, 0.2, 0.1])

if sys.argv[1] == "keras":
    # what is saved is loaded without Whale, and goes on with it
    path = tempfile.mkdtemp() + "/model.keras"
    spread.save(path)
    assert type(keras.saving.load_model(path).optimizer) is keras.optimizers.Adam
    loaded = hvd_keras.load_model(path)
    fit(loaded, None, X[mine], Y[mine], 8, epochs=1)
    fit(whole, None, X, Y, 16, epochs=1)
    equal(whole, loaded)
    # a loss scale belongs inside
    scaled = model(3)
    inside = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
    fit(scaled, hvd.DistributedOptimizer(inside), X[mine], Y[mine], 8)
    equal(sgd_whole, scaled)
    try:
        outside = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
        fit(model(3), outside, X[mine], Y[mine], 8)
    except Exception as error:
        assert "a LossScaleOptimizer around hvd.DistributedOptimizer" in str(error), error
    else:
        raise SystemExit("a loss scale of each rank went on")

print("all of Keras", r)
