"""Defines rules of ops that rearrange or store elements: shapes, slices, gathers, variables, lists, sources and
sinks.
"""
