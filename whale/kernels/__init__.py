"""Replaces operations of one rank's program by faster ones that compute the same, without knowledge of other ranks."""
