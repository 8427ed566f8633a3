"""Rewrites embedding lookups, sums and updates by ids so that they can run on the ranks that own a table's rows."""
