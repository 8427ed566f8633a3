"""Adds and removes ranks while a run of the launcher goes on."""
