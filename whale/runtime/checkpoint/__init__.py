"""Writes and reads the state of a run: checkpoints, random states, exported models."""
