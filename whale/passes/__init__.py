"""Passes that turn a captured program into a plan, in one visible order."""
