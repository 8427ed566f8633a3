"""Partitions a program: turns a normalised program and its plan into one program per rank.

The division may be over mesh axes, over pipeline stages, and over micro-batches in time.
"""
