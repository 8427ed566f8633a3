"""Provides the hardware catalogue: devices, links, networks, efficiency curves, each figure with its source."""

from cost_model.hardware.catalogue import (
    CONTEXT_GB,
    AttentionKernel,
    Device,
    Efficiency,
    Link,
    Network,
    find_device,
    find_link,
    find_network,
    load_devices,
    load_efficiencies,
    load_links,
    load_networks,
)

__all__ = [
    "CONTEXT_GB",
    "AttentionKernel",
    "Device",
    "Efficiency",
    "Link",
    "Network",
    "find_device",
    "find_link",
    "find_network",
    "load_devices",
    "load_efficiencies",
    "load_links",
    "load_networks",
]
