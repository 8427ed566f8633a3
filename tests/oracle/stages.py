"""Puts a model's variables, in turns, into the stages of a pipeline, whatever the model looks like."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from whale.capture.attrs import SCOPE_ATTR

_IN_A_ROW = 2  # a kernel and its bias


def in_turns(stages: int) -> Callable[[], AbstractContextManager[None]]:
    """A scope in which two variables go to the first of so many stages, two to the next, and so on, again and again.

    What reads them is not annotated: which stage it belongs to is for Whale to find.
    """
    numbers = itertools.count()

    @contextmanager
    def scope() -> Iterator[None]:
        def creator(next_creator: Any, **kwargs: Any) -> Any:
            stage = f"stage_{next(numbers) // _IN_A_ROW % stages}"
            with ExitStack() as stack:
                if not tf.executing_eagerly():
                    graph = tf.compat.v1.get_default_graph()
                    attribute = attr_value_pb2.AttrValue(s=stage.encode())
                    stack.enter_context(graph._attr_scope({SCOPE_ATTR: attribute}))
                variable = next_creator(**kwargs)
            setattr(variable, SCOPE_ATTR, stage)
            return variable

        with tf.variable_creator_scope(creator):
            yield

    return scope
