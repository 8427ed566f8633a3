"""``epl.env``."""

from whale.frontends.epl.env import Env

__all__ = ["Env"]
