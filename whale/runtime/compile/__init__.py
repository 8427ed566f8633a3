"""Compiles a captured program to the programs of this process's ranks."""
