"""Reads the catalogue's data files (devices.yaml, links.yaml, efficiency.yaml) and finds entries by name.

Files give figures in the units of data sheets (TFLOP/s, GB/s); properties return FLOP/s, bytes, bytes/s and seconds.

Decision: 0033.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml
from msgspec import Meta

from whale.errors import ClusterError

FOLDER = Path(__file__).resolve().parent
Positive = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
VENDORS = frozenset("amd aws geforce google huawei instinct intel nvidia tesla".split())
# The loader in C, where PyYAML was built with it, is ten times faster.
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class LOADER(_Base):  # type: ignore[misc]
    """Loads YAML with numbers as JSON writes them: 4e-06 is a number, where YAML 1.1 requires a decimal point."""


LOADER.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(0|[1-9][0-9]*)(\.[0-9]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Holds the fields that all catalogue entries have: a name, and the source of each field's figure."""

    name: str
    sources: dict[str, str]

    def find_source(self, field: str) -> str | None:
        """Returns where a field's figure comes from, or None if the entry does not say."""
        return next((text for key, text in self.sources.items() if field in key.split(",")), None)


# Kernels of fused attention, oldest first; those of cuDNN 9 count as FlashAttention 3, which is about as fast.
AttentionKernel = Literal["flash-1", "flash-2", "flash-3"]
ATTENTION_KERNELS: tuple[AttentionKernel, ...] = ("flash-1", "flash-2", "flash-3")


class Efficiency(Entry, frozen=True):
    """Holds an efficiency curve: which fraction of a device's peaks kernels reach (kernels/compute.py has the
    formulas).

    Attributes:
        matmul_fraction: fraction of peak FLOP/s that large matrix products reach.
        matmul_fill_k: time of a tile's start and end in a matrix product, in steps of the inner dimension.
        memory_fraction: fraction of the memory bandwidth that streaming kernels reach.
        kernel_us: microseconds that each kernel takes at least.
        attention_fraction: fraction of peak FLOP/s that the first fused attention kernels reach on long sequences.
        attention_ramp: sequence length at which fused attention reaches half of that.
        variation: standard deviation of speed between equal devices, relative.
        matmul_fractions: `matmul_fraction` by dtype, if it differs.
        attention_fractions: `attention_fraction` of later attention kernels that run on the device.
    """

    matmul_fraction: Fraction
    matmul_fill_k: Annotated[float, Meta(ge=0)]
    memory_fraction: Fraction
    kernel_us: Annotated[float, Meta(ge=0)]
    attention_fraction: Fraction
    attention_ramp: Annotated[float, Meta(ge=0)]
    variation: Annotated[float, Meta(ge=0, lt=0.5)]
    matmul_fractions: dict[str, Fraction] = {}
    attention_fractions: dict[AttentionKernel, Fraction] = {}

    def find_matmul_fraction(self, dtype: str) -> float:
        """Returns the fraction of peak FLOP/s that matrix products with operands of a dtype reach."""
        return self.matmul_fractions.get(dtype, self.matmul_fraction)

    def find_attention_fraction(self, kernel: AttentionKernel) -> float:
        """Returns the fraction of peak FLOP/s that a fused attention kernel, or the latest known one before it,
        reaches.
        """
        older = reversed(ATTENTION_KERNELS[: ATTENTION_KERNELS.index(kernel) + 1])
        return next(
            (self.attention_fractions[k] for k in older if k in self.attention_fractions), self.attention_fraction
        )


# The memory of a process's own on a device, in GB: CUDA context, library handles and workspaces (Gao et al.,
# "Estimating GPU memory consumption of deep learning models", FSE 2020, give 0.5 to 1 GB on V100; newer contexts are
# larger).
CONTEXT_GB = 1.0


class Device(Entry, frozen=True):
    """Describes one accelerator or CPU socket.

    Attributes:
        kind: gpu: runs TensorFlow's GPU kernels; accelerator: has software of its own (TPU, Trainium, Gaudi, Ascend);
            cpu.
        units: number of streaming multiprocessors or cores, each of which computes one tile of a matrix product at a
            time.
        peak_tflops: dense TFLOP/s by dtype.
        memory_gb: device memory in GB (1e9 bytes).
        memory_gb_per_s: bandwidth of that memory.
        cache_mb: last-level cache in MB.
        host_link: name of the link to the host's memory.
        efficiency: name of its efficiency curve.
        link: name of the link between devices of one host; None: they communicate over the host link.
        aliases: other names under which it is found.
        context_gb: GB of memory that a process takes on the device before it has any tensor.
    """

    kind: Literal["gpu", "accelerator", "cpu"]
    units: Annotated[int, Meta(gt=0)]
    peak_tflops: dict[str, Positive]
    memory_gb: Positive
    memory_gb_per_s: Positive
    cache_mb: Positive
    host_link: str
    efficiency: str
    link: str | None = None
    aliases: list[str] = []
    context_gb: Annotated[float, Meta(ge=0)] = CONTEXT_GB

    @property
    def memory_bytes(self) -> float:
        """Returns the size of the device's memory in bytes."""
        return self.memory_gb * 1e9

    @property
    def memory_bytes_per_s(self) -> float:
        """Returns the bandwidth of the device's memory in bytes/s, by its data sheet."""
        return self.memory_gb_per_s * 1e9

    def peak_flops_per_s(self, dtype: str) -> float:
        """Returns the dense FLOP/s with operands of a dtype; raises ClusterError if the device does not support it."""
        peak = self.peak_tflops.get(dtype)
        if peak is None:
            raise ClusterError(
                f"the device {self.name} does not compute in {dtype}",
                given=dtype,
                expected=", ".join(self.peak_tflops),
                action="choose one of these dtypes, a stack that computes in one (`--stack`), or another device",
            )
        return peak * 1e12


class StepTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Holds the microseconds of one step of a collective, by NCCL's protocol (see kernels/collectives.py)."""

    simple: Positive
    ll128: Positive
    ll: Positive


class Link(Entry, frozen=True):
    """Describes a link between the devices of one host, by one device in one direction.

    Attributes:
        gb_per_s: line rate.
        fraction: fraction of the line rate that large messages reach.
        step_us: microseconds of one step of a collective.
        topology: how devices are connected.
        in_network_reduction: factor by which a switch that sums (NVLink SHARP) speeds up an all-reduce; 1: it does not.
        mesh_size: number of devices, if each is connected to each; a smaller group has only the links among its own
            devices. None: the bandwidth does not depend on the group.
    """

    gb_per_s: Positive
    fraction: Fraction
    step_us: StepTimes
    topology: Literal["host", "tree", "pair", "mesh", "torus", "switch"]
    in_network_reduction: Annotated[float, Meta(ge=1)] = 1.0
    mesh_size: Annotated[int, Meta(ge=2)] | None = None

    @property
    def bytes_per_s(self) -> float:
        """Returns the bytes/s that large messages of one device reach in one direction, over all of its links."""
        return self.gb_per_s * self.fraction * 1e9

    def bytes_per_s_among(self, devices: int) -> float:
        """Returns the bytes/s that large messages of one device reach in one direction, in a group of `devices` of
        one host.
        """
        if self.mesh_size is None or not 1 < devices < self.mesh_size:
            return self.bytes_per_s
        return self.bytes_per_s * (devices - 1) / (self.mesh_size - 1)


class Network(Entry, frozen=True):
    """Describes a network between hosts, by one adapter in one direction.

    Attributes:
        gb_per_s: line rate.
        fraction: fraction of the line rate that large messages reach.
        step_us: microseconds of one step of a collective.
        aliases: other names under which it is found.
    """

    gb_per_s: Positive
    fraction: Fraction
    step_us: StepTimes
    aliases: list[str] = []

    @property
    def bytes_per_s(self) -> float:
        """Returns the bytes/s that large messages reach, for one adapter and direction."""
        return self.gb_per_s * self.fraction * 1e9


class _Links(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    links: list[Link]
    networks: list[Network]


E = TypeVar("E", bound=Entry)


def read(name: str) -> Any:
    """Reads a YAML data file of this folder."""
    return yaml.load((FOLDER / name).read_text(), Loader=LOADER)


def make_table(entries: list[E]) -> Mapping[str, E]:
    """Returns entries by name and alias; raises ClusterError if two of them share one."""
    found: dict[str, E] = {}
    for entry in entries:
        for name in (entry.name, *getattr(entry, "aliases", ())):
            if name in found:
                raise ClusterError(
                    "two entries of the hardware catalogue have the same name or alias",
                    given=name,
                    expected="names and aliases that occur once in a file",
                    action=f"rename one of the entries in {FOLDER.name}/, or remove the alias",
                )
            found[name] = entry
    return found


@cache
def load_devices() -> Mapping[str, Device]:
    """Returns all devices, by name and alias."""
    return make_table(msgspec.convert(read("devices.yaml"), list[Device]))


@cache
def load_efficiencies() -> Mapping[str, Efficiency]:
    """Returns all efficiency curves by name."""
    return make_table(msgspec.convert(read("efficiency.yaml"), list[Efficiency]))


@cache
def _load_links() -> _Links:
    return msgspec.convert(read("links.yaml"), _Links)


@cache
def load_links() -> Mapping[str, Link]:
    """Returns all links between devices of one host, by name."""
    return make_table(_load_links().links)


@cache
def load_networks() -> Mapping[str, Network]:
    """Returns all networks between hosts, by name."""
    return make_table(_load_links().networks)


def find_device(name: str) -> Device:
    """Returns the device with a name or alias; ClusterError if the catalogue has none. Case, spaces and underscores
    are ignored.
    """
    return _find("device", name, load_devices())


def find_link(name: str) -> Link:
    """Returns the link inside hosts with a name; ClusterError, with the most similar known name, if there is none."""
    return _find("link", name, load_links())


def find_network(name: str) -> Network:
    """Returns the network between hosts with a name or alias; ClusterError, with the most similar known name, if
    there is none.
    """
    return _find("network", name, load_networks())


def _find(kind: str, name: str, known: Mapping[str, E]) -> E:
    found = known.get(name) or known.get(name.lower().replace(" ", "-").replace("_", "-"))
    if found is None:
        raise ClusterError(f"the hardware catalogue has no such {kind}", given=name, **suggest_entry(name, known))
    return found


def suggest_entry(name: str, known: Mapping[str, Entry]) -> dict[str, str]:
    """Returns facts for an error about a name that the catalogue lacks: the most similar name of its family, or all
    names.

    A family is the letters that a name begins with: mi300a is not taken for 3090, however alike the digits are.
    """
    wanted = _family_of(name)
    family = {k: v for k, v in known.items() if _are_alike(wanted, _family_of(k))}
    if close := difflib.get_close_matches(name.lower().replace(" ", "-"), list(family), n=1, cutoff=0.5):
        nearest = family[close[0]].name
        return {"expected": nearest, "action": f"write {nearest} if that is what you mean"}
    names = sorted({entry.name for entry in known.values()})
    return {"expected": "one of " + ", ".join(names), "action": "choose one of these names"}


def _family_of(name: str) -> str:
    """Returns the letters that a device's name begins with, without its vendor's name; "" if it begins with a digit."""
    words = re.findall(r"[a-z]+|[0-9]+", name.lower())
    while len(words) > 1 and words[0] in VENDORS:
        words = words[1:]
    return words[0] if words and words[0].isalpha() else ""


def _are_alike(one: str, other: str) -> bool:
    return one == other or difflib.SequenceMatcher(None, one, other).ratio() > 0.7


def suggest_nearest(name: str, known: Mapping[str, Any]) -> dict[str, str]:
    """Returns facts for an error about an unknown name: the most similar known name, or all of them."""
    close = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.5)
    if close:
        return {"expected": close[0], "action": f"write {close[0]} if that is what you mean"}
    return {"expected": "one of " + ", ".join(sorted(known)), "action": "choose one of these names"}
