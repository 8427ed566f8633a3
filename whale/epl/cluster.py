"""``epl.cluster``."""

from whale.frontends.epl.cluster import Cluster, VirtualDevice

__all__ = ["Cluster", "VirtualDevice"]
