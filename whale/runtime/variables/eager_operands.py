"""Brings a variable's value home before an eager operation reads it in C++.

Given a variable as an operand, an operation that runs eagerly (``tf.reduce_sum(w)``, ``tf.nn.relu(w)``) does not call
the variable's methods: TensorFlow's fast path takes its ``_handle`` and reads what lies behind it. Of a variable whose
parts lie elsewhere, or whose present value another rank holds, that is not the value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def make_handle_property(bring_home: Callable[[Any], None]) -> property:
    """Returns a ``_handle`` for a class of variables, which puts their value behind it where the fast path asks.

    Args:
      bring_home: puts the present value of a variable behind its handle, and keeps it there until the next step.
    """

    def get(self: Any) -> Any:
        # C++ has no frame of its own: the caller is the Python function of the operation, in a generated module.
        module = sys._getframe(1).f_code.co_filename.replace("\\", "/").rpartition("/")[2]
        if module.startswith("gen_") and module.endswith("_ops.py") and tf.executing_eagerly():
            bring_home(self)
        return self.__dict__["_handle"]

    def put(self: Any, handle: Any) -> None:
        self.__dict__["_handle"] = handle

    return property(get, put)
