"""Defines sharding rules of ops that rearrange or store elements: shapes, slices, gathers, variables, lists, sources,
sinks.
"""
