"""Randomised faults in real runs: ``python -m tests.faults --count 100 --seed S``."""
