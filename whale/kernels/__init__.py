"""Replaces operations of one rank's program by faster ones that compute the same; knows of no other rank."""
