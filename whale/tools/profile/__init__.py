"""Measures the seconds of operations, exchanges and steps on this machine."""
