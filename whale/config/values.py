"""Defines configuration values that are more than a number or a word: a mesh, an emulated network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from whale.errors import ConfigError


class Mesh(Mapping[str, int]):
    """Arranges the ranks in a grid of named axes, outermost first: ``Mesh(stage=2, data=2, tensor=2)``.

    A mesh is a mapping of axis names to sizes; equal meshes have equal axes in the same order. On the command line and
    in files it is written ``stage=2,data=2,tensor=2``.

    Args:
        axes: sizes by name.

    Raises:
        ConfigError: a size is not a positive integer.
    """

    __slots__ = ("_sizes",)

    def __init__(self, **axes: int) -> None:
        for name, size in axes.items():
            if type(size) is not int or size < 1:
                raise ConfigError(
                    "an axis of a mesh has an invalid size",
                    given=f"{name}={size!r}",
                    expected="a positive integer",
                    action="correct the size",
                )
        self._sizes = axes

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Parses a mesh from text such as ``stage=2,data=2,tensor=2``; "" is a mesh without axes.

        Raises:
            ConfigError: a part is not a name with a positive number, or a name occurs twice.
        """
        found: dict[str, int] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, _, number = (p.strip() for p in part.partition("="))
            if not name.isidentifier() or not number.isdigit() or int(number) < 1 or name in found:
                raise ConfigError(
                    "a mesh cannot be parsed",
                    given=repr(text),
                    expected="names with sizes, each name once: stage=2,data=2,tensor=2",
                    action=f"correct the part {part!r}",
                )
            found[name] = int(number)
        return cls(**found)

    @property
    def size(self) -> int:
        """Returns the number of ranks in the mesh: the product of its axes' sizes."""
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
    """Describes an emulated link between ranks."""

    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class EmulatedNetwork:
    """Describes a network that is emulated between ranks on one host.

    Attributes:
        link: link that delays messages; None: no delay.
        hosts: number of ranks on each of several emulated hosts, which share no memory; (): the real hosts.
    """

    link: Link | None = None
    hosts: tuple[int, ...] = ()


def parse_network(text: str) -> EmulatedNetwork:
    """Parses ``debug.emulate_network``: latency in microseconds, bandwidth in 10^6 bytes per second, ranks of hosts.

    Args:
        text: for example ``"latency_us=50,bandwidth_MBps=200,hosts=2+2"``, or a part of it. If only one of latency and
            bandwidth is given, the other causes no delay (latency 0 s, infinite bandwidth).

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
                "debug.emulate_network cannot be parsed",
                given=repr(text),
                expected="latency_us=<number>,bandwidth_MBps=<number>,hosts=<ranks>+<ranks>, or some of these parts",
                action=f"correct the part {part.strip()!r}",
            )
        found[name] = value
    link = None
    if found.keys() & {"latency_us", "bandwidth_MBps"}:
        link = Link(found.get("latency_us", 0.0) * 1e-6, found.get("bandwidth_MBps", math.inf) * 1e6)
    return EmulatedNetwork(link, hosts)
