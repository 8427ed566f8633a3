"""Reads a rank's part of a dataset, and checks what the ranks bring to one batch."""
