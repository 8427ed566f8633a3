"""``epl.profiler``."""

from whale.frontends.epl.profiler import FlopsProfilerHook, MemoryProfilerHook

__all__ = ["FlopsProfilerHook", "MemoryProfilerHook"]
