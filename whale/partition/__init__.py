"""Partitions a program: turns a normalised program and its plan into the ranks' programs, over meshes, stages and
time.
"""
