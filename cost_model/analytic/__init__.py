"""Predicts one training step of a transformer given by hyper-parameters: its kernels, collectives, memory and time."""
