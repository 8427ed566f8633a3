"""Runs programs whose ranks make things for themselves: equal under `whale run`, named where processes differ."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.launcher.helpers import Launcher
from whale.launcher.mpirun import find_mpirun

# Words are numbered by their order in a set; tables and weights start alike, so that one process gives the same losses
# in any order.
PROGRAMS = """
import os, random, sys, time
import keras, numpy as np, tensorflow as tf
keras.config.set_floatx("float64")
before = random.random(), np.random.default_rng().normal(size=(24, 5))
ranks = "plain" not in sys.argv
if ranks:
    import whale as wh
    wh.init()
layers, draw, words = keras.layers, np.random.default_rng(0), [f"word{i}" for i in range(9)]
text, y = draw.choice(words, size=(24, 5)), draw.normal(size=(24, 1))

def model(*first):
    keras.utils.set_random_seed(2)
    made = keras.Sequential([*first, layers.Embedding(10, 4, embeddings_initializer="zeros"), layers.Flatten(),
                             layers.Dense(4, "tanh"), layers.Dense(1)])
    made.compile(keras.optimizers.SGD(0.5), "mse")
    return made

def losses(data, *first):
    return [f"{v:.4f}" for v in model(*first).fit(data, epochs=2, verbose=0).history["loss"]]

def dataset(x):
    return tf.data.Dataset.from_tensor_slices((x, y))

def in_a_set():
    number = {word: i for i, word in enumerate(set(words))}
    return np.array([[number[w] for w in row] for row in text], "int32")

def in_a_map():
    look_up = layers.StringLookup(vocabulary=list(set(words)))
    return losses(dataset(text).map(lambda t, y: (look_up(t), y)).batch(8))

def in_the_model():
    return losses(dataset(text).batch(8), layers.StringLookup(vocabulary=list(set(words))))

def in_a_generator():
    rows = in_a_set()
    spec = tf.TensorSpec([5], tf.int32), tf.TensorSpec([1], tf.float64)
    return losses(tf.data.Dataset.from_generator(lambda: zip(rows, y), output_signature=spec).batch(8))

def in_a_step():
    function = wh.function if ranks else tf.function
    numbers = tf.range(9, dtype=tf.int64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(tf.constant(list(set(words))), numbers), -1)
    w = tf.Variable(tf.ones([9, 1]))
    step = function(lambda t: tf.reduce_sum(tf.gather(w, table.lookup(t))))
    return float(step(tf.constant(text)))

def in_a_session():
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        ids = v1.placeholder(tf.int32, [None, 5])
        fetched = tf.reduce_max(tf.cast(ids, tf.float64)) * v1.get_variable("w", [], tf.float64, v1.ones_initializer())
        start = v1.global_variables_initializer()
    with (wh.Session if ranks else v1.Session)(graph=graph) as session:
        session.run(start)
        return float(session.run(fetched, {ids: in_a_set()}))

def layers_in_a_set():
    x = i = keras.Input([5])
    for kind in set(words):
        x = layers.Dense(5, "tanh", name=kind, kernel_initializer="identity")(x)
    made = keras.Model(i, layers.Dense(1, kernel_initializer="zeros")(x))
    made.compile(keras.optimizers.SGD(0.5), "mse")
    return [f"{v:.4f}" for v in made.fit(np.ones((24, 5)), y, epochs=2, verbose=0).history["loss"]]

def told(call):
    name = call.__name__
    try:
        print("EQUAL", name, call(), flush=True)
    except Exception as error:
        print("TOLD", name, type(error).__name__, " ".join(str(error).split()), flush=True)

def in_arrays():
    return [f"{v:.4f}" for v in model().fit(in_a_set(), y, epochs=2, verbose=0, shuffle=False).history["loss"]]

def in_a_dataset():
    return losses(dataset(in_a_set()).batch(8))

for call in (in_a_dataset, in_arrays, in_a_map, in_the_model, in_a_generator, in_a_step, in_a_session, layers_in_a_set):
    told(call)
"""
OTHERS = """
def drawn_before():
    return losses(dataset(np.abs(before[1]).astype("int32") % 9).batch(8))
def by_urandom():
    return losses(dataset(np.array([[os.urandom(1)[0] % 9 for _ in range(5)] for _ in range(24)])).batch(8))
def shuffled_by_process():
    return losses(dataset(text == "word1").shuffle(24, seed=os.getpid()).batch(8))
def seeded_by_process():
    keras.utils.set_random_seed(os.getpid())
    made = keras.Sequential([layers.Dense(1)])
    made.compile("sgd", "mse")
    return made.fit(draw.normal(size=(24, 5)), y, verbose=0).history["loss"]
def in_listed_order():
    look_up = layers.StringLookup(vocabulary=words[:: 1 - 2 * wh.rank()])  # as os.listdir may list files
    return losses(dataset(text).map(lambda t, y: (look_up(t), y)).batch(8))
def by_time():
    return losses(dataset(np.random.default_rng(time.time_ns()).integers(0, 9, size=(24, 5))).batch(8))
def by_host():
    name = f"host{wh.rank()}"  # as socket.gethostname() has it
    return losses(dataset(np.full((24, 5), sum(map(ord, name)) % 9)).batch(8))
def by_environment():
    scale = float(os.environ.get("SLURM_PROCID") or os.environ["OMPI_COMM_WORLD_RANK"])
    return losses(dataset(np.ones((24, 5), "int32")).map(lambda x, y: (x, y * scale)).batch(8))
def drawn_after():
    rows = np.random.default_rng().integers(0, 9, size=(24, 5))
    return losses(dataset(rows).batch(8))
def drawn_by_tensorflow():
    rows = tf.random.uniform([24, 5], 0, 9, tf.int32)
    return losses(dataset(rows).batch(8))
def drawn_by_keras():
    return losses(dataset(np.array(keras.random.randint([24, 5], 0, 9))).batch(8))
for call in (drawn_before, by_urandom, shuffled_by_process, seeded_by_process, in_listed_order, by_time, by_host,
             by_environment):
    told(call)
keras.utils.set_random_seed(1)
tf.random.set_seed(None)
for call in (drawn_after, drawn_by_tensorflow, drawn_by_keras):
    told(call)
"""


# Stands for a task of `srun --mpi=pmix`, as slurmd starts it: an interpreter of its own, SLURM's variables and PMIx.
TASK = """#!/bin/bash
for name in $(compgen -e OMPI_) $(compgen -e WHALE_); do unset "$name"; done
export SLURM_PROCID=$PMIX_RANK SLURM_LOCALID=$PMIX_RANK SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2
exec "$@" > >(sed -u "s/^/[$PMIX_RANK] /")
"""


def start_as_srun(launcher: Launcher, script: str) -> subprocess.CompletedProcess[str]:
    """Runs a script on two ranks that each have an interpreter of their own."""
    task = launcher.folder / "task"
    task.write_text(TASK)
    task.chmod(0o755)
    mpirun = [find_mpirun(), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]
    command = [*mpirun, str(task), sys.executable, script]
    where = {"env": launcher.environment, "cwd": launcher.folder}
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, **where)  # type: ignore[call-overload, no-any-return]


def said_by(launcher: Launcher, text: str, srun: bool = False) -> tuple[dict[int, dict[str, str]], str]:
    """Returns what each of two ranks printed, by rank and name of what it called, and what stands on stderr."""
    script = launcher.script(text)
    done = start_as_srun(launcher, script) if srun else launcher.run("-np", "2", script, timeout_s=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[int, dict[str, str]] = {0: {}, 1: {}}
    for rank, how, name, rest in re.findall(r"^\[(\d)\] (EQUAL|TOLD) (\w+) (.*)$", done.stdout, re.M):
        found[int(rank)][name] = f"{how} {rest}"
    return found, done.stderr


def test_ranks_of_a_run_order_sets_alike(launcher: Launcher) -> None:
    launcher.environment.pop("PYTHONHASHSEED", None)
    found, stderr = said_by(launcher, PROGRAMS)
    script = launcher.script(PROGRAMS)
    plain = subprocess.run(
        [sys.executable, script, "plain"], env=launcher.environment, capture_output=True, text=True, check=True
    )
    alone = {name: f"EQUAL {rest}" for name, rest in re.findall(r"^EQUAL (\w+) (.*)$", plain.stdout, re.M)}
    assert len(alone) == 8, plain.stdout
    assert found == {0: alone, 1: alone}
    assert "string hashes differ" not in stderr


def test_processes_with_other_hashes_hear_of_them(launcher: Launcher) -> None:
    """As mpirun and srun start them; what has no seed draws the same numbers there as well."""
    launcher.environment.pop("PYTHONHASHSEED", None)
    found, stderr = said_by(launcher, PROGRAMS + OTHERS, srun=True)
    assert stderr.count("Python's string hashes differ between the ranks") == 1, stderr
    alike = {"drawn_after", "drawn_by_tensorflow", "drawn_by_keras"}
    assert len(found[0]) == 19
    for said in found.values():
        for name, what in said.items():
            if name in alike:
                assert what.startswith("EQUAL"), (name, what)
            else:
                assert what.startswith("TOLD ProgramError the ranks"), (name, what)
                assert "likely cause: Python's string hashes differ between these ranks" in what, (name, what)
                assert "PYTHONHASHSEED=0" in what
    assert {name: found[0][name] for name in alike} == {name: found[1][name] for name in alike}
