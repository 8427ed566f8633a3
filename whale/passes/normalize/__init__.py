"""Rewrites programs before planning: inlines calls, folds shapes, decomposes composite ops, assigns scopes."""
