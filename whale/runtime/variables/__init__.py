"""Tracks which rank holds which part of which variable, and initialises variables."""
