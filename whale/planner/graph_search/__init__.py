"""Searches for the fastest strategy of a captured program."""
