"""Ranks that come and leave while a run of the launcher goes on."""
