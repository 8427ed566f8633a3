"""Fuses the updates of many variables into a few large operations on each rank."""
