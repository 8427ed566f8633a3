"""Defines sharding rules of neural networks' ops: convolutions, pooling, normalisation, attention, recurrent kernels,
losses.
"""
