"""The ranks of a run: how they are connected, watched and traced. Knows of no program and no variable."""
