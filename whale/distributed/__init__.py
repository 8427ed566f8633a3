"""Connects, watches and traces the ranks of a run. Knows of no program and no variable."""
