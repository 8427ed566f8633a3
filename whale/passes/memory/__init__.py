"""Decides which tensors are kept, where, and for how long: ZeRO, gathering at use, offload, recomputation, memory
categories.
"""
