"""Writing and reading what a run holds: checkpoints, random states, exported models."""
