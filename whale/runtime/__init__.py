"""Holds the state of a run in each rank's process (``context``), compiles captured programs (``compile``), and runs
them from ``wh.function`` and ``wh.Session``.
"""
