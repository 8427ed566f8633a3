"""Runs one program and saves what it computed: ``run.py PROGRAM FOLDER PLAN``; PLAN ``plain`` never imports whale."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import re
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

# Plan -> processes of `whale run`, configuration. Where there is one process, its ranks are threads of it.
_TWO = {"communication.in_process_ranks": 2}
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "replica": (2, {}),
    "auto_parallel": (1, {**_TWO, "mesh.auto_parallel": True}),
    "zero": (1, {**_TWO, "memory.zero": 2, "memory.zero_min_bytes": 0}),
    "three": (1, {"communication.in_process_ranks": 3}),
}
_AS_ONE_DEVICE = {"batch.norm_statistics": "batch", "batch.random": "global"}
# Functions of TensorFlow that make float32 of what has no type: by default, or of numbers of Python. By module.
_MADE_IN_FLOATX = {
    "": "ones zeros eye one_hot linspace constant convert_to_tensor broadcast_to exp sqrt cos sin acos square abs",
    "random": "normal uniform truncated_normal gamma",
    "math": "log exp sqrt",
}
NOISE = "OUTSIDE_NOISE"  # environment variable: units in the last place by which weights are moved
FLOAT64 = "OUTSIDE_FLOAT64"  # environment variable: Keras computes in float64


def main() -> None:
    program, folder, plan = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    sys.argv = [str(program)]
    sys.path.insert(0, str(program.parent))
    keras: Any = importlib.import_module("tf_keras" if os.environ.get("TF_USE_LEGACY_KERAS") else "keras")
    recording = importlib.import_module("tests.outside.recording").Recording(float(os.environ.get(NOISE, 0)))
    source, rank, wh = program.read_text(), 0, None
    if plan != "plain":
        wh = importlib.import_module("whale")
        wh.init({**_AS_ONE_DEVICE, **PLANS[plan][1]})
        rank = wh.rank()
        source = with_steps_of_whale(source)
    recording.watch_steps(None if wh is None else importlib.import_module("whale.runtime.function").Function)
    recording.watch_keras(keras)
    recording.watch_modules()
    keras.utils.set_random_seed(7)
    if os.environ.get(FLOAT64):
        keras.backend.set_floatx("float64")
        source = in_float64(source)
    shared = folder / plan  # which the ranks have in common, as a script's folder
    shared.mkdir(exist_ok=True)
    os.chdir(shared)
    if (program.parent / "prelude.py").exists():
        importlib.import_module("prelude")
    here = folder / f"{plan}-rank{rank}"
    here.mkdir(exist_ok=True)
    script = here / program.name
    script.write_text(source)
    # As the program itself: Keras looks for what functions name in the module that they are of.
    sys.modules["__main__"] = types.ModuleType("__main__")
    variables = vars(sys.modules["__main__"])
    variables |= {"__file__": str(script), **({} if wh is None else {"wh": wh})}
    begin_s = time.process_time()
    exec(compile(source, script, "exec", dont_inherit=True), variables)
    recording.note_weights(variables)
    np.savez(folder / f"{plan}-rank{rank}.npz", **recording.values)  # type: ignore[arg-type]
    seconds = {
        "first": recording.first_s,
        "first_wall": recording.first_wall_s,
        "whole": time.process_time() - begin_s,
    }
    (folder / f"{plan}-rank{rank}.json").write_text(json.dumps(seconds))


def in_float64(source: str) -> str:
    """Returns the source as it computes in float64: types that it names, and TensorFlow's where it names none."""
    for owner, names in _MADE_IN_FLOATX.items():
        module = functools.reduce(getattr, filter(None, owner.split(".")), tf)
        for name in names.split():
            setattr(module, name, _by_default_in_float64(getattr(module, name)))
    source = re.sub(r"\b(tf|np|numpy|tf\.dtypes)\.float32\b", r"\1.float64", source)
    return re.sub(r"([\"'])float32\1", r"\1float64\1", source)


def _by_default_in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)
    dtype = signature.parameters.get("dtype")
    defaulted = function is tf.one_hot or (dtype is not None and dtype.default is not None)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if defaulted:
            given.arguments.setdefault("dtype", tf.float64)
        elif given.arguments.get("dtype") is None:
            given.arguments = {name: _widen(value) for name, value in given.arguments.items()}
        return function(*given.args, **given.kwargs)

    return call


def _widen(value: Any) -> Any:
    """Returns numbers of Python, of which TensorFlow would make float32, as NumPy's float64."""
    if type(value) is float:
        return np.float64(value)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(map(_widen, value))
    return value


def with_steps_of_whale(source: str) -> str:
    """Returns the source with the one change that a user makes: steps of loops of their own are a wh.function."""
    return re.sub(r"\btf\.function\b", "wh.function", source)


if __name__ == "__main__":
    main()
