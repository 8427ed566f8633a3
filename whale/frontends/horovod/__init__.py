"""Implements Horovod's API with Whale's exchanges: each rank runs its own program, and gradients are averaged."""
