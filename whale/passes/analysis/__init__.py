"""Analyses programs without changing them: scopes, stages, rank groups, batch, mesh axes, uses of tensors, resharding
cost.
"""
