"""Formulas of hardware alone: kernels, collectives, discrete events."""
