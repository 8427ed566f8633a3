"""Replaces ``SyncReplicasOptimizer`` by the optimizer it wraps: Whale's steps are synchronous anyway."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from whale.errors import ProgramError
from whale.frontends.tf1.activation import find_spread_run, replace_method
from whale.log import log
from whale.runtime.context import Context


def patch_optimizers() -> None:
    """Patches the optimizer to be replaced by the one it wraps, during a run."""
    kind = tf.compat.v1.train.SyncReplicasOptimizer
    replace_method(kind, "__init__", _init)
    replace_method(kind, "apply_gradients", _apply_gradients)
    replace_method(kind, "get_chief_queue_runner", _make_queue_runner)
    replace_method(kind, "get_init_tokens_op", _make_tokens_op)
    replace_method(kind, "make_session_run_hook", _make_hook)


def _init(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    original(optimizer, *args, **kwargs)
    context = find_spread_run()
    if context is None:
        return
    waits, replicas = optimizer._replicas_to_aggregate, optimizer._total_num_replicas
    if waits != replicas:
        raise ProgramError(
            "SyncReplicasOptimizer sums the gradients of other batches than one of each replica",
            given=f"replicas_to_aggregate={waits}, total_num_replicas={replicas}",
            expected="equal numbers: a step of Whale is one global batch, divided over the ranks",
            action="give both the number of ranks, and sum over steps by pipeline.micro_batches",
        )
    _tell(context)
    if optimizer._variable_averages is not None:
        raise ProgramError(
            "SyncReplicasOptimizer averages variables in a thread of its own",
            given="variable_averages",
            expected="averages in the training step",
            action="group the train_op with variable_averages.apply(variables), and leave variable_averages out",
        )


def _tell(context: Context) -> None:
    if context.rank == 0 and "SyncReplicasOptimizer" not in context.reports.whole:
        context.reports.whole.add("SyncReplicasOptimizer")
        log.info(
            "SyncReplicasOptimizer stands for the optimizer that it wraps: a step computes the global batch on "
            "all ranks at once"
        )


def _apply_gradients(
    original: Any, optimizer: Any, grads_and_vars: Any, global_step: Any = None, name: Any = None
) -> Any:
    if find_spread_run() is None:
        return original(optimizer, grads_and_vars, global_step, name)
    return optimizer._opt.apply_gradients(grads_and_vars, global_step, name)


class _NoQueueRunner(tf.compat.v1.train.QueueRunner):  # type: ignore[misc]
    def __init__(self) -> None:
        pass

    def create_threads(self, *_: Any, **__: Any) -> list[Any]:
        return []


def _make_queue_runner(original: Any, optimizer: Any) -> Any:
    return original(optimizer) if find_spread_run() is None else _NoQueueRunner()


def _make_tokens_op(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    return original(optimizer, *args, **kwargs) if find_spread_run() is None else tf.no_op("no_sync_tokens")


def _make_hook(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    return original(optimizer, *args, **kwargs) if find_spread_run() is None else tf.compat.v1.train.SessionRunHook()
