"""Averages gradients over the ranks, for ``hvd.DistributedGradientTape`` and for distributed optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from whale.errors import ProgramError
from whale.frontends.horovod.ranks import refuse_other_set, require_own_run
from whale.frontends.horovod.reductions import Average, Compression, ReduceOp, Sum, divide_by_size, find_reduction
from whale.frontends.horovod.sums import grouped_allreduce, reduce_in_buckets


@dataclass
class Averaging:
    """Reduces gradients over the ranks; an instance is called with this rank's gradients and returns the reduced ones.

    Attributes:
      name: prefix of the keys by which ranks match their exchanges.
      op: ``Average`` or ``Sum``.
      compression: a class of ``hvd.Compression``: the dtype in which gradients are sent.
      sparse_as_dense: whether to convert tf.IndexedSlices to tensors first.
      predivide: with ``Average``, gradients are divided by this factor before they are summed, and the sum by (number
        of ranks / this factor).
      groups: lists of variables whose gradients are sent together, or a number of such groups; None: buckets by bytes.
      scale_local: whether to divide gradients of ``local`` variables by the number of ranks.
      local: ids (``find_variable_id``) of variables whose gradients are not reduced.
    """

    name: str
    op: ReduceOp = Average
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    predivide: float = 1.0
    groups: Any = None
    scale_local: bool = True
    local: set[int] = field(default_factory=set)

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the reduced gradients, in the order of ``variables``; a gradient of None stays None."""
        found = [
            tf.convert_to_tensor(g) if self.sparse_as_dense and isinstance(g, tf.IndexedSlices) else g
            for g in gradients
        ]
        together = [None if find_variable_id(v) in self.local else g for g, v in zip(found, variables)]
        reduced = self._reduce(together, variables)
        return [
            self._decompress_own(gradient) if find_variable_id(variable) in self.local else result
            for gradient, variable, result in zip(found, variables, reduced)
        ]

    def _reduce(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        before, after = 1.0 / self.predivide, self.predivide
        if not self.groups:
            return reduce_in_buckets(gradients, self.op, self.compression, before, after, self.name)
        results = list(gradients)
        for number, positions in enumerate(self._group_gradients(gradients, variables)):
            sent = grouped_allreduce(
                [gradients[p] for p in positions], op=self.op, compression=self.compression,
                prescale_factor=before, postscale_factor=after, name=f"{self.name}.{number}",
            )  # fmt: skip
            for position, value in zip(positions, sent):
                results[position] = value
        return results

    def _group_gradients(self, gradients: list[Any], variables: Sequence[Any]) -> list[list[int]]:
        there = [p for p, gradient in enumerate(gradients) if gradient is not None]
        if isinstance(self.groups, int):
            each, more = divmod(len(there), self.groups)
            ends = [0]
            for number in range(self.groups):
                ends.append(ends[-1] + each + (number < more))
            return [there[a:b] for a, b in itertools.pairwise(ends) if b > a]
        position_of = {find_variable_id(variables[p]): p for p in there}
        named = [[position_of.pop(find_variable_id(v), None) for v in group] for group in self.groups]
        kept = [[p for p in group if p is not None] for group in named]
        return [group for group in kept if group] + [[p] for p in position_of.values()]

    def _decompress_own(self, gradient: Any) -> Any:
        size = require_own_run("hvd.size()")[0].size
        if gradient is None or not self.scale_local:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(divide_by_size(gradient.values, size), gradient.indices, gradient.dense_shape)
        return divide_by_size(gradient, size)


def make_averaging(
    name: str,
    op: ReduceOp | None,
    compression: Any,
    sparse_as_dense: bool,
    gradient_predivide_factor: float,
    groups: Any,
    num_groups: int,
    process_set: Any,
    scale_local_gradients: bool,
) -> Averaging:
    """Checks the arguments of Horovod's wrappers, and returns the Averaging that they describe.

    Raises:
      ProgramError: the arguments contradict each other, or are not supported.
    """
    refuse_other_set(process_set, name)
    found = find_reduction(op, None, (Average, Sum))
    groups = num_groups if groups is None else groups
    if gradient_predivide_factor != 1.0 and found is not Average:
        raise ProgramError(
            "gradient_predivide_factor needs op=hvd.Average: a sum is not divided",
            given=f"gradient_predivide_factor={gradient_predivide_factor} with op={found.name}",
            expected="op=hvd.Average",
            action="remove gradient_predivide_factor",
        )
    if groups is not None and not (isinstance(groups, list) or (isinstance(groups, int) and groups >= 0)):
        raise ProgramError(
            f"{name} does not accept these groups of gradients",
            given=f"groups={groups!r}",
            expected="num_groups, 0 or more, or groups as a list of lists of variables",
            action="pass such a value, or leave the argument out",
        )
    return Averaging(
        name, found, compression, sparse_as_dense, gradient_predivide_factor, groups, scale_local_gradients
    )


def find_variable_id(variable: Any) -> int:
    """Returns a number that identifies a variable; a Keras variable has the number of the tf.Variable that it wraps."""
    held = variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)
    return id(variable if callable(held) else held)


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Returns a tape whose ``gradient`` returns gradients averaged over all ranks.

    Args:
      gradtape: the tape to wrap, before or after it has recorded. It may still be used for this rank's own gradients.
      compression: a class of ``hvd.Compression``: the dtype in which gradients are sent.
      sparse_as_dense: whether to convert tf.IndexedSlices to tensors first; sends less if most rows have gradients.
      op: ``Average`` or ``Sum``.
      gradient_predivide_factor: with ``Average``, by what gradients are divided before they are summed.
      groups, num_groups: variables whose gradients are sent together: lists of variables, or a number of groups.
      scale_local_gradients: whether gradients of local sources (``register_local_source``), which are not averaged, are
        divided by the number of ranks.
      device_dense, device_sparse: ignored, only accepted because Horovod has them.

    Raises:
      ProgramError: arguments contradict each other, or are not supported.
    """
    average = make_averaging(
        "DistributedGradientTape", op, compression, sparse_as_dense, gradient_predivide_factor, groups, num_groups,
        process_set, scale_local_gradients,
    )  # fmt: skip
    base = type(gradtape)

    def gradient(self: Any, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("use_generic_names", None)
        found = base.gradient(self, target, sources, output_gradients, *args, **kwargs)
        reduced = average(tf.nest.flatten(found), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(found, reduced)

    def register_local_source(self: Any, source: Any) -> None:
        average.local.add(find_variable_id(source))

    cls = type(base.__name__, (base,), {"gradient": gradient, "register_local_source": register_local_source})
    tape: Any = object.__new__(cls)
    tape.__dict__.update(gradtape.__dict__)
    return tape


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape, *args: Any, local_layers: Any = None, **kwargs: Any
) -> tf.GradientTape:
    """Returns a tape as ``DistributedGradientTape`` does, which does not average gradients of some layers.

    Args:
      local_layers: a layer, or a list of layers, whose gradients stay each rank's own.
    """
    tape = DistributedGradientTape(gradtape, *args, **kwargs)
    layers = [] if local_layers is None else local_layers if isinstance(local_layers, list) else [local_layers]
    for layer in layers:
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


class Accumulation:
    """Accumulates the gradients of several backward passes on this rank, before they are averaged over the ranks.

    Args:
      passes: number of backward passes per update.
      mean: True to use the mean of the passes' gradients, False for their sum.
    """

    def __init__(self, passes: int, mean: bool) -> None:
        self.passes, self.mean = passes, mean
        self._sums: list[Any] | None = None
        self._count: Any = None

    def __call__(self, gradients: Sequence[Any], update: Callable[[list[Any]], Any]) -> Any:
        """Adds gradients to the accumulators; every ``passes``-th call passes their sum or mean to ``update``.

        Args:
          update: takes the accumulated gradients, averages them over the ranks and applies them.

        Returns:
          A bool tensor, True if ``update`` was called; a graph of TensorFlow 1 has to run it.

        Raises:
          ProgramError: the shape of a gradient is not fully known.
        """
        dense = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
        self._make(dense)
        assert self._sums is not None
        kept = [s for s in self._sums if s is not None]
        added = [s.assign_add(g) for s, g in zip(self._sums, dense) if s is not None and g is not None]
        with tf.control_dependencies(added):
            count = self._count.assign_add(1)
        due = tf.equal(tf.math.floormod(count, self.passes), 0)

        def apply_now() -> Any:
            factor = self.passes if self.mean else 1
            values = [None if s is None else divide_by_size(s.read_value(), factor) for s in self._sums or ()]
            done = update(values)
            after = [done] if isinstance(done, tf.Operation | tf.Tensor) else []
            with tf.control_dependencies([v for v in values if v is not None] + after):
                cleared = [s.assign(tf.zeros_like(s)) for s in kept]
            with tf.control_dependencies(cleared):
                return tf.constant(True)

        with tf.control_dependencies(added):
            return tf.cond(due, apply_now, lambda: tf.constant(False))

    def _make(self, gradients: list[Any]) -> None:
        if self._sums is not None:
            return
        unknown = next((g for g in gradients if g is not None and not g.shape.is_fully_defined()), None)
        if unknown is not None:
            raise ProgramError(
                "gradients of unknown shape cannot be accumulated over several backward passes",
                given=f"a gradient of shape {unknown.shape} with backward_passes_per_step={self.passes}",
                expected="gradients of fully known shape",
                action="leave backward_passes_per_step out, or give the variables fully known shapes",
            )
        with tf.init_scope():
            self._count = tf.Variable(0, trainable=False, dtype=tf.int64, name="backward_passes")
            self._sums = [
                None if g is None else tf.Variable(tf.zeros(g.shape, g.dtype), trainable=False) for g in gradients
            ]
