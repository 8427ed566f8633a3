"""Stands in for trackers and tuners that are not installed: guides' blocks call them as they call the real ones."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

_MADE: list[str] = []
CALLS: list[tuple[Any, ...]] = []  # what the stand-ins were asked for; empty where the real ones are


def stand_in(name: str) -> None:
    """Makes a package importable, by a stand-in if it is not installed."""
    CALLS.clear()
    if importlib.util.find_spec(name) is None:
        _MAKERS[name]()


def remove_all() -> None:
    """Takes the stand-ins away again."""
    for name in _MADE:
        sys.modules.pop(name, None)
    _MADE.clear()


def _module(name: str, **names: Any) -> ModuleType:
    found = sys.modules[name] = ModuleType(name)
    found.__dict__.update(names)
    _MADE.append(name)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, found)
    return found


def _wandb() -> None:
    import keras

    class WandbMetricsLogger(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
            CALLS.append(("log", epoch, *(logs or {})))

    def init(*, project: str, mode: str, config: Mapping[str, Any]) -> Any:
        CALLS.append(("init", project, mode, dict(config)))
        return SimpleNamespace(finish=lambda: CALLS.append(("finish",)))

    _module("wandb", init=init)
    _module("wandb.integration")
    _module("wandb.integration.keras", WandbMetricsLogger=WandbMetricsLogger)


def _mlflow() -> None:
    def log_metrics(metrics: Mapping[str, float], step: int) -> None:
        CALLS.append(("log_metrics", step, *metrics))

    _module(
        "mlflow",
        start_run=lambda: CALLS.append(("start_run",)),
        log_metrics=log_metrics,
        end_run=lambda: CALLS.append(("end_run",)),
    )


class _Drawn:
    """Values that a trial tries."""

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self.values: dict[str, Any] = {}

    def Int(self, name: str, low: int, high: int) -> int:
        self.values[name] = self._generator.randint(low, high)
        return int(self.values[name])

    def Float(self, name: str, low: float, high: float, sampling: str) -> float:
        assert sampling == "log"
        self.values[name] = low * (high / low) ** self._generator.random()
        return float(self.values[name])


class _RandomSearch:
    """Trains a model for each of ``max_trials`` draws, and keeps the best."""

    def __init__(
        self, build: Callable[[Any], Any], objective: str, *, max_trials: int, seed: int, directory: str,
        project_name: str, overwrite: bool,
    ) -> None:  # fmt: skip
        self._build, self._objective, self._count, self._seed = build, objective, max_trials, seed
        self._found: list[tuple[float, int, _Drawn]] = []

    def search(self, *args: Any, **options: Any) -> None:
        generator = random.Random(self._seed)
        for number in range(self._count):
            drawn = _Drawn(generator)
            history = self._build(drawn).fit(*args, **options).history
            self._found.append((min(history[self._objective]), number, drawn))
            CALLS.append(("trial", drawn.values))

    def get_best_hyperparameters(self) -> list[_Drawn]:
        return [drawn for _, _, drawn in sorted(self._found)]


def _keras_tuner() -> None:
    _module("keras_tuner", RandomSearch=_RandomSearch)


def _ray() -> None:
    reported: list[float] = []

    def fit(trial: Callable[[Any], None], space: Mapping[str, Any], how: Any) -> Any:
        generator, best = random.Random(1), []
        for _ in range(how.num_samples):
            config = {name: draw(generator) for name, draw in space.items()}
            trial(config)
            best.append((reported.pop(), config))
            CALLS.append(("trial", config))
        _, config = min(best, key=lambda one: one[0])
        return SimpleNamespace(get_best_result=lambda: SimpleNamespace(config=config))

    _module("ray")
    _module(
        "ray.tune",
        report=lambda metrics: reported.append(metrics["loss"]),
        with_resources=lambda trial, resources: trial,
        loguniform=lambda low, high: lambda generator: low * (high / low) ** generator.random(),
        TuneConfig=SimpleNamespace,
        Tuner=lambda trial, param_space, tune_config: SimpleNamespace(fit=lambda: fit(trial, param_space, tune_config)),
    )


_MAKERS = {"wandb": _wandb, "mlflow": _mlflow, "keras_tuner": _keras_tuner, "ray": _ray}
