"""The launcher's side of one run of the ranks (job.py): who they are, what they print, and how the run ends."""
