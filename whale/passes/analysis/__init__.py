"""Analyses of a program that do not change it: its scopes, stages, rank groups, batch, and the cost of moving
tensors.
"""
