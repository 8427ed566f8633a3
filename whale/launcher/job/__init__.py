"""Implements the launcher's event loop for one run (job.py): accepting ranks, printing output, detecting failures,
ending.
"""
