"""Analyses of a program as it stands: its scopes, stages, groups of ranks, batch, and what moving tensors costs."""
