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

cluster.schema.json beside this file is the JSON schema, for editors and other programs. Every mistake is a ClusterError
with line and key.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from cost_model.cluster import yaml_files
from cost_model.hardware import catalogue
from cost_model.hardware.catalogue import Device, Link, Network, suggest_nearest
from whale.errors import ClusterError

SCHEMA = Path(__file__).resolve().parent / "cluster.schema.json"
Name = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1)]


class DeviceEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number of equal devices of a host.

    Attributes:
        type: a name of the hardware catalogue.
        count: how many.
        share: the part of each device that this job may use (a CPU quota, time slices, a partition of a GPU).
        memory_gb: memory of each, where it is not what the catalogue says.
        link: link between them, where it is not what the catalogue says.
    """

    type: Name
    count: Count = 1
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    memory_gb: Annotated[float, Meta(gt=0)] | None = None
    link: Name | None = None

    @property
    def device(self) -> Device:
        """Returns the catalogue's entry, with the memory that the file says."""
        found = catalogue.find_device(self.type)
        return found if self.memory_gb is None else msgspec.structs.replace(found, memory_gb=self.memory_gb)

    def intra_link(self) -> Link:
        """Returns the link over which these devices reach each other."""
        device = self.device
        return catalogue.find_link(self.link or device.link or device.host_link)


class NetworkEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A network: its type in the catalogue, and by how much its core is smaller than its edge (1 = full bisection)."""

    type: Name
    oversubscription: Annotated[float, Meta(ge=1)] = 1.0

    @property
    def network(self) -> Network:
        """Returns the catalogue's entry."""
        return catalogue.find_network(self.type)


class Attachment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The attachment of some hosts to a network.

    Attributes:
        nics: adapters of each host; each is beside an equal part of its devices, in their order.
        far_gb_per_s: what an adapter reaches that sends from a device it is not beside, through the CPU, where the
            collectives do so; None: they do not (NCCL 2.12 and later relay over a device beside the adapter).
    """

    nics: Count = 1
    far_gb_per_s: Annotated[float, Meta(gt=0)] | None = None


class HostEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number of equal hosts. `memory_gb`: of each host, where offloaded data may lie; None: not known."""

    name: Name
    devices: Annotated[list[DeviceEntry], Meta(min_length=1)]
    count: Count = 1
    networks: dict[str, Attachment] = {}
    memory_gb: Annotated[float, Meta(gt=0)] | None = None

    def find_adapter_bytes_per_s(self, network: str, ranks: int, apart: int) -> float:
        """Returns an adapter's bandwidth for a ring of `ranks` devices, each `apart` from the next; inf: no limit.

        A ring enters and leaves a host through the same adapter, at two of its ranks. If no two ranks are beside one
        adapter, it leaves from a far device.
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
        """Returns the kinds of devices in the cluster: gpu, cpu."""
        return frozenset(entry.device.kind for host in self.hosts for entry in host.devices)

    def find_path(self, one: HostEntry, other: HostEntry) -> tuple[str, NetworkEntry, int]:
        """Returns the fastest network between two hosts: its name, its entry, the adapters of the host with fewer."""
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


def make_schema() -> dict[str, Any]:
    """Returns the JSON schema of a cluster file."""
    return msgspec.json.schema(Cluster)


def read(path: str | Path) -> Cluster:
    """Reads and checks a cluster file."""
    return parse(yaml_files.read_text(path, "cluster file"), str(path))


def parse(text: str, origin: str = "<text>") -> Cluster:
    """Checks the text of a cluster file; `origin` names it in errors."""
    file = yaml_files.YamlFile(text, origin, "cluster file")
    cluster = file.decode(Cluster)
    _check(cluster, file)
    return cluster


def to_yaml(cluster: Cluster) -> str:
    """Returns the text of a cluster file; `parse` gives the same cluster back."""
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
        if entry.type not in catalogue.load_networks():
            where: list[str | int] = ["networks", name, "type"]
            fail(
                where,
                "unknown network type",
                given=entry.type,
                **suggest_nearest(entry.type, catalogue.load_networks()),
            )
    seen: dict[str, int] = {}
    for i, host in enumerate(cluster.hosts):
        if host.name in seen:
            fail(["hosts", i, "name"], "two entries of hosts have one name", given=host.name)
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
            fail(["hosts", i], "several hosts share no network", given=f"count: {host.count}", expected="networks")
        for j, part in enumerate(host.devices):
            here: list[str | int] = ["hosts", i, "devices", j]
            try:
                device = catalogue.find_device(part.type)
            except ClusterError:
                fail(
                    [*here, "type"],
                    "unknown device",
                    given=part.type,
                    **suggest_nearest(part.type, catalogue.load_devices()),
                )
            if part.link is not None and part.link not in catalogue.load_links():
                fail(
                    [*here, "link"],
                    "unknown link",
                    given=part.link,
                    **suggest_nearest(part.link, catalogue.load_links()),
                )
            if part.memory_gb is not None and device.kind == "gpu" and part.memory_gb > device.memory_gb:
                fail(
                    [*here, "memory_gb"],
                    "a device has more memory than its type",
                    given=f"{part.memory_gb} GB",
                    expected=f"at most {device.memory_gb} GB for {device.name}",
                )
    reachable = [host for host in cluster.hosts if host.networks]
    if len(cluster.hosts) > 1:
        for i, host in enumerate(cluster.hosts):
            if host not in reachable:
                fail(["hosts", i], "a host is attached to no network", given=host.name, expected="networks")
