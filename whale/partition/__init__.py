"""Partitions a program: from a normalised program and its plan to what each rank runs, over meshes, stages and time."""
