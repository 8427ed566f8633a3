"""Clusters: files that describe them, this machine, what a scheduler allots, where ranks lie."""
