from __future__ import annotations

from tests.distributed.conftest import launcher

__all__ = ["launcher"]
