"""Defines sharding rules of arithmetic: elementwise and linear ops, reductions, matrix products, random numbers."""
