"""``epl.strategies.split``."""

from whale.frontends.epl.strategies import Split, split

__all__ = ["Split", "split"]
