"""Finds a placement for every tensor: by propagation, choice under split scopes, and reduction of partial sums; handles
per-rank values.
"""
