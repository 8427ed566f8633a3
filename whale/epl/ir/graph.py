"""``epl.ir.graph``."""

from whale.frontends.epl.graph import Graph, GraphKeys, add_to_collection, get_all_collections, get_collection

__all__ = ["Graph", "GraphKeys", "add_to_collection", "get_all_collections", "get_collection"]
