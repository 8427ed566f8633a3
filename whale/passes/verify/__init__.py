"""Verifies plans independently of how they were found, and explains why they are what they are."""
