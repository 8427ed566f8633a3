"""``epl.config``."""

from whale.frontends.epl.config import Config

__all__ = ["Config"]
