"""Compiles captured programs: plans them on rank 0, creates the programs of this process's ranks, and lowers these to
TensorFlow functions. ``step.compile_step`` is the entry for ``wh.function``.
"""
