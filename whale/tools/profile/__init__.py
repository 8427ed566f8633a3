"""Measures operations, exchanges and steps on this machine, for predictions (`whale profile`)."""
