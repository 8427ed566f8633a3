"""Transformers from their hyper-parameters: kernels, collectives, memory, and a step of training."""
