"""Whale attacked: its control port, its processes, the files that it reads; `python -m tests.attack` does all of it."""
