"""Compares copies of variables between processes: by checksums, and where ranks may round differently, by sketches.

Decision: 0178.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import tensorflow as tf

from whale.distributed.collective_call_check import describe_likely_cause
from whale.distributed.ranks import WRITE_TIMEOUT_S, Ranks
from whale.errors import CommError
from whale.replicas import Held, Said, Sketch, find_differing, in_words

_MOST_BLOCKS, _LEAST_ELEMENTS = 64, 256  # blocks of a sketch, and elements of a block
_PRODUCTS = 3  # sums with random signs for each block; each misses a fault in the whole block in a few percent of cases
_ELEMENTS_AT_ONCE = 1 << 20


def compute_checksum(value: tf.Tensor) -> int:
    """Returns the CRC-32 of a tensor's elements; tensors with different values have different ones with high
    probability.
    """
    array = np.ascontiguousarray(value.numpy())
    if array.dtype.hasobject:
        return zlib.crc32(b"\0".join(map(bytes, array.reshape(-1).tolist())))
    return zlib.crc32(array.reshape(-1).view(np.uint8).data)


def make_sketch(array: np.ndarray) -> Sketch | None:
    """Returns the sketch of an array: a few sums of each block, by which arrays that differ by rounding are recognised;
    None for dtypes that do not round.
    """
    dtype = tf.as_dtype(array.dtype)
    if not (dtype.is_floating or dtype.is_complex):
        return None
    array = array.reshape(-1)
    if dtype.is_complex:
        array = array.view(dtype.real_dtype.as_numpy_dtype)
    size = max(_LEAST_ELEMENTS, -(-array.size // _MOST_BLOCKS))
    blocks: list[list[float]] = []
    infinite = 0
    for begin in range(0, array.size, size):
        sums = np.zeros(1 + _PRODUCTS)
        signs = np.random.Generator(np.random.Philox(len(blocks)))
        for at in range(begin, min(begin + size, array.size), _ELEMENTS_AT_ONCE):
            some = array[at : min(at + _ELEMENTS_AT_ONCE, begin + size)].astype(np.float64)
            finite = np.isfinite(some)
            infinite += int(some.size - finite.sum())
            some = np.where(finite, some, 0.0)
            bits = signs.integers(0, 1 << _PRODUCTS, some.size, np.uint8)
            sums[0] += some @ some
            for number in range(_PRODUCTS):
                sums[1 + number] += 2.0 * some[(bits >> number) & 1 == 1].sum() - some.sum()
        sums[0] = np.sqrt(sums[0])
        blocks.append(np.nan_to_num(sums).tolist())
    unit = tf.experimental.numpy.finfo(dtype.real_dtype.as_numpy_dtype).eps
    return Sketch(float(np.sqrt(float(unit))), infinite, blocks)


def describe_variables(variables: Iterable[tuple[str, tf.Tensor | None, bool]], rounds: bool = False) -> Said:
    """Describes this rank's variables, for comparison with those of other ranks.

    Variables of one name are distinguished by their count and position: if a rank has more of them than another, it is
    unknown which correspond.

    Args:
      variables: for each variable, its name, its value (None if only other ranks hold it), and whether its copies must
        be equal on all ranks.
      rounds: whether ranks may round differently, so that sketches (sums of blocks) are compared instead of bits.
    """
    variables = list(variables)
    count, seen = Counter(name for name, _, _ in variables), Counter[str]()
    found = {}
    for name, value, must in variables:
        seen[name] += 1
        if value is not None:
            shape = ",".join(map(str, value.shape))
            sketch = make_sketch(value.numpy()) if rounds else None
            found[f"{name}#{seen[name]}/{count[name]}[{shape}]"] = Held(compute_checksum(value), must, sketch)
    return found


def refuse_differences(mine: Said, context: Ranks, when: str) -> int:
    """Raises an error if variables differ between ranks; collective.

    Args:
      mine: the result of ``describe_variables`` on this rank.
      when: describes the action before which they are compared, for messages.

    Returns:
      how many variables were compared.

    Raises:
      CommError: on every rank, if a variable differs; names the variables and ranks.
    """
    comm = context.comms[0]
    everyone = comm.allgather_bytes("whale/replicas", msgspec.json.encode(mine), WRITE_TIMEOUT_S, when)
    said: Sequence[Said] = [msgspec.json.decode(one, type=dict[str, Held]) for one in everyone]
    found, compared = find_differing(said)
    if found:
        raise CommError(
            "a variable differs between ranks" if len(found) == 1 else f"{len(found)} variables differ between ranks",
            variable=in_words(found),
            given=f"other values than the first rank's, seen at {when}",
            **{"likely cause": f"an update on one rank alone, or {describe_likely_cause(context)}"},
            expected="copies that differ by rounding at most" if context.rounds_otherwise else "equal copies",
            action="assign to variables on every rank, or inside a step; train only in steps that Whale distributes",
        )
    return compared
