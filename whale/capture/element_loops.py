"""Traces loops over datasets and iterators inside of steps as loops over tensors, which all ranks run.

TensorFlow makes a loop over a dataset one operation, which runs the loop's body as a function of its own: one rank
would train alone. Here such a loop reads an iterator, and the element comes out of the branch that asks whether there
is one, so that what one rank has read is known to all where the body begins.

Decision: 0197.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.operators import control_flow
from tensorflow.python.data.ops import iterator_ops
from tensorflow.python.ops import gen_dataset_ops

_KINDS = (tf.data.Dataset, iterator_ops.OwnedIterator)


@contextmanager
def trace_element_loops() -> Iterator[None]:
    """Makes AutoGraph trace loops over datasets and iterators as this module does, inside of the context."""
    known = control_flow.for_loop_registry._registry
    usual = {kind: known[kind] for kind in _KINDS}
    known |= {kind: _make_loop(loop) for kind, loop in usual.items()}
    try:
        yield
    finally:
        known |= usual


def _make_loop(usual: Callable[..., None]) -> Callable[..., None]:
    def loop(elements: Any, *parts: Any) -> None:
        if tf.executing_eagerly() or not all(map(_may_stand_in, _list_parts(elements.element_spec))):
            usual(elements, *parts)
        else:
            _loop(_begin(elements) if isinstance(elements, tf.data.Dataset) else elements, *parts)

    return loop


def _begin(dataset: tf.data.Dataset) -> Any:
    """Returns an iterator over a dataset, which begins anew wherever the loop does."""
    spec = dataset.element_spec
    flat = {"output_types": dataset._flat_types, "output_shapes": dataset._flat_shapes}
    with tf.init_scope():
        resource = gen_dataset_ops.anonymous_iterator_v3(**flat)
    gen_dataset_ops.make_iterator(dataset._variant_tensor, resource)
    return iterator_ops.OwnedIterator(components=[resource], element_spec=spec)


def _loop(
    iterator: Any,
    more: Callable[[], Any] | None,
    body: Callable[[Any], None],
    get_state: Callable[[], Any],
    set_state: Callable[[Any], None],
    names: tuple[str, ...],
    options: dict[str, Any],
) -> None:
    """Does what AutoGraph's loop over an iterator does.

    Args:
      more: whether the loop goes on, as the script says (``break``); None: to the end.
      body: one turn, with an element.
      get_state, set_state: the variables of Python that the loop changes, called ``names``.
    """
    has_next: Any = tf.constant(True)

    def get_all() -> Any:
        return has_next, *get_state()

    def set_all(values: Any) -> None:
        nonlocal has_next
        has_next, *rest = values
        set_state(tuple(rest))

    def goes_on() -> Any:
        return has_next if more is None else tf.cond(has_next, more, lambda: False)

    def turn() -> None:
        nonlocal has_next
        found = iterator.get_next_as_optional()
        has_next = found.has_value()
        element = tf.cond(has_next, found.get_value, lambda: _make_some(iterator.element_spec))
        control_flow.if_stmt(has_next, lambda: body(element), lambda: None, get_state, set_state, names, len(names))

    control_flow._tf_while_stmt(goes_on, turn, get_all, set_all, ("has_next", *names), options)


def _make_some(spec: Any) -> Any:
    """Returns some element of a spec, for where there is none: of ones in unknown sizes, as splits of rows begin so."""
    parts = [
        tf.zeros([1 if size is None else size for size in part.shape] if part.shape.rank else [], part.dtype)
        for part in _list_parts(spec)
    ]
    return tf.nest.pack_sequence_as(spec, parts, expand_composites=True)


def _list_parts(spec: Any) -> list[Any]:
    found: list[Any] = tf.nest.flatten(spec, expand_composites=True)
    return found


def _may_stand_in(part: Any) -> bool:
    """Tells whether a part of an element is a tensor, and none that stands for a dataset or a table."""
    return isinstance(part, tf.TensorSpec) and part.dtype not in (tf.variant, tf.resource)
