"""Seconds of kernels and collectives on a device, and what one operation of a program asks for: FLOPs and bytes."""
