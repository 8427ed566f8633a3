"""``epl.runtime.saver``."""

from whale.frontends.epl.saver import MemoryEfficientBuilder, ShardingLoader

__all__ = ["MemoryEfficientBuilder", "ShardingLoader"]
