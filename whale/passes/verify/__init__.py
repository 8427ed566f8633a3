"""Verifies plans independently of how they were found, and explains their layouts."""
