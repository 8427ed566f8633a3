"""Runs programs written for other interfaces than ``wh.function`` and ``wh.Session`` unchanged on the engine."""
