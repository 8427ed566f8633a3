"""Rewrites lookups, sums and updates by ids or indices so that they may run where the rows are."""
