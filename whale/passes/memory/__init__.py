"""Decides which tensors are kept in memory, where, and for how long: ZeRO, gathering at use, offload, recomputation."""
