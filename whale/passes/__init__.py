"""Passes from a captured program to a plan, in one visible order."""
