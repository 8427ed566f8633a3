"""Rewrites programs before they are planned: inlines calls, folds shapes, decomposes composite ops, sets types and
scopes.
"""
