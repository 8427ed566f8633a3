"""Implements Easy Parallel Library's annotations, with its meaning of a batch, over the ranks of a run."""
