"""Folds constants before a program is planned: evaluates shape arithmetic in NumPy."""
