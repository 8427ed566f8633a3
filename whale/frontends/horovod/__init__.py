"""Horovod's API, carried out by Whale's exchanges: each rank runs its own program, and gradients are averaged."""
