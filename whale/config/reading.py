"""Reads the configuration: dotted keys, each with one definition, from several sources in a fixed order.

A value is taken from the first source that has it: the command line (``whale run --set``), code (the dict given to
`Config`), the environment (``WHALE_COMMUNICATION_BUCKET_BYTES`` for ``communication.bucket_bytes``), the file named by
``WHALE_CONFIG`` (dotted keys with their values, in JSON or YAML), the default. An unknown key is an error, never
ignored.

Decisions: 0011, 0149.
"""

from __future__ import annotations

import copy
import difflib
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from whale.config import deepspeed
from whale.config.keys import KEYS, SECTIONS, Key
from whale.config.values import EmulatedNetwork, Mesh, parse_network
from whale.errors import ConfigError, find_similar

FILE_VARIABLE = "WHALE_CONFIG"
# Set by `whale run --set` for the ranks: a JSON object of keys and their values as text.
SETTINGS_VARIABLE = "WHALE_LAUNCHER_SETTINGS"
COMMAND_LINE = "command line"
NCCL_BUCKET_BYTES = 32 << 20  # large enough for NCCL to reach its bandwidth: DDP uses 25 MiB, Horovod 128
# The first Whale had environment variables of this section that are no keys here, and job scripts still set them.
_OF_FIRST_WHALE = "WHALE_COMMUNICATION_"


class Config(Mapping[str, Any]):
    """Holds the configuration of one run: every known key with its value. Immutable; lists are returned as tuples.

    Args:
        values: dotted keys set in code, e.g. `{"memory.zero": 2}`.
        environment: environment variables to read; None: those of this process.

    Raises:
        ConfigError: a key is unknown, a value has the wrong type or range, or the file cannot be read.
    """

    __slots__ = ("_origins", "_values")

    def __init__(
        self, values: Mapping[str, Any] | None = None, *, environment: Mapping[str, str] | None = None
    ) -> None:
        environment = os.environ if environment is None else environment
        self._values: dict[str, Any] = {key.name: key.default for key in KEYS}
        self._origins: dict[str, str] = {key.name: "default" for key in KEYS}
        # The weakest source first, so that a stronger one overwrites it.
        path = environment.get(FILE_VARIABLE)
        if path:
            self._take(_read_keys(path), f"file {path}")
        for key, text in _from_environment(environment):
            self._set(key, _parse(key, text), f"environment {key.variable}")
        self._take(values or {}, "code")
        for name, text in json.loads(environment.get(SETTINGS_VARIABLE) or "{}").items():
            self._set(_BY_NAME[name], _parse(_BY_NAME[name], text), COMMAND_LINE)

    def __getitem__(self, name: str) -> Any:
        return self._values[_find_key(name, "code").name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    def __repr__(self) -> str:
        given = {name: value for name, value in self._values.items() if self._origins[name] != "default"}
        return f"Config({given!r})"

    def but(self, values: Mapping[str, Any]) -> Config:
        """Returns a copy in which some keys have other values, as if these were set in code.

        Raises:
            ConfigError: a key is unknown, or a value has the wrong type or range.
        """
        found = copy.copy(self)
        found._values, found._origins = dict(self._values), dict(self._origins)
        found._take(values, "code")
        return found

    def origin(self, name: str) -> str:
        """Returns where a key's value comes from.

        That is ``command line``, ``code``, ``environment <variable>``, ``file <path>`` or ``default``.
        """
        return self._origins[_find_key(name, "code").name]

    @property
    def bucket_bytes(self) -> int:
        """Returns ``communication.bucket_bytes``, or `NCCL_BUCKET_BYTES` if NCCL is the backend and the key is not
        set.
        """
        name = "communication.bucket_bytes"
        with_nccl = self["communication.backend"] == "nccl" and self.origin(name) == "default"
        return NCCL_BUCKET_BYTES if with_nccl else self[name]

    @property
    def network(self) -> EmulatedNetwork:
        """Returns the parsed value of ``debug.emulate_network``."""
        return parse_network(self["debug.emulate_network"])

    def _take(self, values: Mapping[str, Any], origin: str) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping) and name in SECTIONS and not isinstance(value, Mesh):
                _refuse_nested(name, value, origin)
            self._set(_find_key(name, origin), value, origin)

    def _set(self, key: Key, value: Any, origin: str) -> None:
        self._values[key.name] = _check_value(key, value, origin)
        self._origins[key.name] = origin


_BY_NAME = {key.name: key for key in KEYS}
# Keys as scripts of the first Whale write them.
_BARE = {"num_micro_batch": "pipeline.micro_batches", "num_task_graph": "pipeline.stages"}


def _find_key(name: object, origin: str) -> Key:
    if isinstance(name, str) and name in _BARE:
        return _BY_NAME[_BARE[name]]
    if isinstance(name, str) and name in _BY_NAME:
        return _BY_NAME[name]
    if theirs := deepspeed.describe_field(str(name)):
        raise ConfigError(
            f"{name!r} is a field of DeepSpeed's configuration, not a key of Whale's",
            source=origin,
            expected=theirs,
            action="`whale config --from ds_config.json` translates a whole file of DeepSpeed's to Whale's keys",
        )
    near = nearest(str(name))
    raise ConfigError(
        f"unknown configuration key {name!r}",
        source=origin,
        expected=near or ", ".join(_BY_NAME),
        action=f"write {near!r}, if that is meant: {_BY_NAME[near].help}" if near else "use one of the known keys",
    )


def _refuse_nested(section: str, values: Mapping[str, Any], origin: str) -> NoReturn:
    """Raises an error about a section with nested keys (`memory: {zero: 2}`), or a mesh given as a mapping.

    Raises:
        ConfigError: always.
    """
    expected = ", ".join(f"{section}.{name}: {value}" for name, value in values.items()) or f"{section}.KEY: VALUE"
    action = "write each key in full, with its section's name and a dot in front"
    if section in _BY_NAME and not any(f"{section}.{name}" in _BY_NAME for name in values):
        axes = [f"{name}={size}" for name, size in values.items()]
        expected = f"wh.Mesh({', '.join(axes)})" if origin == "code" else f"{section}: {','.join(axes)}"
        action = "write the mesh as expected above"
    raise ConfigError(
        f"the section {section!r} of the configuration is given as a mapping of nested keys",
        source=origin,
        given=f"{section}: {', '.join(map(str, values))}",
        expected=expected,
        action=action,
    )


def read_settings(given: Sequence[str]) -> dict[str, str]:
    """Parses the arguments of ``--set``: ``memory.zero=2``, or ``zero=2`` if no other key ends with that word.

    Returns:
        Key -> its value as text; the last value, if a key is given twice.

    Raises:
        ConfigError: an argument names no known key, or gives no value, or one of the wrong type or range.
    """
    found: dict[str, str] = {}
    for one in given:
        name, equals, text = one.partition("=")
        ends = [key.name for key in KEYS if key.name == name or key.name.rpartition(".")[2] == name]
        if name in _BY_NAME or len(ends) == 1:
            key = _BY_NAME.get(name) or _BY_NAME[ends[0]]
            if not equals:
                raise ConfigError(
                    f"the configuration key {key.name!r} is given no value",
                    given=f"--set {one}",
                    expected=f"{name}={_describe_expected(key)}",
                    action=f"write a value; the key means: {key.help}",
                )
            _check_value(key, _parse(key, text), COMMAND_LINE)
            found[key.name] = text
            continue
        if ends:
            raise ConfigError(
                f"more than one configuration key ends with {name!r}",
                given=f"--set {one}",
                expected=", ".join(ends),
                action="write one of these",
            )
        whole = {key.name.rpartition(".")[2]: key.name for key in KEYS}
        near = whole.get(find_similar(name, whole)) or nearest(name)
        raise ConfigError(
            f"unknown configuration key {name!r}",
            given=f"--set {one}",
            expected=near or ", ".join(_BY_NAME),
            action=f"write --set {near}={text}, if that is meant: {_BY_NAME[near].help}" if near else "use a known key",
        )
    return found


def read_value(name: str, text: str) -> Any:
    """Parses a key's value from text, in the form that the environment and the command line use.

    Raises:
        ConfigError: there is no such key, or the value has the wrong type or range.
    """
    key = _find_key(name, COMMAND_LINE)
    return _check_value(key, _parse(key, text), COMMAND_LINE)


def nearest(name: str, alike: float = 0.6) -> str:
    """Returns the known key that an unknown name most likely means; "" if none is similar.

    Similarity counts equal letters, and words of the name that occur in a key's name, values or help text, so that a
    key is also found by what other software calls it or by what it does. Words that few keys contain count most. If the
    first part of a dotted name is a key itself, that key is meant: "mesh" for "mesh.shape".

    Args:
        alike: least similarity, between 0 and 2, of names that may mean the same.
    """
    name = name.lower()
    stem, dot, _ = name.partition(".")
    owner = next((key.name for key in KEYS if stem in (key.name, key.name.rpartition(".")[2])), "")
    if dot and owner and not difflib.get_close_matches(name, [key.name for key in KEYS], 1, 0.85):
        return owner
    words = [word for word in re.findall("[a-z0-9]+", name) if len(word) > 2]
    said = {word: {key.name: _says(key, word) for key in KEYS} for word in words}
    weights = {word: 1.0 / (1 + sum(much > 0 for much in said[word].values())) for word in words}
    most = sum(weights.values()) or 1.0
    likeness = {
        key.name: difflib.SequenceMatcher(None, name, key.name).ratio()
        + sum(weight * said[word][key.name] for word, weight in weights.items()) / most
        for key in KEYS
    }
    best = max(likeness, key=lambda one: likeness[one])
    return best if likeness[best] >= alike else ""


def _says(key: Key, word: str) -> float:
    """Returns how prominently a key mentions a word, or words that begin with it: 1 in its name, 0.8 in values, 0.5
    in help.
    """
    for much, text in ((1.0, key.name), (0.8, " ".join(key.choices)), (0.5, key.help)):
        if re.search(rf"(?<![a-z0-9]){word}", text.lower()):
            return much
    return 0.0


def _check_value(key: Key, value: Any, origin: str) -> Any:
    """Checks a value and converts it to the key's type (list -> tuple, int -> float for a float key, text -> mesh)."""

    def wrong() -> ConfigError:
        return ConfigError(
            f"a wrong value for the configuration key {key.name!r}",
            given=repr(value),
            source=origin,
            expected=_describe_expected(key),
            action=f"correct it; the key means: {key.help}",
        )

    if key.type == "mesh" and origin != "code" and isinstance(value, str):
        value = Mesh.parse(value)
    if key.type == "float" and type(value) is int:
        value = float(value)  # a whole number is a good float; anything else keeps its type and is refused below
    if key.type.startswith("list"):
        if not isinstance(value, (list, tuple)):
            raise wrong()
        value = parts = tuple(value)
    else:
        parts = (value,)
    # type() instead of isinstance(): True is an int in Python, and never a number of bytes.
    if any(type(part) is not _TYPES[key.type] for part in parts):
        raise wrong()
    if key.minimum is not None and not all(part >= key.minimum for part in parts):
        raise wrong()
    if key.maximum is not None and not all(part <= key.maximum for part in parts):
        raise wrong()
    if key.choices and not set(parts) <= set(key.choices):
        raise wrong()
    if key.name == "debug.emulate_network":
        parse_network(value)
    return value


_TYPES: dict[str, type] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "list[int]": int,
    "list[str]": str,
    "mesh": Mesh,
}


def _describe_expected(key: Key) -> str:
    """Returns a text that describes the values that a key may have, for errors."""
    if key.type == "mesh":
        return "wh.Mesh(stage=2, data=2, tensor=2) in code, stage=2,data=2,tensor=2 in files and the environment"
    a_list = key.type.startswith("list")
    expected = " or ".join(repr(choice) for choice in key.choices)
    expected = f"a list of {expected}" if a_list and expected else expected or key.type
    if key.minimum is not None:
        expected += f", at least {key.minimum:g}"
    if key.maximum is not None:
        expected += f" and at most {key.maximum:g}"
    return expected + " each" * (a_list and key.minimum is not None)


def _parse(key: Key, text: str) -> Any:
    """Converts text to a key's type; text that cannot be converted is returned as it is, for `_check_value` to
    refuse.
    """
    try:
        if key.type == "int":
            return int(text)
        if key.type == "bool":
            return {"1": True, "true": True, "0": False, "false": False}.get(text.lower(), text)
        if key.type == "float":
            return float(text)
        if key.type.startswith("list"):
            parts = [part.strip() for part in text.split(",") if part.strip()]
            return parts if key.type == "list[str]" else [int(part) for part in parts]
    except ValueError:
        return text
    return text


# Variables that launchers and tools set for processes, and those that Kubernetes sets for a service named whale.
_NO_KEYS = re.compile(
    "WHALE_(RANK|SIZE|LOCAL_RANK|LOCAL_SIZE|RESTART|JOINS|SLOTS|PEERS|GROWS|APART|CONTROL|TRACE_PIPE|RUN_FILES|COUNTERS"
    "|PLANS|TTY|LOOPBACK|EMULATE_LINK|VERIFY_PASSES|LIBRARIES|(LAUNCHER|TEST|SERVICE|PORT)_.*)"
)


def _from_environment(environment: Mapping[str, str]) -> list[tuple[Key, str]]:
    by_variable = {key.variable: key for key in KEYS}
    sections = tuple(f"WHALE_{section.upper()}_" for section in SECTIONS)
    found = []
    for variable, text in environment.items():
        if variable in by_variable:
            found.append((by_variable[variable], text))
            continue
        if not variable.startswith("WHALE_") or variable == FILE_VARIABLE or _NO_KEYS.fullmatch(variable):
            continue
        name = variable.removeprefix("WHALE_").replace("_", ".")
        if variable.startswith(_OF_FIRST_WHALE):
            rest, *known = (one.removeprefix(_OF_FIRST_WHALE) for one in (variable, *by_variable))
            is_misspelt = bool(difflib.get_close_matches(rest, known, 1, 0.8))
        else:
            is_misspelt = variable.startswith(sections) or bool(nearest(name, 0.9))
        if not is_misspelt:
            warnings.warn(
                f"{variable}={text} sets nothing: Whale's configuration has no such key; unset the variable, or see "
                "`whale config show` for the keys",
                stacklevel=4,
            )
            continue
        near = nearest(name)
        raise ConfigError(
            f"the environment variable {variable} sets no known configuration key",
            given=f"{variable}={text}",
            expected=_BY_NAME[near].variable if near else ", ".join(by_variable),
            action="correct the variable's name, or unset it",
        )
    return found


def _read_keys(path: str) -> Mapping[str, Any]:
    """Reads a file of Whale's keys.

    Raises:
        ConfigError: it cannot be read, or is a configuration of DeepSpeed's.
    """
    fields = read_file(path)
    if fields.keys() - _BY_NAME.keys() and deepspeed.is_deepspeed(fields):
        keys = deepspeed.translate(fields).keys
        raise ConfigError(
            "the configuration file is one of DeepSpeed's, with no keys of Whale's",
            given=path,
            expected="\n    ".join(["", *(f"{name}: {json.dumps(value)}" for name, value in keys.items())])
            if keys
            else "a file of Whale's keys; none of this file's fields has to be set in Whale",
            action=f"`whale config --from {path}` writes such a file, and says what becomes of the other fields",
        )
    return fields


def read_file(path: str) -> Mapping[str, Any]:
    """Reads a mapping from a JSON file, or from a YAML file if its name ends with .yaml or .yml.

    Raises:
        ConfigError: it cannot be read.
    """
    import msgspec  # only imported when a file is named: `import whale` and the commands stay fast

    try:
        with open(path, "rb") as file:
            data = file.read()
        if path.endswith((".yaml", ".yml")):
            return msgspec.yaml.decode(data, type=dict[str, Any] | None) or {}  # None: it has comments alone
        return msgspec.json.decode(data, type=dict[str, Any])
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            "the configuration file cannot be read",
            given=f"{FILE_VARIABLE}={path}",
            reason=error,
            expected='dotted keys with their values: {"communication.bucket_bytes": 1048576} in JSON, a line '
            "`communication.bucket_bytes: 1048576` for each in a file that ends with .yaml",
            action="correct the path or the file",
        ) from error
