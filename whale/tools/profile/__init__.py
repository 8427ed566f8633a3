"""Measures what operations, exchanges and steps take on this machine."""
