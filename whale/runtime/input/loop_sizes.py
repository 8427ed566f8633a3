"""Lets loops of a step that one process traces without its sizes be traced with them.

Where one process does not know the rows of a batch (an ``input_signature`` with ``None``), what enters a loop and what
an iteration leaves both have unknown rows. Whale knows the rows. Then a value may enter a loop with 17 rows and leave
an iteration, after a ``top_k`` or a ``gather``, with rows that TensorFlow cannot tell, which TensorFlow refuses. Here
such a value is said to have the shape with which it entered. That is checked when the loop runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.operators import control_flow
from tensorflow.python.ops import while_v2


@functools.cache
def keep_sizes_in_loops(is_without_sizes: Callable[[], Any]) -> None:
    """Makes values that loops change keep the shapes with which they entered, where TensorFlow cannot tell them.

    Wraps TensorFlow's and AutoGraph's ``while`` loops, once. Loops with ``shape_invariants`` of their own are left
    alone.

    Args:
      is_without_sizes: tells whether the present trace is one of a step that one process traces without its sizes.
    """
    usual_statement, usual_loop = control_flow._tf_while_stmt, while_v2.while_loop

    @functools.wraps(usual_statement)
    def statement(
        test: Any, body: Callable[[], None], get_state: Any, set_state: Any, names: Any, options: dict[str, Any]
    ) -> None:
        if not is_without_sizes() or options.get("shape_invariants"):
            usual_statement(test, body, get_state, set_state, names, options)
            return
        entered = get_state()

        def keeping() -> None:
            body()
            set_state(tuple(_keep(value, first) for value, first in zip(get_state(), entered)))

        usual_statement(test, keeping, get_state, set_state, names, options)

    @functools.wraps(usual_loop)
    def loop(cond: Any, body: Any, loop_vars: Any, shape_invariants: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not is_without_sizes() or shape_invariants is not None:
            return usual_loop(cond, body, loop_vars, shape_invariants, *args, **kwargs)

        def keeping(*values: Any) -> Any:
            left = body(*values)
            if len(loop_vars) == 1 and not isinstance(left, (list, tuple)):
                return _keep(left, loop_vars[0])
            return _keep(left, type(left)(loop_vars) if type(left) in (list, tuple) else loop_vars)

        return usual_loop(cond, keeping, loop_vars, shape_invariants, *args, **kwargs)

    control_flow._tf_while_stmt, while_v2.while_loop = statement, loop


def _keep(left: Any, entered: Any) -> Any:
    """Returns what an iteration left, with the shapes of what entered the loop where these say more."""
    try:
        tf.nest.assert_same_structure(left, entered)
    except (TypeError, ValueError):  # TensorFlow says what is wrong with it
        return left
    return tf.nest.map_structure(_keep_shape, left, entered)


def _keep_shape(left: Any, entered: Any) -> Any:
    if not isinstance(left, tf.Tensor) or not isinstance(entered, tf.Tensor) or left.dtype in (tf.resource, tf.variant):
        return left
    says_more = entered.shape != left.shape and entered.shape.is_subtype_of(left.shape)
    return tf.ensure_shape(left, entered.shape, name="kept_by_loop") if says_more else left
