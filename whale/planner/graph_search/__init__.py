"""Searches for the fastest strategy of a captured program (`auto_parallel`)."""
