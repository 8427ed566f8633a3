"""Computes the seconds of kernels and collectives on a device, and the FLOPs and bytes of a program's operations."""
