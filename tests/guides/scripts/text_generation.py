"""Characters one after the other by an LSTM; after each epoch a callback writes a text with the model."""

import keras
import numpy as np

layers = keras.layers
text = "the quick brown fox jumps over the lazy dog and runs away from the slow bear " * 3
letters = sorted(set(text))
number = {c: i for i, c in enumerate(letters)}
length = 10
starts = range(0, len(text) - length, 3)
x = np.zeros((len(starts), length, len(letters)))
y = np.zeros((len(starts), len(letters)))
for i, begin in enumerate(starts):
    for t, c in enumerate(text[begin : begin + length]):
        x[i, t, number[c]] = 1
    y[i, number[text[begin + length]]] = 1
model = keras.Sequential(
    [keras.Input((length, len(letters))), layers.LSTM(12), layers.Dense(len(letters), activation="softmax")]
)
model.compile(loss="categorical_crossentropy", optimizer=keras.optimizers.RMSprop(0.01, epsilon=1e-5))
written = []


class Writer(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        sentence = text[:length]
        for _ in range(4):
            seen = np.zeros((1, length, len(letters)))
            for t, c in enumerate(sentence[-length:]):
                seen[0, t, number[c]] = 1.0
            sentence += letters[int(np.argmax(self.model.predict(seen, verbose=0)[0]))]
        written.append([number[c] for c in sentence])


history = model.fit(x, y, batch_size=16, epochs=2, callbacks=[Writer()], verbose=0)
result = {**history.history, "written": written, "weights": model.get_weights()}
