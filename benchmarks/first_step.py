"""Processor time from the start of a process to the end of its first step: Whale on two ranks beside plain TensorFlow.

    python -m benchmarks.first_step [--models ResNet50 GPT] [--rounds 1]

For each model: a plain `tf.function` in one process; `whale run -np 2` with wh.replica, and with auto_parallel, each in
a run that finds no kept plan and in one that finds those of the run before. Of two ranks that counts which takes more.
Printed is the least of the rounds, and its ratio to the plain one. Processor time, so that a busy machine
disturbs it less than the clock. Python's bytecode is kept, as it is where Whale is installed: a step that nobody
measures goes first.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
_SAYS = "processor seconds to the first step:"
_IMAGES = ("ResNet50", "DenseNet121", "MobileNetV2", "ConvNeXtTiny")
MODELS = ("MLP", "LSTM", "GPT", "BERT", *_IMAGES)
_LENGTH, _WORDS = 32, 512


def main() -> None:
    """Measures and prints; with ``--run``, is one of the measured processes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_step", description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--run", nargs=2, metavar=("MODEL", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        one_step(*options.run)
        return
    with tempfile.TemporaryDirectory() as bytecode:
        os.environ["PYTHONPYCACHEPREFIX"] = bytecode
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        compare(options.models, options.rounds)


def compare(models: Sequence[str], rounds: int) -> None:
    """A line for each model."""
    with tempfile.TemporaryDirectory() as cache:
        measured("MLP", "auto", cache)
    print(f"{'':14s}{'plain':>9s}" + "".join(f"{name:>20s}" for name in ("replica", "again", "auto", "again")))
    for model in models:
        found: list[list[float]] = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as cache:
                ways = ("plain", "replica", "replica", "auto", "auto")
                found.append([measured(model, way, cache) for way in ways])
        plain_s, *others_s = [min(seconds) for seconds in zip(*found)]
        line = "".join(f"{s:11.2f} s, x{s / plain_s:5.2f}" for s in others_s)
        print(f"{model:14s}{plain_s:7.2f} s{line}", flush=True)


def measured(model: str, way: str, cache: str) -> float:
    """Seconds of one process, or of that of two which takes more."""
    from whale.python import environment  # not where a plain process would import it

    script = [str(Path(__file__).resolve()), "--run", model, way]
    command = [sys.executable, *(() if way == "plain" else ("-m", "whale", "run", "-np", "2")), *script]
    known = environment() | {
        "WHALE_MESH_PLAN_CACHE": str(Path(cache, "plans")),
        "WHALE_MESH_AUTO_PARALLEL": str(way == "auto"),
    }
    done = subprocess.run(command, env=known, capture_output=True, text=True, check=False)
    said = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if _SAYS in line]
    if len(said) < (1 if way == "plain" else 2):
        raise RuntimeError(f"{model}, {way}: {done.stdout[-500:]} {done.stderr[-2000:]}")
    return max(said)


def one_step(model: str, way: str) -> None:
    """Builds the model, trains it for one step, and prints the processor seconds of all that."""
    import tensorflow as tf

    scope: Any = contextlib.nullcontext()
    function: Callable[..., Any] = tf.function
    if way != "plain":
        import whale as wh

        wh.init()
        function = wh.function
        scope = wh.replica() if way == "replica" else scope
    tf.keras.utils.set_random_seed(1)
    from benchmarks.steps import train_step

    with scope:
        network, x, y = built(model)
        step = function(train_step(network))
    float(step(x, y))
    print(_SAYS, f"{time.process_time():.2f}", flush=True)


def built(model: str) -> tuple[Any, Any, Any]:
    """(the model, a batch, its classes)."""
    import tensorflow as tf

    keras = tf.keras
    if model in _IMAGES:
        network = getattr(keras.applications, model)(
            weights=None, input_shape=(64, 64, 3), classes=10, classifier_activation=None
        )
        return network, tf.ones((8, 64, 64, 3)), tf.zeros(8, tf.int32)
    if model == "MLP":
        hidden = [keras.layers.Dense(256, activation="relu") for _ in range(8)]
        network = keras.Sequential([keras.layers.Input((64,)), *hidden, keras.layers.Dense(10)])
        return network, tf.ones((64, 64)), tf.zeros(64, tf.int32)
    words = keras.Input((_LENGTH,), dtype="int32")
    x = keras.layers.Embedding(_WORDS, 128)(words)
    if model == "LSTM":
        x = keras.layers.LSTM(128, return_sequences=True)(keras.layers.LSTM(128, return_sequences=True)(x))
    else:
        x = _transformer(keras, x, causal=model == "GPT")
    network = keras.Model(words, keras.layers.Dense(_WORDS)(x))
    return network, tf.zeros((8, _LENGTH), tf.int32), tf.zeros((8, _LENGTH), tf.int32)


def _transformer(keras: Any, x: Any, causal: bool, blocks: int = 12) -> Any:
    for _ in range(blocks):
        attention = keras.layers.MultiHeadAttention(4, 32, dropout=0.1)(x, x, use_causal_mask=causal)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dropout(0.1)(attention))
        hidden = keras.layers.Dense(512, activation="gelu")(x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dropout(0.1)(keras.layers.Dense(128)(hidden)))
    return x


if __name__ == "__main__":
    main()
