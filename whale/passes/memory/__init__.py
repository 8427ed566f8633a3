"""Decides what is held, where, and for how long: ZeRO, gathering at use, offload, recomputation, categories of
memory.
"""
