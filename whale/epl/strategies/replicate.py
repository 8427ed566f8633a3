"""``epl.strategies.replicate``."""

from whale.frontends.epl.strategies import Replicate, replicate

__all__ = ["Replicate", "replicate"]
