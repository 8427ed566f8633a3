"""The updates of many variables, of which each rank runs a few large operations instead of many small ones."""
