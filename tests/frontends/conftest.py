from __future__ import annotations

from tests.distributed.conftest import launcher
from tests.runtime.conftest import ranks

__all__ = ["launcher", "ranks"]
