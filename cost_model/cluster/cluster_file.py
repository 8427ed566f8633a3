"""Reads and writes cluster files: hosts of devices and the networks between them, as YAML.

    name: lab
    networks: {fabric: {type: infiniband-hdr-200}}
    hosts:
      - name: new
        count: 2
        devices: [{type: a100-sxm-80gb, count: 8}]
        networks: {fabric: {nics: 8}}
      - name: old
        devices: [{type: v100-sxm2-16gb, count: 4}, {type: t4, share: 0.5}]
        networks: {fabric: {nics: 1}}

A file may override the catalogue's figures: of devices `memory_gb`, `memory_gb_per_s`, `peak_tflops`, `link_gb_per_s`
and `host_link_gb_per_s`, of networks `gb_per_s` and `latency_us`.

cluster.schema.json beside this file is the JSON schema, for editors and other programs. Every mistake raises a
ClusterError with line and key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from cost_model.cluster import yaml_files
from cost_model.hardware import catalogue
from cost_model.hardware.catalogue import Device, Link, Network, StepTimes, suggest_entry, suggest_nearest
from cost_model.kernels.compute import SIZE_BYTES
from whale.errors import ClusterError

SCHEMA = Path(__file__).resolve().parent / "cluster.schema.json"
Name = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]
# A figure that is so many times the catalogue's is taken for one in another unit.
MOST_TIMES = 8


class DeviceEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number of equal devices of a host.

    Attributes:
        type: name of the device in the hardware catalogue.
        count: number of such devices in each host.
        share: fraction of each device that this job may use (a CPU quota, time slices, a partition of a GPU).
        memory_gb: memory of each device in GB, if it differs from the catalogue's.
        link: name of the link between the devices, if it differs from the catalogue's.
        peak_tflops: dense TFLOP/s by dtype, for dtypes that differ from the catalogue's (clocks, power limits).
        memory_gb_per_s: memory bandwidth of each device in GB/s, if it differs from the catalogue's.
        link_gb_per_s: line rate of one device's link in one direction in GB/s, if it differs from the catalogue's.
        host_link_gb_per_s: line rate between one device and its host in one direction in GB/s, if it differs from the
            catalogue's.
    """

    type: Name
    count: Count = 1
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    memory_gb: Positive | None = None
    link: Name | None = None
    peak_tflops: dict[str, Positive] = {}
    memory_gb_per_s: Positive | None = None
    link_gb_per_s: Positive | None = None
    host_link_gb_per_s: Positive | None = None

    @property
    def device(self) -> Device:
        """Returns the catalogue's entry of the device with the memory and FLOP/s that the file overrides."""
        found = catalogue.find_device(self.type)
        given: dict[str, Any] = {
            name: value for name in ("memory_gb", "memory_gb_per_s") if (value := getattr(self, name)) is not None
        }
        if self.peak_tflops:
            given["peak_tflops"] = found.peak_tflops | self.peak_tflops
        return msgspec.structs.replace(found, **given) if given else found

    def intra_link(self) -> Link:
        """Returns the link between these devices; devices without one communicate over their link to the host."""
        name = self.link or catalogue.find_device(self.type).link
        return self.host_link() if name is None else _set_rate(catalogue.find_link(name), self.link_gb_per_s)

    def host_link(self) -> Link:
        """Returns the link between one of these devices and the host's memory."""
        return _set_rate(catalogue.find_link(catalogue.find_device(self.type).host_link), self.host_link_gb_per_s)

    def list_overridden(self) -> Iterator[tuple[str, float, float]]:
        """Yields (name, the file's figure, the catalogue's figure) for each figure that the file overrides; NaN if it
        has none.

        A processor's memory is not compared: it is that of its host, which the catalogue can only guess.
        """
        known = catalogue.find_device(self.type)
        link = self.link or known.link
        of_catalogue = {
            "memory_gb": known.memory_gb if known.kind != "cpu" else None,
            "memory_gb_per_s": known.memory_gb_per_s,
            "link_gb_per_s": catalogue.find_link(link).gb_per_s if link else None,
            "host_link_gb_per_s": catalogue.find_link(known.host_link).gb_per_s,
        }
        for name, there in of_catalogue.items():
            if (given := getattr(self, name)) is not None and there is not None and given != there:
                yield name, given, there
        for dtype, given in self.peak_tflops.items():
            if given != (there := known.peak_tflops.get(dtype, math.nan)):
                yield f"peak_tflops.{dtype}", given, there


class NetworkEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A network between hosts.

    Attributes:
        type: name of the network in the hardware catalogue.
        oversubscription: bandwidth of its edge divided by that of its core (1: full bisection).
        gb_per_s: line rate of one adapter in one direction in GB/s, if it differs from the catalogue's.
        latency_us: microseconds of one step of a collective from one host to the next (half a round trip, plus
            software), if it differs from the catalogue's.
    """

    type: Name
    oversubscription: Annotated[float, Meta(ge=1)] = 1.0
    gb_per_s: Positive | None = None
    latency_us: Positive | None = None

    @property
    def network(self) -> Network:
        """Returns the catalogue's entry of the network with the rate and latency that the file overrides."""
        found = catalogue.find_network(self.type)
        if self.gb_per_s is not None:
            found = msgspec.structs.replace(found, gb_per_s=self.gb_per_s)
        if self.latency_us is not None:
            found = msgspec.structs.replace(found, step_us=StepTimes(*[self.latency_us] * 3))
        return found

    def list_overridden(self) -> Iterator[tuple[str, float, float]]:
        """Yields (name, the file's figure, the catalogue's figure) for each figure that the file overrides."""
        known = catalogue.find_network(self.type)
        for name, given, there in (
            ("gb_per_s", self.gb_per_s, known.gb_per_s),
            ("latency_us", self.latency_us, known.step_us.simple),
        ):
            if given is not None and given != there:
                yield name, given, there


class Attachment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The attachment of some hosts to a network.

    Attributes:
        nics: number of adapters of each host. Each serves an equal part of the host's devices, in their order.
        far_gb_per_s: GB/s of an adapter for data of a device that it does not serve, which goes through the CPU; None:
            collectives avoid that (NCCL 2.12 and later relay over a device beside the adapter).
    """

    nics: Count = 1
    far_gb_per_s: Annotated[float, Meta(gt=0)] | None = None


class HostEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number of equal hosts.

    Attributes:
        name: name of the hosts in messages and reports; unique in the file.
        devices: the devices of each host.
        count: number of such hosts.
        networks: the networks that they are attached to, by name.
        memory_gb: memory of each host in GB, where offloaded data may be kept; None: unknown.
    """

    name: Name
    devices: Annotated[list[DeviceEntry], Meta(min_length=1)]
    count: Count = 1
    networks: dict[str, Attachment] = {}
    memory_gb: Annotated[float, Meta(gt=0)] | None = None

    def find_adapter_bytes_per_s(self, network: str, ranks: int, apart: int) -> float:
        """Returns the most bytes/s at which an adapter can read the memory of a ring's ranks; inf: no limit but its
        line rate.

        The ring of a data-parallel group enters and leaves a host through one adapter, but at two different ranks. If
        neighbouring ranks of the ring are too far apart to be served by the same adapter, the ring leaves from a device
        that the adapter does not serve, at `Attachment.far_gb_per_s`.

        Args:
            network: name of the network.
            ranks: ranks of the ring on each host.
            apart: distance between neighbouring ranks of the ring, in devices of the host.
        """
        attached = self.networks[network]
        beside = sum(entry.count for entry in self.devices) / attached.nics
        if attached.far_gb_per_s is None or ranks == 1 or apart < beside:
            return math.inf
        return attached.far_gb_per_s * 1e9


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The hosts and networks of a cluster, in the order of its file."""

    name: Name
    hosts: Annotated[list[HostEntry], Meta(min_length=1)]
    networks: dict[str, NetworkEntry] = {}

    @property
    def device_count(self) -> int:
        """Returns the number of devices of all hosts."""
        return sum(host.count * entry.count for host in self.hosts for entry in host.devices)

    @property
    def kinds(self) -> frozenset[str]:
        """Returns the different kinds of its devices: gpu, accelerator, cpu."""
        return frozenset(entry.device.kind for host in self.hosts for entry in host.devices)

    def list_overridden(self) -> Iterator[str]:
        """Yields a line of text for each figure of the catalogue that the file overrides, with both values."""
        places: list[tuple[str, DeviceEntry | NetworkEntry]] = list(self.networks.items())
        places += [(f"{host.name}/{entry.type}", entry) for host in self.hosts for entry in host.devices]
        for place, one in places:
            for name, given, there in one.list_overridden():
                instead = "not in the catalogue" if math.isnan(there) else f"{there:g} in the catalogue"
                yield f"{place}: {name} {given:g} ({instead})"

    def find_path(self, one: HostEntry, other: HostEntry) -> tuple[str, NetworkEntry, int]:
        """Returns (name, entry, adapters) of the fastest network that two hosts share; adapters of the host that has
        fewer.

        Raises:
            ClusterError: they share no network.
        """
        common = [name for name in one.networks if name in other.networks]
        if not common:
            raise ClusterError(
                "two hosts share no network",
                given="; ".join(f"{host.name}: {', '.join(host.networks) or 'none'}" for host in (one, other)),
                action="attach both to one network in the cluster file",
            )

        def count_nics(name: str) -> int:
            return min(one.networks[name].nics, other.networks[name].nics)

        best = max(common, key=lambda name: self.networks[name].network.bytes_per_s * count_nics(name))
        return best, self.networks[best], count_nics(best)


def _set_rate(link: Link, gb_per_s: float | None) -> Link:
    return link if gb_per_s is None else msgspec.structs.replace(link, gb_per_s=gb_per_s)


def make_schema() -> dict[str, Any]:
    """Returns the JSON schema of cluster files, which cluster.schema.json contains."""
    return yaml_files.make_schema(Cluster)


def read(path: str | Path) -> Cluster:
    """Reads and checks a cluster file; ClusterError with line and key if it contains a mistake."""
    return parse(yaml_files.read_text(path, "cluster file"), str(path))


def parse(text: str, origin: str = "<text>") -> Cluster:
    """Parses and checks the text of a cluster file; `origin` is the file's name in errors."""
    file = yaml_files.YamlFile(text, origin, "cluster file")
    cluster = file.decode(Cluster)
    _check(cluster, file)
    return cluster


def to_yaml(cluster: Cluster) -> str:
    """Formats a cluster as the text of a cluster file; `parse` of the text returns the same cluster."""
    return yaml.safe_dump(_to_plain(cluster), sort_keys=False, width=120)


def _to_plain(cluster: Cluster) -> Any:
    def prune(value: Any, default: Any) -> Any:
        if isinstance(value, msgspec.Struct):
            fields = msgspec.structs.fields(value)
            pairs = ((f.name, getattr(value, f.name), None if f.required else f.default) for f in fields)
            return {name: prune(v, None) for name, v, d in pairs if v != d and v != {}}
        if isinstance(value, dict):
            return {key: prune(v, None) for key, v in value.items()}
        return [prune(v, None) for v in value] if isinstance(value, list) else value

    return prune(cluster, None)


def _check(cluster: Cluster, file: yaml_files.YamlFile) -> None:
    def fail(keys: list[str | int], message: str, **facts: str) -> None:
        raise file.make_error(keys, message, **facts)

    for name, entry in cluster.networks.items():
        try:
            catalogue.find_network(entry.type)
        except ClusterError:
            fail(
                ["networks", name, "type"],
                "unknown network type",
                given=entry.type,
                **suggest_entry(entry.type, catalogue.load_networks()),
            )
        _check_overridden(entry, file, ["networks", name])
    seen: dict[str, int] = {}
    for i, host in enumerate(cluster.hosts):
        if host.name in seen:
            fail(
                ["hosts", i, "name"],
                "two entries of hosts have the same name",
                given=host.name,
                action="rename one of them, or describe equal hosts by one entry with count",
            )
        seen[host.name] = i
        for name in host.networks:
            if name not in cluster.networks:
                facts = (
                    suggest_nearest(name, cluster.networks)
                    if cluster.networks
                    else {"expected": "an entry of networks"}
                )
                facts["action"] = "name one of the file's networks, or add it to them"
                fail(
                    ["hosts", i, "networks", name],
                    "a host names a network that the file does not have",
                    given=name,
                    **facts,
                )
        if host.count > 1 and not host.networks:
            fail(
                ["hosts", i],
                "several hosts are attached to no network",
                given=f"name: {host.name}, count: {host.count}",
                expected="networks, which name one of the file's networks, e.g. networks: {fabric: {nics: 1}}",
                action="add networks to this entry of hosts",
            )
        for j, part in enumerate(host.devices):
            here: list[str | int] = ["hosts", i, "devices", j]
            try:
                device = catalogue.find_device(part.type)
            except ClusterError:
                fail(
                    [*here, "type"],
                    "unknown device type",
                    given=part.type,
                    **suggest_entry(part.type, catalogue.load_devices()),
                )
            if part.link is not None and part.link not in catalogue.load_links():
                fail(
                    [*here, "link"],
                    "unknown link",
                    given=part.link,
                    **suggest_entry(part.link, catalogue.load_links()),
                )
            for dtype in part.peak_tflops:
                if dtype not in SIZE_BYTES:
                    fail(
                        [*here, "peak_tflops", dtype],
                        "unknown dtype",
                        given=dtype,
                        **suggest_nearest(dtype, SIZE_BYTES),
                    )
            if part.link_gb_per_s is not None and part.link is None and device.link is None:
                fail(
                    [*here, "link_gb_per_s"],
                    f"{device.name} has no link but that to its host",
                    given=f"link_gb_per_s: {part.link_gb_per_s:g}",
                    expected="link, or host_link_gb_per_s in place of link_gb_per_s",
                    action="name the link between the devices (link: nvlink2), or write host_link_gb_per_s",
                )
            _check_overridden(part, file, here)
    reachable = [host for host in cluster.hosts if host.networks]
    if len(cluster.hosts) > 1:
        for i, host in enumerate(cluster.hosts):
            if host not in reachable:
                fail(
                    ["hosts", i],
                    "a host is attached to no network",
                    given=f"name: {host.name}",
                    expected="networks, which name one of the file's networks, e.g. networks: {fabric: {nics: 1}}",
                    action="add networks to this entry of hosts",
                )


def _check_overridden(entry: DeviceEntry | NetworkEntry, file: yaml_files.YamlFile, where: list[str | int]) -> None:
    """Refuses figures that are many times the catalogue's, as they are probably in another unit.

    Smaller figures are accepted: a part of a device, or a degraded line.
    """
    for name, given, there in entry.list_overridden():
        if name != "latency_us" and given > MOST_TIMES * there:
            raise file.make_error(
                [*where, *name.split(".")],
                f"the figure is more than {MOST_TIMES} times that of the catalogue, so probably in another unit",
                given=f"{given:g}",
                expected=f"at most {MOST_TIMES * there:g}; the catalogue has {there:g} for {entry.type}",
                action="give it in the unit that its name ends with",
            )
