"""Patches TensorFlow's gradients and optimizers for EPL scripts.

A gradient belongs to the task graph of its forward op, an update to none, wherever the script builds them. Gradients
are also scaled to the mean over replicas, and accumulated over runs if the script asks for micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gradients_util

from whale.capture.gradients import scope_gradients
from whale.errors import ProgramError
from whale.frontends.epl.batch_scaling import find_scaling
from whale.frontends.epl.env import Env
from whale.frontends.epl.graph import Graph
from whale.frontends.epl.strategies import mark_graph
from whale.log import log
from whale.runtime.context import find_running, require_current

_Apply = Callable[..., Any]


def patch_gradients() -> None:
    """Patches tf.gradients, and ``apply_gradients`` of all tf.compat.v1 optimizers, for EPL scripts; once per process.

    A scope (``with epl.replicate(...)``) that is open where the script calls these does not apply to what they build: a
    gradient belongs to the task graph of its forward op, an update to none.
    """
    if hasattr(gradients_util, "_whale_epl"):
        return
    gradients_util._whale_epl = True
    original = gradients_util._GradientsHelper

    @functools.wraps(original)
    def compute_gradients(*args: Any, **kwargs: Any) -> Any:
        if not is_active():
            return original(*args, **kwargs)
        with mark_graph(None):
            with scope_gradients():
                found = original(*args, **kwargs)
            share = _find_share(args[0] if args else kwargs["ys"], args[1] if len(args) > 1 else kwargs["xs"])
            found = [_multiply(slope, share) for slope in found]
        for slope in found:
            parts = [slope.values, slope.indices] if isinstance(slope, tf.IndexedSlices) else [slope]
            Graph.get().differentiated.update(t.op.name for t in parts if isinstance(t, tf.Tensor))
        return found

    gradients_util._GradientsHelper = compute_gradients
    base = tf.compat.v1.train.Optimizer
    pending = [base]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        _patch_updates(kind)

    def patch_later(cls: type, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        _patch_updates(cls)

    base.__init_subclass__ = classmethod(patch_later)


def _find_share(losses: Any, variables: Any) -> float:
    """Returns the factor by which gradients of the whole batch become the mean of the replicas' gradients.

    For a mean over rows it is 1. For a sum over rows it is 1 / replicas. If the loss cannot be classified, rank 0 logs
    a warning once, and the factor is 1.

    Args:
      losses: what the script differentiates, the argument ``ys`` of tf.gradients.
      variables: the argument ``xs``; for anything but variables the factor is 1.
    """
    env, layout = Env.get(), Graph.get().layout
    copies = layout.replicas * layout.batches.turns
    read = [x.op.type if isinstance(x, tf.Tensor) else "VarHandleOp" for x in tf.nest.flatten(variables)]
    if copies == 1 or not set(read) <= {"VarHandleOp", "ReadVariableOp"}:
        return 1.0
    powers = {None if (found := find_scaling(y)) is None else found.power for y in tf.nest.flatten(losses)}
    if powers == {0}:
        return 1.0
    if len(powers) == 1 and None not in powers:
        return copies ** -float(powers.pop() or 0)
    if not env.told and require_current("tf.gradients").rank == 0:
        env.told = True
        log.warning(
            "Whale cannot tell whether a loss is a mean or a sum over the rows of its batch, so its gradients are "
            "applied as those of a mean over the rows of all replicas; if it is a sum, divide it by the number of rows"
        )
    return 1.0


def is_active() -> bool:
    """Returns True if an EPL script runs in this process and is building a graph."""
    context = find_running()
    return context is not None and context.planning.meaning is not None and not tf.executing_eagerly()


def _patch_updates(kind: type) -> None:
    """Patches ``apply_gradients`` of an optimizer class, if the class itself defines this method."""
    original = vars(kind).get("apply_gradients")
    if original is None or hasattr(original, "_whale_epl"):
        return

    @functools.wraps(original)
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        env = Env.get()
        if not is_active() or env.applying:
            return original(self, grads_and_vars, *args, **kwargs)
        env.applying = True
        try:
            with mark_graph(None):
                apply = functools.partial(original, self)
                return _apply_gradients(apply, list(grads_and_vars), args, kwargs)
        finally:
            env.applying = False

    apply_gradients._whale_epl = True  # type: ignore[attr-defined]
    kind.apply_gradients = apply_gradients  # type: ignore[attr-defined]


def _apply_gradients(apply: _Apply, pairs: list[tuple[Any, Any]], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    graph, config = Graph.get(), Env.get().config
    graph.gradients += [slope for slope, _ in pairs if slope is not None]
    layout = graph.layout
    sums = config.communication.gradients_reduce_method == "sum"
    if sums:
        pairs = [(_multiply(slope, layout.replicas), v) for slope, v in pairs]
    if layout.accumulated == 1:
        # The gradients of one run are the mean over its micro-batches; their sum is larger by the number of these.
        times = layout.batches.turns if sums else 1
        return apply([(_multiply(slope, times), v) for slope, v in pairs], *args, **kwargs)
    return _accumulate(apply, pairs, args, kwargs, layout.accumulated, sums)


def _multiply(slope: Any, factor: float) -> Any:
    if slope is None or factor == 1:
        return slope
    if isinstance(slope, tf.IndexedSlices):
        return tf.IndexedSlices(_multiply(slope.values, factor), slope.indices, slope.dense_shape)
    return slope * tf.cast(factor, slope.dtype)


def _accumulate(
    apply: _Apply, pairs: list[tuple[Any, Any]], args: Sequence[Any], kwargs: dict[str, Any], count: int, sums: bool
) -> Any:
    """Adds gradients to accumulators, and applies their mean or sum in every ``count``-th run of the returned
    operation.

    Args:
      apply: the optimizer's original ``apply_gradients``.
      pairs: (gradient, variable) pairs.
      args, kwargs: the other arguments of ``apply_gradients``. The global step grows only when gradients are applied.
      count: number of runs per update.
      sums: True to apply the sum of the accumulated gradients, False for their mean.
    """
    name = kwargs.pop("name", None) or (args[1] if len(args) > 1 else None)
    step = kwargs.pop("global_step", args[0] if args else None)
    used = [(slope, v) for slope, v in pairs if slope is not None]
    v1 = tf.compat.v1
    with v1.variable_scope(v1.get_variable_scope(), reuse=v1.AUTO_REUSE, use_resource=True):
        sums_of = [_make_zeros(f"{v.op.name}/accumulated_gradient", v) for _, v in used]
        counter = v1.get_variable(
            "accumulated_runs", [], tf.int64, v1.zeros_initializer(), trainable=False,
        )  # fmt: skip
    adds = [total.assign_add(tf.convert_to_tensor(slope)).op for total, (slope, _) in zip(sums_of, used)]
    with tf.control_dependencies([*adds, counter.assign_add(1).op]):
        now = tf.equal(counter.read_value() % count, 0)

    def update() -> Any:
        means = [t.read_value() if sums else t.read_value() / tf.cast(count, t.dtype.base_dtype) for t in sums_of]
        done = apply(list(zip(means, (v for _, v in used))), global_step=step)
        with tf.control_dependencies([done]):
            emptied = [t.assign(tf.zeros_like(m)).op for t, m in zip(sums_of, means)]
        with tf.control_dependencies(emptied):
            return tf.constant(True)

    def wait() -> Any:
        return tf.constant(False)

    with tf.control_dependencies(adds):
        done = tf.cond(now, update, wait)
    _refuse_variables_inside(done)
    with tf.control_dependencies([done]):
        return tf.no_op(name or "accumulated_update")


def _make_zeros(name: str, variable: Any) -> Any:
    v1 = tf.compat.v1
    return v1.get_variable(
        name, variable.shape, variable.dtype.base_dtype, v1.zeros_initializer(), trainable=False,
    )  # fmt: skip


def _refuse_variables_inside(done: tf.Tensor) -> None:
    graph = done.graph
    functions = {f.signature.name: f for f in graph.as_graph_def().library.function}
    op = done.op
    while op.type == "Identity":
        op = op.inputs[0].op
    for key in ("then_branch", "else_branch"):
        if op.type in ("If", "StatelessIf") and any(
            n.op == "VarHandleOp" for n in functions[op.get_attr(key).name].node_def
        ):
            raise ProgramError(
                "an optimizer creates variables in apply_gradients, which runs only once per several micro-batches",
                op=op.name,
                given="variables created in apply_gradients; one task graph and pipeline.num_micro_batch above 1",
                expected="variables created in _create_slots, as in TensorFlow's optimizers",
                action="create the optimizer's variables in _create_slots, or set pipeline.num_micro_batch to 1",
            )
