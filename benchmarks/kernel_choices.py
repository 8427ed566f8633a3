"""Measures what each substitution of kernels (the key `kernels`) gains on this processor: before and after.

    python -m benchmarks.kernel_choices [--models gpt mobilenet resnet50] [--seconds 60] [--threads 1]

Of the training step of each model on one rank, with Adam. ONEDNN_MAX_CPU_ISA=AVX2 before it caps all kernels. A line
for each kind: how many were measured, how many lose and would be left out, and the sums of both sides; then the losers.
Figures are kept in a folder of the run's own.
"""

from __future__ import annotations

import argparse
import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import whale as wh
from benchmarks.one_process import MODELS
from benchmarks.steps import train_step
from whale.runtime.compile.kernel_choices import MachineKernels, loses
from whale.runtime.context import require_current


def measure(name: str, seconds: float, folder: str) -> None:
    """Compiles a model's step and prints what its substitutions took."""
    wh.init({"communication.in_process_ranks": 1, "mesh.plan_cache": folder})
    tf.keras.utils.set_random_seed(1)
    model, (features, labels) = MODELS[name].make(tf.keras), MODELS[name].inputs(np.random.default_rng(0))
    step = wh.function(train_step(model, tf.keras.optimizers.Adam(1e-4)))
    inputs = [tf.constant(one) for one in features]
    step.compile_seconds(inputs[0] if len(inputs) == 1 else inputs, tf.constant(labels))
    kernels = require_current("the benchmark").planning.kernels
    assert isinstance(kernels, MachineKernels)
    kernels.measure_within(seconds)
    print(f"{name}: {len(kernels.read_file().waiting)} not measured")
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for one, pair in kernels.read_file().measured.items():
        by_kind.setdefault(one.partition(" ")[0], []).append(pair)
    for kind, pairs in by_kind.items():
        before_ms, after_ms = (1e3 * sum(pair[i] for pair in pairs) for i in range(2))
        lost = sum(loses(*pair) for pair in pairs)
        print(f"  {kind:<12} {len(pairs):3d} measured, {lost} lose; {before_ms:.2f} ms before, {after_ms:.2f} after")
    for one in kernels.read_file().declined:
        before_us, after_us = (1e6 * s for s in kernels.read_file().measured[one])
        print(f"    loses: {before_us:.0f} -> {after_us:.0f} us  {one[:120]}", flush=True)
    wh.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt", "mobilenet", "resnet50"])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each model")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o700)
            measure(name, options.seconds, folder)


if __name__ == "__main__":
    main()
