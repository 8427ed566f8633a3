"""A replay buffer, an epsilon-greedy policy by predict_on_batch, and a target network, in a chain of five states."""

import collections
import random

import keras
import numpy as np

random.seed(0)
rng = np.random.default_rng(0)


def network():
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(12, activation="relu"), keras.layers.Dense(2, activation="linear")]
    )
    model.compile(loss="mse", optimizer=keras.optimizers.SGD(0.05))
    return model


model, target = network(), network()
target.set_weights(model.get_weights())
memory = collections.deque(maxlen=200)
one_hot = np.eye(5)
losses, rewards = [], []
for _episode in range(4):
    state, total = 0, 0.0
    for _step in range(12):
        explore = random.random() < 0.5
        action = random.randrange(2) if explore else int(np.argmax(model.predict_on_batch(one_hot[[state]])[0]))
        after = min(4, state + 1) if action else max(0, state - 1)
        reward, done = (1.0, True) if after == 4 else (-0.1, False)
        memory.append((state, action, reward, after, done))
        state, total = after, total + reward
        if len(memory) >= 16:
            batch = random.sample(list(memory), 16)
            states, actions, gains, nexts, ends = (np.array(column) for column in zip(*batch))
            future = np.max(target.predict_on_batch(one_hot[nexts]), axis=1)
            wanted = model.predict_on_batch(one_hot[states])
            wanted[np.arange(16), actions] = gains + 0.9 * future * (1 - ends)
            losses.append(model.train_on_batch(one_hot[states], wanted))
        if done:
            break
    rewards.append(total)
    target.set_weights(model.get_weights())
result = {"losses": losses, "rewards": rewards, "weights": model.get_weights()}
