"""Computes loops of known length, such as recurrent layers, by few operations instead of many small ones in each
iteration.
"""
