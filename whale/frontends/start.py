"""``wh.init`` as scripts call it: a run begins, and the programs of other interfaces find it."""

from __future__ import annotations

import functools
from typing import Any

from whale.frontends.keras import install as keras
from whale.frontends.tf1 import install as tf1
from whale.runtime.run import start


@functools.wraps(start.init)
def init(*args: Any, **kwargs: Any) -> None:  # noqa: D103, the doc string is that of what it wraps
    start.init(*args, **kwargs)
    keras.install()
    tf1.install()
