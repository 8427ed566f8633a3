"""Runs each layer in the Whale scope in which it was created, or called to build a functional model, in every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from whale.runtime.context import Context, find_running
from whale.runtime.scopes import enter_path, join_path
from whale.runtime.variables.deferred import capturing

_PATH = "_whale_path"  # of a layer: the path of its scope


def init_layer(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces a layer's ``__init__``: the layer remembers the open scope."""
    _remember(layer, _find_running())
    original(layer, *args, **kwargs)


def call_layer(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces a layer's ``__call__``: in a step, the layer runs in its scope."""
    context = _find_running()
    if not capturing.get():
        _remember(layer, context)
        return original(layer, *args, **kwargs)
    path = getattr(layer, _PATH, None)
    if path is None:
        return original(layer, *args, **kwargs)
    with enter_path(join_path(context, path)):
        return original(layer, *args, **kwargs)


def enter_name_scope(original: Callable[..., Any], scope: Any) -> Any:
    """Replaces entering a name scope of Keras 3, so that operations are named by the layer's path, like variables.

    TensorFlow would number a scope that is entered again, and Keras enters most of them twice; ``wh.annotate`` could
    not tell the second scope of `dense` from a layer `dense_1`.
    """
    if capturing.get() and _find_running().scoping.annotations:
        from keras.src.backend.common.name_scope import current_path

        scope._tf_name_scope = tf.name_scope("/".join(filter(None, (current_path(), scope.name))) + "/")
    return original(scope)


def _remember(layer: Any, context: Context) -> None:
    if context.scoping.scopes and getattr(layer, _PATH, None) is None and not capturing.get():
        object.__setattr__(layer, _PATH, context.scoping.scopes[-1])


def _find_running() -> Context:
    context = find_running()
    assert context is not None
    return context
