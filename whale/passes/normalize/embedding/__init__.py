"""Lookups, sums and updates by ids or indices, written so that they may run where the rows are."""
