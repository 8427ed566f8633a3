"""Writes and reads what a run holds: checkpoints, random states, exported models."""
