"""Evaluates shape arithmetic in NumPy before a program is planned."""
