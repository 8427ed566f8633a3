"""Provides the configuration: its table of keys (`keys`), its sources and their order (`reading`), its page in docs
(`page`).
"""

from whale.config.reading import Config as Config
from whale.config.values import Mesh as Mesh
