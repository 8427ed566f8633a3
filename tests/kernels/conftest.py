"""Fixtures of the tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tensorflow as tf

import whale as wh


@pytest.fixture
def one_rank_without_grappler() -> Iterator[None]:
    """Runs a test as one rank, whose programs TensorFlow's graph optimizer leaves as Whale writes them."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    wh.init({"communication.in_process_ranks": 1})
    yield
    wh.shutdown()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
