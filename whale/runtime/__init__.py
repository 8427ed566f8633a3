"""The runtime: the context of a run, captured programs compiled for this process's ranks, functions and sessions."""
