"""Compares copies of variables between processes, by checksums."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import tensorflow as tf

from whale.distributed.likely_cause import describe_likely_cause
from whale.distributed.ranks import WRITE_TIMEOUT_S, Ranks
from whale.errors import CommError
from whale.replicas import Said, find_differing, in_words


def compute_checksum(value: tf.Tensor) -> int:
    """Returns a checksum of a tensor's elements, which differs with high probability for tensors with other values."""
    array = np.ascontiguousarray(value.numpy())
    if array.dtype.hasobject:
        return zlib.crc32(b"\0".join(map(bytes, array.reshape(-1).tolist())))
    return zlib.crc32(array.reshape(-1).view(np.uint8).data)


def describe_variables(variables: Iterable[tuple[str, tf.Tensor | None, bool]]) -> dict[str, tuple[int, bool]]:
    """Describes this rank's variables by checksums.

    ``variables``: (name, its value here or None if other ranks hold it, whether it must be equal).

    Variables of one name are distinguished by their count and position: if a rank has more of them
    than another, it is unknown which correspond.
    """
    variables = list(variables)
    count, seen = Counter(name for name, _, _ in variables), Counter[str]()
    found = {}
    for name, value, must in variables:
        seen[name] += 1
        if value is not None:
            shape = ",".join(map(str, value.shape))
            found[f"{name}#{seen[name]}/{count[name]}[{shape}]"] = compute_checksum(value), must
    return found


def refuse_differences(mine: Said, context: Ranks, when: str) -> int:
    """Compares the variables of all ranks; collective.

    Args:
      mine: the result of ``describe_variables`` for this rank.
      when: describes the following action, for messages.

    Returns:
      how many variables were compared.

    Raises:
      CommError: on every rank, if a variable differs, with their names.
    """
    comm = context.comms[0]
    everyone = comm.allgather_bytes("whale/replicas", msgspec.json.encode(mine), WRITE_TIMEOUT_S, when)
    said: Sequence[Said] = [msgspec.json.decode(one, type=dict[str, tuple[int, bool]]) for one in everyone]
    found, compared = find_differing(said)
    if found:
        raise CommError(
            "a variable differs between ranks" if len(found) == 1 else f"{len(found)} variables differ between ranks",
            variable=in_words(found),
            given=f"other values than the first rank's, seen at {when}",
            **{"likely cause": f"an update on one rank alone, or {describe_likely_cause(context)}"},
            expected="equal copies",
            action="assign to variables on every rank, or inside a step; train in steps that Whale distributes only",
        )
    return compared
