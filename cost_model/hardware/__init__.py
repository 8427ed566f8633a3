"""The hardware catalogue: devices, links, networks, efficiency curves; data files with the source of every figure."""

from cost_model.hardware.catalogue import (
    Device,
    Efficiency,
    Link,
    Network,
    device,
    devices,
    efficiencies,
    link,
    links,
    network,
    networks,
)

__all__ = [
    "Device",
    "Efficiency",
    "Link",
    "Network",
    "device",
    "devices",
    "efficiencies",
    "link",
    "links",
    "network",
    "networks",
]
