"""Whole batches that every rank brings: compared on the first steps, and now and then after."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
import tensorflow as tf

from whale.errors import CommError, ProgramError
from whale.runtime.run.context import Context
from whale.runtime.variables.compared import checksum

FIRST_STEPS = 3
_MOST_BYTES = 1 << 26


def compared(
    call: Callable[[list[Any]], Any],
    context: Context,
    step: str,
    names: Sequence[str],
    parts: Collection[str],
    constants: Mapping[str, tf.Tensor],
) -> Callable[[list[Any]], Any]:
    """``call``, of whose arguments those are compared between the ranks that each brings whole.

    That is done on the first three calls and on every ``check.inputs``-th after; captured tensors are compared once.

    Args:
      step: its name.
      names: of the arguments, in the order of ``call``'s tensors.
      parts: those of which each rank brings its own rows.
      constants: what the step takes beside its arguments, by name.
    """
    every = context.config["check.inputs"]
    whole = [i for i, name in enumerate(names) if name not in parts]
    if not every or not context.between_processes or context.local_batch or not (whole or constants):
        return call
    calls = 0

    def checked(tensors: list[Any]) -> Any:
        nonlocal calls
        if calls < FIRST_STEPS or not calls % every:
            given = {names[i]: tensors[i] for i in whole}
            refuse_other_values(given if calls else {**given, **constants}, context, step, f"call {calls}")
        calls += 1
        return call(tensors)

    return checked


def refuse_other_values(given: Mapping[str, Any], context: Context, step: str, when: str) -> None:
    """Compares tensors that the ranks have to be given alike; collective between processes.

    Args:
      given: by name; of what is no tensor of numbers or strings, nothing is said.
      step: what they are given to.
      when: which time that is, in words.

    Raises:
      ProgramError: they differ, with the first name.
      CommError: the ranks are at different places.
    """
    sums = {
        name: checksum(_sample(value))
        for name, value in given.items()
        if isinstance(value, tf.Tensor) and value.dtype not in (tf.resource, tf.variant)
    }
    purpose = f"the comparison of what `{step}` is given in {when}"
    data = msgspec.json.encode((step, sums))
    everyone = context.comms[0].allgather_bytes("whale/inputs", data, context.config["check.timeout_s"], purpose)
    said = [msgspec.json.decode(one, type=tuple[str, dict[str, int]]) for one in everyone]
    other = next((rank for rank, (name, _) in enumerate(said) if name != said[0][0]), None)
    if other is not None:
        raise CommError(
            "the ranks are about to run different things",
            given=f"rank 0: `{said[0][0]}`; rank {other}: `{said[other][0]}`",
            expected="the same steps in the same order on every rank",
            action="run the same script with the same arguments and data shapes on every rank",
        )
    for name, first in said[0][1].items():
        ranks = ["0"] + [str(rank) for rank, (_, sums_there) in enumerate(said) if sums_there.get(name) != first]
        if len(ranks) > 1:
            raise ProgramError(
                "the ranks pass different values to a step, which takes them for the same whole batch",
                op=step,
                argument=name,
                given=f"ranks {' and '.join(ranks)} pass different values in {when}",
                expected="the same values on every rank (compared on the first steps and every check.inputs-th)",
                action='use wh.shard(dataset), or batch.mode="local" where each rank reads files of its own; give '
                "shuffles made before wh.init(), and random maps, a seed; remove what depends on the rank",
            )


def _sample(value: tf.Tensor) -> tf.Tensor:
    """All of a tensor, or of a large one elements at equal distances: what differs, differs nearly everywhere."""
    distance = -(-value.dtype.size * int(tf.size(value)) // _MOST_BYTES) if value.dtype != tf.string else 1
    return value if distance <= 1 else tf.reshape(value, [-1])[::distance]
