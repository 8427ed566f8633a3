"""Runs programs in a rank's process: holds a run's context, compiles captured programs, and calls functions and
sessions.
"""
