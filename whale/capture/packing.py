"""Packs tensors into structures as ``tf.nest.pack_sequence_as`` does, prepared once for structures that many calls use.

``tf.nest`` looks at the structure anew in each call, which takes longer than running a small step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import tensorflow as tf

_CONSTANTS = (type(None), bool, int, float, str)


def make_packer(structure: Any, leaf: type) -> Callable[[Iterable[Any]], Any] | None:
    """Returns a callable that packs values into a structure, in the order of ``tf.nest.flatten``; None if the structure
    has parts other than tuples, lists, dicts, leaves and Python's constants, which stay as they are.

    Args:
      structure: the structure.
      leaf: type of what the values replace.
    """
    found = _prepare(structure, leaf)
    return None if found is None else lambda values: found(iter(values))


def _prepare(structure: Any, leaf: type) -> Callable[[Iterator[Any]], Any] | None:
    kind = type(structure)
    if isinstance(structure, leaf):
        return next
    if kind in _CONSTANTS:
        return lambda values: structure
    if kind is dict:
        try:
            keys = sorted(structure)
        except TypeError:  # which tf.nest refuses, too
            return None
        pack = _prepare([structure[key] for key in keys], leaf)
        if pack is None:
            return None
        found, order = pack, list(structure)
        if order == keys:
            return lambda values: dict(zip(keys, found(values)))

        def pack_dict(values: Iterator[Any]) -> dict[Any, Any]:
            packed = dict(zip(keys, found(values)))
            return {key: packed[key] for key in order}

        return pack_dict
    if kind not in (tuple, list):
        return None
    parts = [_prepare(part, leaf) for part in structure]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return lambda values: kind([part(values) for part in known])


def make_element_packer(spec: Any) -> Callable[[Iterable[Any]], Any]:
    """Returns a callable that packs the flat tensors of a dataset's element, whose structure and types are ``spec``."""
    return make_packer(spec, tf.TensorSpec) or partial(_pack_anew, spec)


def _pack_anew(spec: Any, leaves: Iterable[Any]) -> Any:
    return tf.nest.pack_sequence_as(spec, list(leaves))
