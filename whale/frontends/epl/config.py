"""Implements ``epl.Config``, EPL's settings in groups, and translates them to Whale's configuration keys."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

from whale.errors import ConfigError

# Group -> setting -> default. A setting takes values of its default's type.
_GROUPS: dict[str, dict[str, Any]] = {
    "auto": {"auto_parallel": False},
    "io": {"drop_last_files": False, "unbalanced_io_slicing": False, "slicing": False},
    "communication": {
        "sparse_as_dense": False,
        "max_splits": 5,
        "num_communicators": 2,
        "fp16": False,
        "fp16_scale": 128,
        "clip_after_allreduce": False,
        "gradients_reduce_method": "mean",
    },
    "pipeline": {"num_stages": -1, "num_micro_batch": 1, "strategy": "preferbackward"},
    "gradient_checkpoint": {"type": "", "end_taskgraph": -1, "check_gradients": False},
    "zero": {"level": ""},
    "offload": {"level": ""},
    "amp": {"level": "", "debug_log": False, "loss_scale": "dynamic"},
    "cluster": {
        "device_place_prefer_intra_node": True,
        "run_visible_devices": "",
        "colocate_split_and_replicate": False,
    },
    "optimizer": {"num_apply_group": 1},
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "communication.gradients_reduce_method": ("mean", "sum"),
    "pipeline.strategy": ("preferbackward", "preferbackwardoptimizer", "preferforward"),
    "gradient_checkpoint.type": ("", "collection", "auto"),
    "zero.level": ("", "v0", "v1", "v2"),
    "offload.level": ("", "v0"),
    "amp.level": ("", "o1"),
}


class WrongConfigError(ConfigError, ValueError):
    """Raised for an unknown setting or a wrong value. It is also a ValueError, which EPL raises and scripts may
    catch.
    """


class _NoSettingError(ConfigError, AttributeError):
    """Raised if a script sets or reads an attribute of the configuration that is no setting; also an AttributeError."""


class _Group:
    """Holds the settings of one group, such as ``config.pipeline``, as attributes, and checks values that are
    assigned.
    """

    _name: str

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name
        self.__dict__.update(_GROUPS[name])

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _GROUPS[self._name]:
            raise _NoSettingError(
                "the configuration has no such setting",
                given=f"{self._name}.{name}",
                expected=f"one of {', '.join(f'{self._name}.{known}' for known in _GROUPS[self._name])}",
                action="use an existing name, such as the expected one",
            )
        self.__dict__[name] = _check(f"{self._name}.{name}", value)

    def __repr__(self) -> str:
        return f"{self._name}({', '.join(f'{n}={getattr(self, n)!r}' for n in _GROUPS[self._name])})"


class Config:
    """Holds EPL's settings, in groups: ``config.pipeline.num_micro_batch = 4``. To be passed to ``epl.init``.

    A setting's value comes from ``param_dict``, else from the environment (``EPL_PIPELINE_NUM_MICRO_BATCH=4``), else it
    is the default. Values that are text may be in upper or lower case.

    Args:
      param_dict: values by dotted name, e.g. ``{"pipeline.num_micro_batch": 4}``.

    Raises:
      ConfigError: an unknown name, or a value of a wrong type. The error is also a ValueError; if an attribute is set,
        an AttributeError for an unknown name.
    """

    def __init__(self, param_dict: Mapping[str, Any] | None = None) -> None:
        given = dict(param_dict or {})
        for group, settings in _GROUPS.items():
            self.__dict__[group] = _Group(group)
            for name in settings:
                key, variable = f"{group}.{name}", f"EPL_{group}_{name}".upper()
                if key in given:
                    setattr(self.__dict__[group], name, given.pop(key))
                elif variable in os.environ:
                    setattr(self.__dict__[group], name, _parse(key, os.environ[variable]))
        if given:
            known = [f"{group}.{name}" for group, settings in _GROUPS.items() for name in settings]
            near = difflib.get_close_matches(next(iter(given)), known, n=1)
            raise WrongConfigError(
                "the configuration has no such setting",
                given=", ".join(map(str, given)),
                expected=near[0] if near else ", ".join(known),
                action="use an existing name, such as the expected one",
            )

    def __setattr__(self, name: str, value: Any) -> None:
        raise _NoSettingError(
            "an attribute of epl.Config is a group of settings and cannot be assigned",
            given=f"config.{name} = ...",
            expected=f"an assignment to a setting of a group: {', '.join(_GROUPS)}",
            action="assign a setting, as in config.pipeline.num_micro_batch = 4",
        )

    def __repr__(self) -> str:
        return f"Config({', '.join(repr(self.__dict__[g]) for g in _GROUPS)})"

    # Groups are made from the table above.
    def __getattr__(self, name: str) -> Any:
        raise _NoSettingError(
            "the configuration has no such group",
            given=f"config.{name}",
            expected=", ".join(_GROUPS),
            action="use the name of one of these groups",
        )

    def to_whale(self) -> dict[str, Any]:
        """Returns the configuration keys of Whale that these settings correspond to, without those at Whale's default.

        The key ``batch.mode`` is always "local": in EPL each replica reads its own batch.
        """
        found: dict[str, Any] = {"batch.mode": "local"}
        found["pipeline.schedule"] = "gpipe" if self.pipeline.strategy == "preferforward" else "1f1b"
        found["memory.recompute"] = {"collection": "marked"}.get(kept := self.gradient_checkpoint.type, kept)
        found["memory.zero"] = ("", "v0", "v1", "v2").index(self.zero.level)
        found["memory.offload"] = {"v0": "parameters"}.get(self.offload.level, "")
        found["communication.wire_dtype"] = "float16" if self.communication.fp16 else ""
        if self.auto.auto_parallel:
            found["mesh.auto_parallel"] = True
            found["pipeline.stages"] = max(0, self.pipeline.num_stages)
            found["pipeline.micro_batches"] = self.pipeline.num_micro_batch
        if self.amp.level:
            found["precision.compute_dtype"] = "float16"
            if self.amp.loss_scale != "dynamic":
                found["precision.loss_scale"] = float(self.amp.loss_scale)
        # A setting at its default is left to Whale's own sources.
        usual = {"pipeline.schedule": "1f1b", "memory.zero": 0}
        return {key: value for key, value in found.items() if value != usual.get(key, "")}


def _check(key: str, value: Any) -> Any:
    group, name = key.split(".")
    usual = _GROUPS[group][name]
    if isinstance(value, str):
        value = value.lower()
    if key == "amp.loss_scale":
        return value if value == "dynamic" else _read_scale(value)
    good = isinstance(value, type(usual)) and (isinstance(value, bool) == isinstance(usual, bool))
    if not good or value not in _CHOICES.get(key, (value,)):
        raise _make_error(key, value)
    return value


def _read_scale(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise _make_error("amp.loss_scale", value) from None


def _parse(key: str, text: str) -> Any:
    group, name = key.split(".")
    usual = _GROUPS[group][name]
    if isinstance(usual, bool):
        return {"true": True, "false": False}.get(text.lower(), text)
    if isinstance(usual, int):
        try:
            return int(text)
        except ValueError:
            return text
    return text


def _make_error(key: str, value: Any) -> WrongConfigError:
    group, name = key.split(".")
    expected = " or ".join(map(repr, _CHOICES.get(key, ()))) or type(_GROUPS[group][name]).__name__
    if key == "amp.loss_scale":
        expected = "'dynamic' or a number"
    return WrongConfigError(
        f"the setting {key} cannot have this value",
        given=repr(value),
        expected=expected,
        action=f"set {key} of epl.Config to such a value",
    )
