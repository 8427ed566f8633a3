"""Drawn programs whose random numbers, or orders of samples, have to go on as on one device."""
