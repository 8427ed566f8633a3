"""Reports a run that has trained while Whale distributed nothing of it: at its end, and in a notebook after
the cell.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import tensorflow as tf

from whale.capture.captured import Traced
from whale.errors import ProgramError
from whale.log import log
from whale.runtime.context import Context
from whale.runtime.variables.external_updates import ExternalUpdates

_MOST = 5


def find_unsynchronized_training(context: Context) -> ProgramError | None:
    """Returns an error if every rank has trained alone; None if Whale has distributed steps, nothing was trained, or
    ``solo`` allows it.
    """
    outside = context.outside
    if outside is None or context.solo or context.distributed or not outside.trained:
        return None
    facts = {"trained on every rank": _list_training(outside.trained)}
    if beside := _describe_other_distribution():
        facts["beside it"] = beside
    return ProgramError(
        f"Whale has distributed nothing: each of the {context.size} ranks has trained alone",
        **facts,
        expected="steps of wh.function, runs of wh.Session, or Keras' fit after wh.init()",
        action="decorate the step with wh.function in place of tf.function, or run it in a wh.Session; if every rank "
        "is to train alone, call wh.init(solo=True)",
    )


def gives_gradients(traced: Traced) -> bool:
    """Returns True if a step returns gradients, which the script then applies: of most of the variables that the step
    reads.

    Gradients are recognised by dtypes and shapes, which a loss or predictions share with few variables, and by
    tf.IndexedSlices.
    """
    outputs = traced.structured_outputs
    if any(isinstance(one, tf.IndexedSlices) for one in tf.nest.flatten(outputs)):
        return True
    variables = [captured.variable for captured in traced.variables]
    wanted = _count_types(one for one in variables if one.trainable)
    given = _count_types(one for one in tf.nest.flatten(outputs, expand_composites=True) if isinstance(one, tf.Tensor))
    return 2 * (wanted & given).total() > wanted.total()


def _count_types(tensors: Iterable[tf.Tensor | tf.Variable]) -> Counter[tuple[tf.DType, tuple[int | None, ...]]]:
    """Counts the (dtype, shape) pairs of floating-point tensors of known rank."""
    kinds = ((one.dtype.base_dtype, one.shape) for one in tensors)
    return Counter((dtype, tuple(shape)) for dtype, shape in kinds if dtype.is_floating and shape.rank is not None)


def watch_in_process_training(context: Context) -> None:
    """Makes a run whose ranks are threads of this process warn once if it trains and Whale distributes nothing of it.

    A script gets the warning at its end, a notebook after the cell.
    """
    noted = ExternalUpdates()
    said = False

    def warn(*_: object) -> None:
        nonlocal said
        if said or context.solo or context.distributed or not noted.trained:
            return
        said = True
        error = ProgramError(
            f"Whale has distributed nothing: one device has trained, and the {context.size} ranks of this process "
            "did nothing",
            trained=_list_training(noted.trained),
            expected="steps of wh.function, runs of wh.Session, or Keras' fit after wh.init()",
            action="decorate the step with wh.function in place of tf.function, or run it in a wh.Session; if the "
            "ranks are to do nothing, call wh.init(solo=True)",
        )
        log.warning(str(error))

    context.hooks.at_end += [warn, noted.take_back]
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        shell.events.register("post_run_cell", warn)
        context.hooks.at_end.append(functools.partial(shell.events.unregister, "post_run_cell", warn))


def _list_training(trained: Mapping[str, Collection[str]]) -> str:
    """Returns what has trained, in words, with the names of some of its variables."""
    found = [
        what + (f" ({', '.join(list(names)[:_MOST])}{', ...' * (len(names) > _MOST)})" if names else "")
        for what, names in trained.items()
    ]
    return "; ".join(found[:_MOST]) + (f"; and {len(found) - _MOST} more" if len(found) > _MOST else "")


def _describe_other_distribution() -> str:
    """Returns a sentence if Horovod runs in this process with several ranks; "" if not."""
    for name in ("horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras"):
        found = sys.modules.get(name)
        try:
            if found is not None and found.size() > 1:
                return (
                    "Horovod runs: what hvd.DistributedOptimizer or a factor of hvd.size() averages, Whale does not see"
                )
        except ValueError:  # it was imported, and not started
            continue
    return ""
