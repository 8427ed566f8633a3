"""``epl.profiler.memory_profiler_hook``."""

from whale.frontends.epl.profiler import MemoryProfilerHook, profile_memory

__all__ = ["MemoryProfilerHook", "profile_memory"]
