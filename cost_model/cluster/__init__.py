"""Describes clusters: cluster files, the local machine, a scheduler's allocation, and groups of ranks."""
