"""Does shape arithmetic once, in NumPy, before a program is planned."""
