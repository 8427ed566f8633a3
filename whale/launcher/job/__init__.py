"""Runs the launcher's side of one run (job.py): who the ranks are, what they print, and how the run ends."""
