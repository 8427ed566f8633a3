"""Tracks which rank holds which part of which variable (``variable_store``), initialises variables part by part, and
compares replicas.
"""
