"""Reads elementwise arithmetic of a program, and writes it as the text of operations of ours; updates as units."""
