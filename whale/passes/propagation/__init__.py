"""Finds a placement for every tensor: propagation, choice under split scopes, reduction of partial sums, per-rank
values.
"""
