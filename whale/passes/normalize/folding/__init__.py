"""Shape arithmetic that is done once, in NumPy, before a program is planned."""
