"""``epl.profiler.flops``."""

from whale.frontends.epl.profiler import FlopsProfilerHook

__all__ = ["FlopsProfilerHook"]
