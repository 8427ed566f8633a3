"""Implements the command line and the public functions with the same tasks: plans without processes, checks,
reports.
"""
