"""Runs programs in a rank's process: holds the run's context, compiles captured programs, and executes functions and
sessions.
"""
