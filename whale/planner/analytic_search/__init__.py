"""Searches for the fastest parallel strategy that fits into memory, for a model given by its hyper-parameters."""
