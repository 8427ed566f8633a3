"""Programs as users of Keras write them. They do not know of Whale, but for where ``place`` puts layers.

Each takes (keras, place) and returns what is compared: history, metrics, predictions, weights.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.metadata
import importlib.util
import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

Found = dict[str, Any]
CASES: dict[str, Callable[[Any, Any], Found]] = {}
KERAS3_ONLY: set[str] = set()
# Cases in which rounding shows, and how much of it.
LIMITS: dict[str, float] = {"half_precision": 2e-2, "xla": 1e-10}
BOARD = importlib.util.find_spec("tensorboard") is not None


def case(function: Callable[[Any, Any], Found]) -> Callable[[Any, Any], Found]:
    CASES[function.__name__] = function
    return function


def keras3(function: Callable[[Any, Any], Found]) -> Callable[[Any, Any], Found]:
    KERAS3_ONLY.add(function.__name__)
    return case(function)


class Place:
    """Scopes for parts of a model; on one device there are none."""

    def first(self) -> Any:
        return contextlib.nullcontext()

    def second(self) -> Any:
        return contextlib.nullcontext()

    def wide(self) -> Any:
        return contextlib.nullcontext()


def samples(count: int = 70, features: int = 6, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, features)), rng.integers(0, classes, count)


def classifier(keras: Any, place: Any, classes: int = 3, activation: str = "relu") -> Any:
    layers = keras.layers
    model = keras.Sequential()
    model.add(layers.Input((6,)))
    with place.first():
        model.add(layers.Dense(8, activation=activation))
    with place.second(), place.wide():
        model.add(layers.Dense(classes, activation="softmax"))
    return model


def sgd(keras: Any, rate: float = 0.1, **options: Any) -> Any:
    return keras.optimizers.SGD(rate, **options)


def cases_of(flavour: str) -> list[str]:
    """The cases that a flavour has: some are of Keras 3 alone."""
    is_keras3 = flavour == "keras" and not importlib.metadata.version("keras").startswith("2.")
    return [name for name in CASES if is_keras3 or name not in KERAS3_ONLY]


def found(model: Any, history: Any = None, **more: Any) -> Found:
    weights = {f"weight {i}": w for i, w in enumerate(model.get_weights())}
    logs = {} if history is None else {f"history {k}": np.array(v) for k, v in history.history.items()}
    return {**logs, **weights, **more}


@case
def arrays(keras: Any, place: Any) -> Found:
    """NumPy arrays, a last batch that is smaller, a validation split, and all five ways to call a model."""
    x, y = samples()
    model = classifier(keras, place)
    model.compile(sgd(keras), "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(x, y, batch_size=16, epochs=2, validation_split=0.2, verbose=0)
    return found(
        model,
        history,
        evaluate=model.evaluate(x, y, batch_size=32, verbose=0),
        train_on_batch=model.train_on_batch(x[:8], y[:8]),
        test_on_batch=model.test_on_batch(x[:9], y[:9]),
        predict=model.predict(x, batch_size=16, verbose=0),
        predict_on_batch=model.predict_on_batch(x[:5]),
        after=np.concatenate([w.ravel() for w in model.get_weights()]),
    )


@case
def batch_statistics(keras: Any, place: Any) -> Found:
    x, y = samples()
    layers = keras.layers
    model = keras.Sequential([layers.Input((6,)), layers.Dense(8), layers.BatchNormalization(), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(sgd(keras, momentum=0.9), loss)
    return found(model, model.fit(x, y, batch_size=16, epochs=2, verbose=0), predict=model.predict(x, verbose=0))


@case
def two_inputs_two_outputs(keras: Any, place: Any) -> Found:
    x, y = samples()
    layers = keras.layers
    one, other = keras.Input((4,), name="one"), keras.Input((2,), name="other")
    with place.first():
        hidden = layers.concatenate([layers.Dense(5, activation="tanh")(one), layers.Dense(4)(other)])
    with place.second():
        label = layers.Dense(3, activation="softmax", name="label")(hidden)
        size = layers.Dense(1, name="size")(hidden)
    model = keras.Model([one, other], {"label": label, "size": size})
    model.compile(
        sgd(keras),
        {"label": "sparse_categorical_crossentropy", "size": "mse"},
        loss_weights={"label": 1.0, "size": 0.3},
        metrics={"label": ["accuracy"], "size": ["mae"]},
    )
    targets = {"label": y, "size": x.sum(1)}
    history = model.fit({"one": x[:, :4], "other": x[:, 4:]}, targets, batch_size=16, epochs=2, verbose=0)
    predicted = model.predict({"one": x[:, :4], "other": x[:, 4:]}, verbose=0)
    return found(model, history, label=predicted["label"], size=predicted["size"])


@case
def own_steps(keras: Any, place: Any) -> Found:
    """A subclass with train_step, test_step and metrics of its own."""

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = classifier(keras, place)
            self.seen = keras.metrics.Mean(name="seen")
            self.right = keras.metrics.SparseCategoricalAccuracy(name="right")

        @property
        def metrics(self) -> list[Any]:
            return [self.seen, self.right]

        def call(self, x: Any, training: bool = False) -> Any:
            return self.inner(x, training=training)

        def _loss(self, y: Any, p: Any) -> Any:
            return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, p))

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                p = self(x, training=True)
                loss = self._loss(y, p)
            weights = self.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            self.seen.update_state(loss)
            self.right.update_state(y, p)
            return {m.name: m.result() for m in self.metrics}

        def test_step(self, data: Any) -> Any:
            x, y = data
            p = self(x, training=False)
            self.seen.update_state(self._loss(y, p))
            self.right.update_state(y, p)
            return {m.name: m.result() for m in self.metrics}

    x, y = samples()
    model = Model()
    model.compile(optimizer=sgd(keras))
    history = model.fit(x, y, batch_size=16, epochs=2, validation_data=(x[:33], y[:33]), verbose=0)
    return found(model, history)


@case
def dataset(keras: Any, place: Any) -> Found:
    """tf.data, shuffled with a seed and mapped, class weights, validation data of its own, several epochs."""
    x, y = samples()
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(70, seed=5).map(lambda a, b: (a * 2.0, b)).batch(16)
    other = tf.data.Dataset.from_tensor_slices((x[:40], y[:40])).batch(12).repeat()
    model = classifier(keras, place)
    model.compile(sgd(keras), "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(
        data.prefetch(2), epochs=4, class_weight={0: 1.0, 1: 0.5, 2: 2.0}, verbose=0,
        validation_data=other, validation_steps=2, validation_freq=2,
    )  # fmt: skip
    return found(model, history, predict=model.predict(data.map(lambda a, b: a).take(2), verbose=0).sum(0))


@case
def generator(keras: Any, place: Any) -> Found:
    x, y = samples()

    def batches() -> Any:
        while True:
            for i in range(0, 64, 16):
                yield x[i : i + 16], y[i : i + 16]

    model = classifier(keras, place)
    model.compile(sgd(keras), "sparse_categorical_crossentropy")
    return found(model, model.fit(batches(), steps_per_epoch=3, epochs=3, verbose=0))


@keras3
def pydataset(keras: Any, place: Any) -> Found:
    x, y = samples()

    class Data(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, i: int) -> Any:
            return x[i * 16 : i * 16 + 16], y[i * 16 : i * 16 + 16]

    model = classifier(keras, place)
    model.compile(sgd(keras), "sparse_categorical_crossentropy")
    data = Data(workers=2)
    return found(model, model.fit(data, epochs=2, verbose=0), evaluate=model.evaluate(data, verbose=0))


@case
def sample_weights(keras: Any, place: Any) -> Found:
    x, y = samples()
    model = classifier(keras, place)
    model.compile(sgd(keras), "sparse_categorical_crossentropy", metrics=["accuracy"], weighted_metrics=["accuracy"])
    weights = np.linspace(0.1, 2.0, len(y))
    history = model.fit(x, y, sample_weight=weights, batch_size=16, epochs=2, verbose=0)
    return found(model, history, evaluate=model.evaluate(x, y, sample_weight=weights, verbose=0))


@case
def added_losses(keras: Any, place: Any) -> Found:
    x, y = samples()
    layers = keras.layers

    class Sparse(layers.Layer):  # type: ignore[misc, name-defined]
        def call(self, x: Any) -> Any:
            self.add_loss(0.01 * tf.reduce_mean(tf.abs(x)))
            return x

    model = keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(8, activation="relu", kernel_regularizer="l2", activity_regularizer="l1"),
            Sparse(),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(sgd(keras, 0.02), "sparse_categorical_crossentropy")
    return found(model, model.fit(x[:64], y[:64], batch_size=16, epochs=2, verbose=0))


@case
def several_steps_at_once(keras: Any, place: Any) -> Found:
    x, y = samples(64)
    model = classifier(keras, place)
    model.compile(sgd(keras), "sparse_categorical_crossentropy", metrics=["accuracy"], steps_per_execution=3)
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    model.steps_per_execution = 4  # Keras goes on with three, which are in its graph, and takes a step fewer
    more = model.fit(x, y, batch_size=16, epochs=2, verbose=0).history["loss"]
    return found(
        model, history, more=more, evaluate=model.evaluate(x, y, verbose=0),
        predict=model.predict(x, batch_size=16, verbose=0),
    )  # fmt: skip


@case
def wide_rows(keras: Any, place: Any) -> Found:
    """Batches of which each rank's part is too large for the loop to take it from the arrays itself."""
    x, y = samples(70, features=9000)
    model = keras.Sequential([keras.layers.Input((9000,)), keras.layers.Dense(3, activation="softmax")])
    model.compile(sgd(keras, 0.001), "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(x, y, batch_size=32, epochs=2, verbose=0)
    return found(model, history, predict=model.predict(x, batch_size=32, verbose=0))


@case
def kinds_of_shuffles(keras: Any, place: Any) -> Found:
    """Rows in order, shuffled, and by whole batches; batches that divide the rows, and that do not."""
    x, y = samples()
    model = classifier(keras, place)
    model.compile(sgd(keras), "sparse_categorical_crossentropy")
    losses = [
        model.fit(x, y, batch_size=size, epochs=2, shuffle=shuffle, verbose=0).history["loss"]
        for shuffle in (False, True, "batch")
        for size in (14, 32, 100)
    ]
    return found(model, losses=losses, weighted=model.evaluate(x, y, sample_weight=np.arange(70.0), verbose=0))


@keras3
def optimizer_options(keras: Any, place: Any) -> Found:
    """Accumulated gradients, a moving average of weights, clipping, weight decay, a schedule."""
    x, y = samples(64)
    model = classifier(keras, place)
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([3, 6], [0.05, 0.04, 0.03])
    model.compile(
        keras.optimizers.Adam(
            rate, epsilon=1e-5, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.9, clipnorm=1.0,
            weight_decay=0.01,
        ),
        "sparse_categorical_crossentropy",
    )  # fmt: skip
    return found(model, model.fit(x, y, batch_size=16, epochs=3, verbose=0))


@case
def stateful_recurrent(keras: Any, place: Any) -> Found:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(32, 5, 3)), rng.normal(size=(32, 1))
    layers = keras.layers
    model = keras.Sequential([layers.Input(batch_shape=(8, 5, 3)), layers.LSTM(4, stateful=True), layers.Dense(1)])
    model.compile(sgd(keras), "mse")
    return found(model, model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0))


@case
def metrics(keras: Any, place: Any) -> Found:
    x, y = samples(classes=2)
    model = classifier(keras, place, classes=1)
    model.layers[-1].activation = keras.activations.sigmoid
    m = keras.metrics
    model.compile(
        sgd(keras), "binary_crossentropy",
        metrics=[m.AUC(num_thresholds=50), m.Precision(), m.Recall(), m.BinaryAccuracy(), m.MeanSquaredError()],
    )  # fmt: skip
    history = model.fit(x, y.astype(float), batch_size=16, epochs=2, verbose=0)
    values = [np.array(v) for _, v in sorted(model.evaluate(x, y.astype(float), verbose=0, return_dict=True).items())]
    named = {f"history {i}": np.array(v) for i, (_, v) in enumerate(sorted(history.history.items()))}
    return {**found(model), **named, "evaluate": np.array(values)}


@case
def steering_callbacks(keras: Any, place: Any) -> Found:
    """Early stopping, rates that follow the loss or a schedule, a callback that stops, and what writes."""
    x, y = samples()
    callbacks = keras.callbacks
    seen: list[float] = []

    class Own(callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
            seen.append(float(logs["loss"]))  # type: ignore[index]

    with tempfile.TemporaryDirectory() as folder:
        shared = os.environ.get("KERAS_FIT_FOLDER", folder)
        model = classifier(keras, place)
        model.compile(sgd(keras, 2.0), "sparse_categorical_crossentropy")
        history = model.fit(
            x, y, batch_size=16, epochs=8, validation_split=0.3, verbose=0,
            callbacks=[
                callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
                callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1),
                callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
                callbacks.CSVLogger(os.path.join(shared, "log.csv")),
                *([callbacks.TensorBoard(os.path.join(shared, "board"), histogram_freq=1)] if BOARD else []),
                callbacks.ModelCheckpoint(os.path.join(shared, "best.keras"), save_best_only=True),
                callbacks.ModelCheckpoint(os.path.join(shared, "{epoch}.weights.h5"), save_weights_only=True),
                Own(),
            ],
        )  # fmt: skip
        result = found(model, history, seen=np.array(seen))
        best = keras.models.load_model(os.path.join(shared, "best.keras"))
        result["best"] = best.predict(x, verbose=0)
        model.load_weights(os.path.join(shared, "1.weights.h5"))
        result["first epoch"] = np.concatenate([w.ravel() for w in model.get_weights()])
        with open(os.path.join(shared, "log.csv")) as file:
            result["lines"] = len(list(csv.reader(file)))
        if BOARD:
            result["boards"] = len(os.listdir(os.path.join(shared, "board")))
    return result


@case
def interrupted(keras: Any, place: Any) -> Found:
    """BackupAndRestore: a training that breaks off, and goes on in a second call."""
    x, y = samples()

    class Break(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise InterruptedError

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(os.environ.get("KERAS_FIT_FOLDER", folder), "backup")
        model = classifier(keras, place)
        model.compile(sgd(keras), "sparse_categorical_crossentropy")
        backup = keras.callbacks.BackupAndRestore(path)
        with contextlib.suppress(InterruptedError):
            model.fit(x, y, batch_size=16, epochs=4, shuffle=False, callbacks=[backup, Break()], verbose=0)
        model.set_weights([np.zeros_like(w) for w in model.get_weights()])
        again = keras.callbacks.BackupAndRestore(path)
        history = model.fit(x, y, batch_size=16, epochs=4, shuffle=False, callbacks=[again], verbose=0)
    return found(model, history)


@case
def saved_and_loaded(keras: Any, place: Any) -> Found:
    x, y = samples()
    with tempfile.TemporaryDirectory() as folder:
        shared = os.environ.get("KERAS_FIT_FOLDER", folder)
        path = os.path.join(shared, "model.keras")
        model = classifier(keras, place)
        adam = keras.optimizers.Adam(0.01, epsilon=1e-5)
        model.compile(adam, "sparse_categorical_crossentropy")
        model.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)
        model.save(path)
        model.save_weights(os.path.join(shared, "m.weights.h5"))
        loaded = keras.models.load_model(path)
        history = loaded.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)
        model.set_weights([w * 0 for w in model.get_weights()])
        model.save_weights(os.path.join(shared, "zeros.weights.h5"))  # of what was assigned, and not yet cut
        assert not any(w.any() for w in model.get_weights())
        model.load_weights(os.path.join(shared, "m.weights.h5"))
        return found(loaded, history, reloaded=model.predict(x, verbose=0))


@case
def frozen_then_tuned(keras: Any, place: Any) -> Found:
    """Transfer learning: a part is frozen, the model is compiled again, and then all of it learns."""
    x, y = samples()
    layers = keras.layers
    base = keras.Sequential([layers.Input((6,)), layers.Dense(8, activation="relu"), layers.Dense(5)])
    base.trainable = False
    model = keras.Sequential([layers.Input((6,)), base, layers.Dense(3, activation="softmax")])
    model.compile(sgd(keras), "sparse_categorical_crossentropy")
    one = model.fit(x, y, batch_size=16, epochs=1, verbose=0)
    base.trainable = True
    model.compile(sgd(keras, 0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
    two = model.fit(x, y, batch_size=16, epochs=3, initial_epoch=1, verbose=0)
    return found(model, two, one=np.array(one.history["loss"]))


@case
def text(keras: Any, place: Any) -> Found:
    rng = np.random.default_rng(2)
    x, y = rng.integers(1, 50, (48, 7)), rng.integers(0, 2, 48)
    layers = keras.layers
    model = keras.Sequential([layers.Input((7,), dtype="int32")])
    with place.first():
        model.add(layers.Embedding(50, 6))
        model.add(layers.Bidirectional(layers.GRU(4)))
    with place.second():
        model.add(layers.Dense(1, activation="sigmoid"))
    model.compile(sgd(keras), "binary_crossentropy", metrics=["accuracy"])
    return found(model, model.fit(x, y.astype(float), batch_size=16, epochs=2, verbose=0))


@case
def images(keras: Any, place: Any) -> Found:
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(36, 8, 8, 1)), rng.integers(0, 4, 36)
    layers = keras.layers
    model = keras.Sequential([layers.Input((8, 8, 1))])
    with place.first():
        model.add(layers.Conv2D(4, 3, activation="relu"))
        model.add(layers.MaxPooling2D())
    with place.second():
        model.add(layers.Flatten())
        model.add(layers.Dense(4, activation="softmax"))
    model.compile(sgd(keras), "categorical_crossentropy", metrics=["accuracy"])
    return found(model, model.fit(x, np.eye(4)[y], batch_size=12, epochs=2, verbose=0))


@case
def attention(keras: Any, place: Any) -> Found:
    rng = np.random.default_rng(4)
    x, y = rng.integers(0, 30, (32, 6)), rng.integers(0, 3, 32)
    layers = keras.layers
    tokens = keras.Input((6,), dtype="int32")
    with place.first():
        h = layers.Embedding(30, 8)(tokens)
        a = layers.MultiHeadAttention(2, 4)(h, h)
        h = layers.LayerNormalization()(h + a)
    with place.second():
        f = layers.Dense(8)(layers.Dense(16, activation="gelu")(h))
        h = layers.LayerNormalization()(h + f)
        out = layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling1D()(h))
    model = keras.Model(tokens, out)
    model.compile(sgd(keras), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return found(model, model.fit(x, y, batch_size=8, epochs=2, verbose=0))


@keras3
def strings(keras: Any, place: Any) -> Found:
    """Text goes into the model as it is."""
    words = np.array(["a b c", "b b", "c a d e", "e"] * 6)
    y = np.array([0.0, 1.0, 0.0, 1.0] * 6)
    layers = keras.layers
    vectors = layers.TextVectorization(output_sequence_length=4)
    vectors.adapt(words)
    lines = keras.Input((), dtype="string")
    h = layers.GlobalAveragePooling1D()(layers.Embedding(10, 4)(vectors(lines)))
    model = keras.Model(lines, layers.Dense(1, activation="sigmoid")(h))
    model.compile(sgd(keras), "binary_crossentropy")
    data = tf.data.Dataset.from_tensor_slices((words, y)).batch(8)
    history, texts = model.fit(data, epochs=2, verbose=0), tf.constant(words)
    model.fit(texts, y, batch_size=8, shuffle=False, verbose=0)
    tested = model.evaluate(texts, y, batch_size=16, verbose=0)
    return found(model, history, tested=tested, predicted=model.predict(texts[:5], batch_size=4, verbose=0))


@case
def half_precision(keras: Any, place: Any) -> Found:
    """A policy of mixed precision, with the optimizer that scales losses; no kink, across which rounding throws."""
    x, y = samples(64)
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = classifier(keras, place, activation="tanh")
    finally:
        keras.mixed_precision.set_global_policy("float64")
    model.compile(sgd(keras), "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    assert "LossScale" in type(model.optimizer).__name__
    return found(model, history)


@case
def xla(keras: Any, place: Any) -> Found:
    x, y = samples(64)
    model = classifier(keras, place)
    model.compile(sgd(keras), "sparse_categorical_crossentropy", jit_compile=True)
    return found(model, model.fit(x, y, batch_size=16, epochs=1, verbose=0))


@case
def two_optimizers(keras: Any, place: Any) -> Found:
    """A generative adversarial network: two models, two optimizers, one step."""
    layers = keras.layers
    noise = np.random.default_rng(5).normal(size=(64, 3))
    real, _ = samples(64)

    class Gan(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.maker = keras.Sequential([layers.Input((3,)), layers.Dense(8, activation="relu"), layers.Dense(6)])
            self.judge = keras.Sequential([layers.Input((6,)), layers.Dense(8, activation="relu"), layers.Dense(1)])
            self.losses_seen = [keras.metrics.Mean(name="judged"), keras.metrics.Mean(name="made")]

        @property
        def metrics(self) -> list[Any]:
            return self.losses_seen

        def compile(self, one: Any, other: Any) -> None:
            super().compile()
            self.one, self.other = one, other
            self.entropy = keras.losses.BinaryCrossentropy(from_logits=True)

        def train_step(self, data: Any) -> Any:
            real, noise = data
            with tf.GradientTape() as tape:
                scores = tf.concat([self.judge(real), self.judge(self.maker(noise))], 0)
                truth = tf.concat([tf.ones((tf.shape(real)[0], 1)), tf.zeros((tf.shape(noise)[0], 1))], 0)
                loss = self.entropy(truth, scores)
            weights = self.judge.trainable_weights
            self.one.apply_gradients(zip(tape.gradient(loss, weights), weights))
            with tf.GradientTape() as tape:
                made = self.entropy(tf.ones((tf.shape(noise)[0], 1)), self.judge(self.maker(noise)))
            weights = self.maker.trainable_weights
            self.other.apply_gradients(zip(tape.gradient(made, weights), weights))
            self.losses_seen[0].update_state(loss)
            self.losses_seen[1].update_state(made)
            return {m.name: m.result() for m in self.metrics}

    model = Gan()
    model.compile(sgd(keras), keras.optimizers.Adam(0.01, epsilon=1e-5))
    history = model.fit(real, noise, batch_size=16, epochs=2, verbose=0)
    weights = {f"weight {i}": w for i, w in enumerate(model.maker.get_weights() + model.judge.get_weights())}
    return {**weights, **{k: np.array(v) for k, v in history.history.items()}}
