"""Fuses elementwise arithmetic of a rank's program into fewer operations."""
