"""Evaluates one op with TensorFlow, eagerly: the evaluator that the prover of rules is given."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from whale.ir.values import DType, Shape


def _attribute(value: Any) -> Any:
    if isinstance(value, DType):
        return tf.as_dtype(str(value))
    if isinstance(value, Shape):
        return tf.TensorShape(value.dims)
    return [_attribute(v) for v in value] if isinstance(value, tuple) else value


def _group(op_type: str, inputs: Sequence[Any]) -> dict[str, Any]:
    """Operands by argument name; list arguments take equal shares of what single ones leave."""
    arguments = op_def_registry.get(op_type).input_arg
    lists = [a.name for a in arguments if a.number_attr or a.type_list_attr]
    each = (len(inputs) - (len(arguments) - len(lists))) // max(len(lists), 1)
    grouped, at = {}, 0
    for argument in arguments:
        if argument.name in lists:
            grouped[argument.name] = list(inputs[at : at + each])
            at += each
        else:
            grouped[argument.name] = inputs[at]
            at += 1
    return grouped


@cache
def _parameters(op_type: str) -> tuple[str, ...]:
    return tuple(inspect.signature(getattr(tf.raw_ops, op_type)).parameters)


def evaluate(op_type: str, attrs: Mapping[str, Any], inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The outputs of ``op_type`` on the CPU.

    Raises:
      tf.errors.OpError: the kernel refuses the operands.
    """
    function = getattr(tf.raw_ops, op_type)
    parameters = _parameters(op_type)
    grouped, given = (
        _group(op_type, [tf.constant(x) for x in inputs]),
        {k: _attribute(v) for k, v in attrs.items() if k[0] != "_"},
    )
    # raw_ops renames some arguments and attributes (Select's t and e are x and y there) but keeps their order.
    unnamed = iter([p for p in parameters if p not in grouped and p not in given])
    result = function(**{k if k in parameters else next(unnamed): v for k, v in (*grouped.items(), *given.items())})
    flat = tf.nest.flatten(result)
    return [np.asarray(r) for r in flat]
