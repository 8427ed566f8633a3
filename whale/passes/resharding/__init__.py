"""Decides how a plan's changes of layout are communicated: lists the reshards, fuses them, chooses wire dtype and
backend.
"""
