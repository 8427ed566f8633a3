from tests.distributed.conftest import launcher

__all__ = ["launcher"]
