"""Reads the configuration: dotted keys, one table of what is known, one order of sources.

A value is taken from the first source that has it: code (the dict given to `Config`), the environment
(``WHALE_COMMUNICATION_GROUP_BYTES`` for ``communication.group_bytes``), the JSON file named by ``WHALE_CONFIG``
(an object of dotted keys), the default. A key that is not in the table is an error, never ignored.
"""

from __future__ import annotations

import copy
import difflib
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from whale.config_keys import KEYS, Key
from whale.errors import ConfigError

FILE_VARIABLE = "WHALE_CONFIG"
# The first Whale had variables of this section that are no keys here, and job scripts still set them.
_OF_FIRST_WHALE = "WHALE_COMMUNICATION_"


_BY_NAME = {key.name: key for key in KEYS}


@dataclass(frozen=True, slots=True)
class Link:
    """An emulated link between ranks."""

    latency_s: float
    bandwidth_bytes_per_s: float


def parse_link(text: str) -> Link | None:
    """Reads the value of ``communication.emulate_link``: latency in microseconds, bandwidth in 10^6 bytes per second.

    Args:
        text: for example ``"latency_us=50,bandwidth_MBps=200"``. A part left out means no delay of that kind
            (latency 0 s, infinite bandwidth). An empty text means that no link is emulated.

    Raises:
        ConfigError: a part is unknown, given twice, or not a number in its range.
    """
    if not text:
        return None
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        smallest_is_legal = name == "latency_us" and value == 0
        if name not in ("latency_us", "bandwidth_MBps") or name in found or not (value > 0 or smallest_is_legal):
            raise ConfigError(
                "an emulated link cannot be read",
                given=repr(text),
                expected="latency_us=<number>,bandwidth_MBps=<number>",
                action=f"correct the part {part.strip()!r}",
            )
        found[name] = value
    return Link(found.get("latency_us", 0.0) * 1e-6, found.get("bandwidth_MBps", math.inf) * 1e6)


def parse_mesh(text: str) -> dict[str, int]:
    """Reads the value of ``mesh``: names of axes with their sizes, outermost first; an empty text names none.

    Raises:
        ConfigError: a part is no name with a positive number, or a name is there twice.
    """
    found: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, number = (p.strip() for p in part.partition("="))
        if not name.isidentifier() or not number.isdigit() or int(number) < 1 or name in found:
            raise ConfigError(
                "a mesh cannot be read",
                given=repr(text),
                expected="names with sizes, each name once: stage=2,data=2,tensor=2",
                action=f"correct the part {part!r}",
            )
        found[name] = int(number)
    return found


class Config(Mapping[str, Any]):
    """The configuration of one run: every known key with its value. Immutable; lists are returned as tuples.

    Args:
        values: dotted keys set in code.
        environment: the environment to read; that of this process unless given.

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
            self._take(_read_file(path), f"file {path}")
        for key, text in _from_environment(environment):
            self._set(key, _parse(key, text), f"environment {key.variable}")
        self._take(values or {}, "code")

    def __getitem__(self, name: str) -> Any:
        return self._values[_known(name, "code").name]

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
        """Returns a copy with other values, as if they were set in code.

        Raises:
            ConfigError: a key is unknown, or a value has the wrong type or range.
        """
        found = copy.copy(self)
        found._values, found._origins = dict(self._values), dict(self._origins)
        found._take(values, "code")
        return found

    def origin(self, name: str) -> str:
        """Returns the source of a key's value: ``code``, ``environment <variable>``, ``file <path>`` or ``default``."""
        return self._origins[_known(name, "code").name]

    @property
    def zero_level(self) -> int:
        """Returns ``zero.level`` as a number."""
        return {"v0": 1, "v1": 2}.get(self["zero.level"]) or int(self["zero.level"])

    @property
    def link(self) -> Link | None:
        """Returns the emulated link, or None."""
        return parse_link(self["communication.emulate_link"])

    @property
    def mesh(self) -> dict[str, int]:
        """Returns ``mesh`` as sizes by names."""
        return parse_mesh(self["mesh"])

    def _take(self, values: Mapping[str, Any], origin: str) -> None:
        for name, value in values.items():
            self._set(_known(name, origin), value, origin)

    def _set(self, key: Key, value: Any, origin: str) -> None:
        self._values[key.name] = _checked(key, value, origin)
        self._origins[key.name] = origin


# Keys as scripts of the first Whale write them.
_BARE = {"num_micro_batch": "pipeline.num_micro_batch", "num_task_graph": "pipeline.num_stages"}


def _known(name: object, origin: str) -> Key:
    if isinstance(name, str) and name in _BARE:
        return _BY_NAME[_BARE[name]]
    if isinstance(name, str) and name in _BY_NAME:
        return _BY_NAME[name]
    near = difflib.get_close_matches(str(name), _BY_NAME, n=1, cutoff=0.5)
    raise ConfigError(
        f"unknown configuration key {name!r}",
        source=origin,
        expected=near[0] if near else ", ".join(_BY_NAME),
        action=f"write {near[0]!r}" if near else "use one of the known keys",
    )


def _checked(key: Key, value: Any, origin: str) -> Any:
    """Checks a value and returns it in the key's own type (list -> tuple, int -> float where a float is expected)."""

    def wrong() -> ConfigError:
        expected = " or ".join(repr(choice) for choice in key.choices) or key.type
        if key.minimum is not None:
            expected += f", at least {key.minimum:g}" + (" each" if key.type.startswith("list") else "")
        return ConfigError(
            f"a wrong value for the configuration key {key.name!r}",
            given=repr(value),
            source=origin,
            expected=expected,
            action=f"correct it; the key means: {key.help}",
        )

    element: type
    if key.name == "mesh" and isinstance(value, Mapping):
        value = ",".join(f"{name}={size}" for name, size in value.items())
    if key.choices and type(value) is int:
        value = str(value)  # zero.level=1
    if key.type.startswith("list"):
        if not isinstance(value, (list, tuple)):
            raise wrong()
        element = str if key.type == "list[str]" else int
        value, parts = tuple(value), tuple(value)
    elif key.type == "float":
        # A whole number is a good float; anything else keeps its type and is refused below.
        value = float(value) if type(value) is int else value
        element, parts = float, (value,)
    else:
        element, parts = {"str": str, "int": int, "bool": bool}[key.type], (value,)
    # type() instead of isinstance(): True is an int in Python, and never a number of bytes.
    if any(type(part) is not element for part in parts):
        raise wrong()
    if key.minimum is not None and not all(part >= key.minimum for part in parts):
        raise wrong()
    if key.choices and value not in key.choices:
        raise wrong()
    if key.name == "communication.emulate_link":
        parse_link(value)
    if key.name == "mesh":
        parse_mesh(value)
    return value


def _parse(key: Key, text: str) -> Any:
    """Parses the text of an environment variable; text that does not fit is returned as it is."""
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


def _from_environment(environment: Mapping[str, str]) -> list[tuple[Key, str]]:
    by_variable = {key.variable: key for key in KEYS}
    # Only variables of a known section can be misspelt keys; others (WHALE_RANK) belong to other parts.
    sections = tuple({f"WHALE_{key.name.split('.')[0].upper()}_" for key in KEYS if "." in key.name})
    found = []
    for variable, text in environment.items():
        if variable in by_variable:
            found.append((by_variable[variable], text))
        elif variable.startswith(_OF_FIRST_WHALE) and not difflib.get_close_matches(
            variable.removeprefix(_OF_FIRST_WHALE), [v.removeprefix(_OF_FIRST_WHALE) for v in by_variable], 1, 0.8
        ):
            warnings.warn(f"{variable}={text} sets nothing: no key of Whale's configuration is called so", stacklevel=4)
        elif variable.startswith(sections):
            near = difflib.get_close_matches(variable, by_variable, n=1, cutoff=0.5)
            raise ConfigError(
                f"the environment variable {variable} sets no known configuration key",
                given=f"{variable}={text}",
                expected=near[0] if near else ", ".join(by_variable),
                action="correct or unset it",
            )
    return found


def _read_file(path: str) -> Mapping[str, Any]:
    import msgspec  # only read when a file is named: `import whale` and the verbs stay fast

    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=dict[str, Any])
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            "the configuration file cannot be read",
            given=f"{FILE_VARIABLE}={path}",
            reason=error,
            expected='a JSON object of dotted keys, for example {"communication.group_bytes": 1048576}',
            action="correct the path or the file",
        ) from error
