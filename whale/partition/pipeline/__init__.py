"""Implements pipelines: stage groups of ranks, micro-batches as loops of function calls, schedules, sends and
receives.
"""
