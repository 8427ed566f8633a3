"""A teacher is trained; a student learns from its softened predictions by compute_loss."""

import keras
import numpy as np

layers, ops = keras.layers, keras.ops
rng = np.random.default_rng(0)
x, y = rng.normal(size=(80, 10)), rng.integers(0, 4, 80)


def network(width):
    return keras.Sequential([keras.Input((10,)), layers.Dense(width, activation="relu"), layers.Dense(4)])


teacher, student = network(32), network(6)
teacher.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
taught = teacher.fit(x, y, batch_size=20, epochs=2, verbose=0)


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher
        self.soft, self.alpha, self.temperature = keras.losses.KLDivergence(), 0.1, 10

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False, training=True):
        teacher = self.teacher(x, training=False)
        hard = super().compute_loss(x, y, y_pred, sample_weight)
        soft = self.soft(ops.softmax(teacher / self.temperature, 1), ops.softmax(y_pred / self.temperature, 1))
        return self.alpha * hard + (1 - self.alpha) * soft * self.temperature**2

    def call(self, x):
        return self.student(x)


teacher.trainable = False
model = Distiller(student, teacher)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.01, epsilon=1e-5), loss=loss, metrics=["accuracy"])
history = model.fit(x, y, batch_size=20, epochs=2, verbose=0)
tested = model.evaluate(x, y, verbose=0)
result = {"taught": taught.history["loss"], **history.history, "tested": tested, "weights": student.get_weights()}
