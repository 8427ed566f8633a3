"""Finds elementwise arithmetic in a program, groups it (optimizer updates above all), and writes it as the text of
Whale's fused kernels.
"""
