"""Serves the command line and its public twins: plans without processes, checks, reports."""
