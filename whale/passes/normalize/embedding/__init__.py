"""Rewrites lookups, sums and updates by ids so that they can run on the ranks that own the rows."""
