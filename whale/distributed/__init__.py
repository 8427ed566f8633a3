"""Connects the ranks of a run, watches them for failures, and traces them; knows of no program and no variable."""
