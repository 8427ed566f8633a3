"""A training script whose ranks are taken away: `script.py MODE RESULT FAULTS`; writes what it has trained to RESULT.

MODE: "loop" (whole batches), "shard" (each rank reads its rows), "save" (a checkpoint after every step), "fit" and
"arrays" (Keras, with a dataset or with arrays). In "zero1", "zero3", "stages", "split" and "mesh" (2 x tensor ranks)
ranks hold parts of variables; these stand beside others: "zero3+save". "large": parts lie where other ranks read them.
"hosts": two emulated ones, with two ranks and an mpirun each.
FAULTS: "5:1:kill,7:0:stop": in step 5 the rank that was started as number 1 is killed, ...; "late": as the step runs;
"host": all ranks of its host are killed, and their mpirun;
"slow": from that step on it needs longer for each of its rows; "copy": when the step is taken, before its copies are
sent; "join": one more rank joins, for which the program has to be one of "shard" or Keras'; "plan": when the ranks
next agree on a plan; "meet": in their next meeting; "move": a moment after all have what they need to go on from there;
"anew": a moment after all are ready to plan stages anew, which they do where a rank of "cuts" (auto_parallel) is slow;
"grow": a moment after all are ready to take a joining rank in (step -1: of that rank itself).
"""

import contextlib
import os
import random
import signal
import sys
import threading
import time

import numpy as np
import tensorflow as tf

import whale as wh
from whale.distributed import balance
from whale.runtime.compile import compile
from whale.runtime.context import find_running
from whale.runtime.elastic import agreement, elastic_run, generations
from whale.started import joins

BATCH, BATCHES, EPOCHS, WIDTH, LARGE = 24, 6, 2, 12, 60_000
LAST = 100 + EPOCHS * BATCHES  # behind it no step follows
generations.ALONE_BYTES = 150  # so that some pieces are sent alone, and others together
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "late": signal.SIGKILL}
_AGREED = {"move": {agreement.MET}, "grow": {agreement.WHOLE, agreement.GROWN}, "anew": {agreement.ANEW}}


class Faults:
    """What happens to this rank, by step."""

    def __init__(self, text: str, rank: int) -> None:
        parts = [part.split(":") for part in text.split(",") if part]
        self._mine = {int(step): kind for step, of, kind in parts if int(of) == rank}
        if any(kind == "slow" for *_, kind in parts):  # so that it is noticed within these few steps
            balance.STEPS, balance.SECONDS, balance.AGAIN_S = 2, 0.0, 0.0

    def strike(self, step: int) -> None:
        """Does what is to happen in this step."""
        kind = self._mine.get(step)
        if kind == "late":
            threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif kind == "slow":
            slow_down()
        elif kind == "join":
            grow()
        elif kind == "host":
            kill_host()
        elif kind == "plan":
            setattr(compile, "agree_on_plan", lambda *_: os.kill(os.getpid(), signal.SIGKILL))  # noqa: B010
        elif kind == "meet":
            setattr(elastic_run.Elastic, "_hear_statements", lambda *_: os.kill(os.getpid(), signal.SIGKILL))  # noqa: B010
        elif kind in _AGREED:
            agree_and_die(_AGREED[kind])
        elif kind == "copy" and (step == 0 or find_running().elastic._generations is not None) and step < LAST:
            setattr(generations.Generations, "_exchange_copies", lambda *_: os.kill(os.getpid(), signal.SIGKILL))  # noqa: B010
        elif kind is not None:
            os.kill(os.getpid(), _SIGNALS.get(kind, signal.SIGKILL))  # where nothing is copied, as by "kill"


def kill_host() -> None:
    """The mpirun of this rank is killed with all that it has started, this process last, as if its host were gone."""
    mpirun, tree = parent(os.getppid()), []
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError, StopIteration):
            children.setdefault(parent(int(name)), []).append(int(name))
    waiting = [mpirun]
    while waiting:
        tree.append(waiting.pop())
        waiting += children.get(tree[-1], [])
    for pid in sorted(tree, key=os.getpid().__eq__):
        os.kill(pid, signal.SIGKILL)


def parent(pid: int) -> int:
    """The process that has started another."""
    with open(f"/proc/{pid}/status") as file:
        return int(next(line for line in file if line.startswith("PPid:")).split()[1])


def grow() -> None:
    """The list of hosts has room for one more rank; returns when it has come, before it is taken in."""
    path, watch = os.environ["ELASTIC_HOSTS"], find_running().watch
    with open(path) as file:
        first, *others = file.read().split()
    name, slots = first.split(":")
    known = watch.list_changes(0, 0.0)
    before = sum(change.joined is not None for change in known)
    with open(path, "w") as file:
        file.write("\n".join([f"{name}:{int(slots) + 1}", *others, ""]))
    until_s = time.monotonic() + 200.0
    while sum(change.joined is not None for change in known) <= before:  # others may be gone meanwhile
        assert time.monotonic() < until_s, "nobody has come"
        known = watch.list_changes(len(known), 1.0)


def agree_and_die(kinds: set[int]) -> None:
    """When this rank next agrees on such a thing, it is killed within some milliseconds: it may act, or may not."""
    agree = agreement.Agreements.agree

    def agrees(self, news, kind, *others):
        if kind in kinds:
            threading.Timer(random.uniform(0.0, 0.01), os.kill, (os.getpid(), signal.SIGKILL)).start()
        agree(self, news, kind, *others)

    setattr(agreement.Agreements, "agree", agrees)  # noqa: B010


def slow_down() -> None:
    """From now on this rank needs 10 ms more for each of its rows, or 100 ms for those of its stage."""
    take = balance.WatchedSteps.take

    def slower(watched, run):
        return take(watched, lambda: (time.sleep(0.01 * watched.rows[wh.rank()] if watched.rows else 0.1), run())[1])

    setattr(balance.WatchedSteps, "take", slower)  # noqa: B010  # mypy: a method cannot be assigned to


def data() -> tf.data.Dataset:
    """Batches in an order that each epoch has for itself."""
    rng = np.random.default_rng(7)
    x, ids, y = rng.normal(size=(BATCH * BATCHES, 4)), rng.integers(0, 9, BATCH * BATCHES), rng.normal(size=(144, 1))
    return tf.data.Dataset.from_tensor_slices((x, ids, y)).shuffle(64, seed=3).batch(BATCH)


SMALL: dict[str, object] = {"memory.zero_min_bytes": 1}
CONFIGURED: dict[str, dict[str, object]] = {
    "zero1": {"memory.zero": 1, **SMALL},
    "zero3": {"memory.zero": 3, **SMALL},
    "mesh": {"mesh": wh.Mesh(data=2)},
    "cuts": {"mesh.auto_parallel": True, "pipeline.stages": 2, "mesh.plan_cache": ""},
}


def scopes(kinds: set[str]):
    """(around the first layer, around the second one) of a mode's program."""
    if "stages" in kinds:
        return wh.stage, wh.stage
    if "cuts" in kinds:
        return contextlib.nullcontext, contextlib.nullcontext
    return wh.replica, wh.split if kinds & {"split", "mesh"} else wh.replica


class Net:
    """A table, a normalisation with statistics over the batch, a count that the loss reads: all that can be written."""

    def __init__(self, kinds: set[str]) -> None:
        self.scopes, self.width = scopes(kinds), LARGE if "large" in kinds else WIDTH
        self.normalised = "cuts" not in kinds  # no pipeline has micro-batches where one needs the values of all
        rng = np.random.default_rng(0)
        self.table = tf.Variable(rng.normal(size=(9, 4)), name="table")
        self.w = tf.Variable(rng.normal(size=(4, self.width)), name="w")
        self.v = tf.Variable(rng.normal(size=(self.width, 1)), name="v")
        self.mean = tf.Variable(np.zeros(self.width), trainable=False, name="mean")
        self.count = tf.Variable(0, dtype=tf.int64, trainable=False, name="count")
        self.trained = [self.table, self.w, self.v]
        self.momenta = [tf.Variable(tf.zeros_like(v), trainable=False) for v in self.trained]

    @wh.function
    def step(self, x, ids, y):
        """One step of SGD with momentum; the loss before it."""
        self.count.assign_add(1)
        with tf.GradientTape() as tape:
            with self.scopes[0]():
                h = (x + tf.gather(self.table, ids)) @ self.w
                mean = tf.reduce_mean(h, 0) if self.normalised else tf.zeros_like(self.mean)
            with self.scopes[1]():
                out = tf.tanh(h - mean) @ self.v * (WIDTH / self.width)
            scale = 1 + 1 / tf.cast(self.count.read_value(), tf.float64)
            loss = scale * tf.reduce_mean((out - y) ** 2)
        if self.normalised:
            self.mean.assign(0.9 * self.mean + 0.1 * mean)
        for v, momentum, g in zip(self.trained, self.momenta, tape.gradient(loss, self.trained)):
            momentum.assign(0.9 * momentum + tf.convert_to_tensor(g))
            v.assign_sub(0.05 * momentum)
        return loss

    def values(self) -> list[np.ndarray]:
        """All that it has trained."""
        return [v.numpy() for v in (*self.trained, *self.momenta, self.mean, self.count)]


def loop(kinds: set[str], folder: str, faults: Faults) -> tuple[list[float], list[np.ndarray]]:
    """Trains in a loop of the script's."""
    with contextlib.nullcontext() if kinds & {"stages", "split", "mesh", "cuts"} else wh.replica():
        net = Net(kinds)
        batches = wh.shard(data()) if "shard" in kinds else data()
        seen = tf.Variable(np.zeros(EPOCHS * BATCHES), trainable=False, name="seen")
        named = {v.name.partition(":")[0]: v for v in (*net.trained, net.mean, net.count, seen)}
        saved = tf.train.Checkpoint(**named, momenta=net.momenta)
        manager = wh.CheckpointManager(saved, folder, 3) if "save" in kinds else None
        if joins():
            faults.strike(-1)
        if manager is not None:
            manager.restore_or_initialize()
        state = wh.State(epoch=0, losses=list(seen.numpy()[: int(net.count)]))
        losses, taken = state.losses, int(net.count)
        for epoch in range(state.epoch, EPOCHS):
            state.epoch = epoch
            for number, batch in enumerate(state.rest(batches) if "shard" in kinds else batches):
                if epoch * BATCHES + number < taken:  # before the checkpoint from which the run has started again
                    continue
                faults.strike(len(losses))
                losses.append(float(net.step(*batch)))
                if manager is not None:
                    faults.strike(100 + len(losses))
                    seen.assign(losses + [0.0] * (EPOCHS * BATCHES - len(losses)))
                    manager.save()
    if manager is not None:
        assert manager.latest_checkpoint.endswith(f"-{len(losses)}"), manager.latest_checkpoint
        reader = tf.train.load_checkpoint(manager.latest_checkpoint)
        assert np.array_equal(reader.get_tensor("w/.ATTRIBUTES/VARIABLE_VALUE"), net.w.numpy())
    return losses, net.values()


def fit(mode: str, faults: Faults) -> tuple[list[float], list[np.ndarray]]:
    """Trains by Keras."""
    import keras

    class Strike(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            faults.strike(batch + BATCHES * self.epoch)

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

    class Count(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.losses = []

        def on_train_batch_end(self, batch, logs=None):
            self.losses = [*self.losses, float(logs["loss"])]

    keras.backend.set_floatx("float64")
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(WIDTH, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    slower = keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=1e3)
    count = Count()
    asked = {"epochs": EPOCHS, "verbose": 0, "callbacks": [Strike(), count, slower]}
    if joins():
        faults.strike(-1)
    if mode == "fit":
        read, held_out = (data().map(lambda x, _, y: (x, y)) for _ in range(2))
        seen = model.fit(read, validation_data=held_out.take(2), **asked)
    else:
        x, _, y = (np.concatenate(parts) for parts in zip(*data().as_numpy_iterator()))
        seen = model.fit(x, y, batch_size=BATCH, validation_data=(x[:30], y[:30]), **asked)  # Keras shuffles
    assert seen.epoch == list(range(EPOCHS)) and len(count.losses) == EPOCHS * BATCHES, (seen.epoch, count.losses)
    return [*seen.history["loss"], *seen.history["val_loss"], *count.losses], [
        v.numpy() for v in (*model.variables, *model.optimizer.variables)
    ]


def main() -> None:
    """One rank, or one device."""
    mode, result, text = sys.argv[1:]
    several = "WHALE_RANK" in os.environ
    kinds = set(mode.split("+"))
    wh.init(
        {
            "fault.elastic": "memory" if several else "",
            "fault.join": "always",
            **{k: v for kind in kinds & {*CONFIGURED} for k, v in CONFIGURED[kind].items()},
        }
    )
    faults = Faults(text if several and not wh.restarts() else "", int(os.environ.get("WHALE_RANK", "0")))
    losses, values = fit(mode, faults) if mode in ("fit", "arrays") else loop(kinds, f"{result}.saved", faults)
    if wh.rank() == 0:
        np.savez(result, np.asarray(losses), *values)
        print(f"trained on {wh.size()} ranks")


if __name__ == "__main__":
    main()
