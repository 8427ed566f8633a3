"""Implements pipelines and micro-batches: stage groups of ranks, their sends and receives, and the schedule of a step.

A rank's micro-batches become calls of functions, one function per phase.
"""
