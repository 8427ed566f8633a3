"""Tracks which rank holds which part of which variable, and gives variables their first values."""
