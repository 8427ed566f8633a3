"""Defines the values of configuration keys that are more than a number or a word: a mesh, an emulated network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from whale.errors import ConfigError


class Mesh(Mapping[str, int]):
    """A mesh: the ranks in a grid of named axes, outermost first. ``Mesh(stage=2, data=2, tensor=2)``.

    A mapping of each axis' name to its size, and a value: equal meshes have equal axes in the same order. As text, on
    the command line and in files, it is ``stage=2,data=2,tensor=2``.

    Args:
        axes: sizes by name.

    Raises:
        ConfigError: a size is no positive integer.
    """

    __slots__ = ("_sizes",)

    def __init__(self, **axes: int) -> None:
        for name, size in axes.items():
            if type(size) is not int or size < 1:
                raise ConfigError(
                    "an axis of a mesh has a size that it cannot have",
                    given=f"{name}={size!r}",
                    expected="a positive integer",
                    action="correct the size",
                )
        self._sizes = axes

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Reads a mesh from text: ``stage=2,data=2,tensor=2``; an empty one has no axes.

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
        return cls(**found)

    @property
    def size(self) -> int:
        """Returns how many ranks fill it."""
        return math.prod(self._sizes.values())

    def __getitem__(self, name: str) -> int:
        return self._sizes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and tuple(self._sizes.items()) == tuple(other._sizes.items())

    def __hash__(self) -> int:
        return hash(tuple(self._sizes.items()))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self._sizes.items())

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self._sizes.items())})"


@dataclass(frozen=True, slots=True)
class Link:
    """An emulated link between ranks."""

    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class EmulatedNetwork:
    """A network that is emulated between the ranks of one host.

    Attributes:
        link: which delays messages; None: they travel as fast as they can.
        hosts: the ranks of each of several hosts, which share no memory; (): the hosts are as they are.
    """

    link: Link | None = None
    hosts: tuple[int, ...] = ()


def parse_network(text: str) -> EmulatedNetwork:
    """Reads the value of ``debug.emulate_network``: latency in microseconds, bandwidth in 10^6 bytes per second, hosts.

    Args:
        text: for example ``"latency_us=50,bandwidth_MBps=200,hosts=2+2"``. Of a link of which one of two is left out,
            that causes no delay (latency 0 s, infinite bandwidth).

    Raises:
        ConfigError: a part is unknown, given twice, or not a number in its range.
    """
    found: dict[str, float] = {}
    hosts: tuple[int, ...] = ()
    for part in text.split(",") if text else ():
        name, _, number = part.strip().partition("=")
        try:
            value = math.nan if name == "hosts" else float(number)
            if name == "hosts" and not hosts:
                hosts = tuple(int(ranks) for ranks in number.split("+"))
        except ValueError:
            value, hosts = math.nan, ()
        smallest_is_legal = name == "latency_us" and value == 0
        is_link = name in ("latency_us", "bandwidth_MBps") and (value > 0 or smallest_is_legal)
        is_hosts = name == "hosts" and hosts and min(hosts) > 0
        if not (is_link or is_hosts) or name in found:
            raise ConfigError(
                "an emulated network cannot be read",
                given=repr(text),
                expected="latency_us=<number>,bandwidth_MBps=<number>,hosts=<ranks>+<ranks>, or some of it",
                action=f"correct the part {part.strip()!r}",
            )
        found[name] = value
    link = None
    if found.keys() & {"latency_us", "bandwidth_MBps"}:
        link = Link(found.get("latency_us", 0.0) * 1e-6, found.get("bandwidth_MBps", math.inf) * 1e6)
    return EmulatedNetwork(link, hosts)
