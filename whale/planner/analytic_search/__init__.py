"""Searches for the fastest strategy of a described model that fits into memory."""
