"""Element by element arithmetic of a rank's program in fewer operations."""
