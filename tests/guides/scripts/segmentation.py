"""A small U-Net: strided and separable convolutions, skip connections, a class for every pixel."""

import keras
import numpy as np

layers = keras.layers
rng = np.random.default_rng(0)
images, masks = rng.uniform(size=(32, 16, 16, 3)), rng.integers(0, 3, (32, 16, 16))
inputs = keras.Input((16, 16, 3))
h = layers.Conv2D(8, 3, strides=2, padding="same")(inputs)
h = layers.BatchNormalization()(h)
h = layers.Activation("relu")(h)
before = h
for width in (8, 12):
    h = layers.Activation("relu")(h)
    h = layers.SeparableConv2D(width, 3, padding="same")(h)
    h = layers.BatchNormalization()(h)
    h = layers.MaxPooling2D(3, strides=2, padding="same")(h)
    h = layers.add([h, layers.Conv2D(width, 1, strides=2, padding="same")(before)])
    before = h
for width in (12, 8, 4):
    h = layers.Activation("relu")(h)
    h = layers.Conv2DTranspose(width, 3, padding="same")(h)
    h = layers.UpSampling2D(2)(h)
    h = layers.add([h, layers.Conv2D(width, 1, padding="same")(layers.UpSampling2D(2)(before))])
    before = h
model = keras.Model(inputs, layers.Conv2D(3, 3, activation="softmax", padding="same")(h))
model.compile(keras.optimizers.Adam(1e-3, epsilon=1e-5), loss="sparse_categorical_crossentropy")
history = model.fit(images, masks, batch_size=8, epochs=1, validation_split=0.25, verbose=0)
result = {**history.history, "predicted": model.predict(images[:4], verbose=0), "weights": model.get_weights()}
