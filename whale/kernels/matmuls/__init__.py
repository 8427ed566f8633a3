"""Replaces operations of a rank's program by matrix products that are faster on CPUs."""
