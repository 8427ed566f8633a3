"""For all tests."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator

import pytest

# No test runs under a plan that another one, or the user, has kept; those of the keeping name a folder of their own.
os.environ["WHALE_PLAN_CACHE"] = ""
# TensorFlow's allocator tells what it gives out where oneDNN is on; its default is off on processors without AVX-512.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")


@pytest.fixture(autouse=True)
def level_of_lines() -> Iterator[None]:
    """What one test wants to hear (`-v` of a command that it calls) is not said in the others."""
    level = logging.getLogger("whale").level
    yield
    logging.getLogger("whale").setLevel(level)


@pytest.fixture(autouse=True)
def no_global_seed() -> Iterator[None]:
    """A seed that one test sets is none of the others'."""
    yield
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(None)
