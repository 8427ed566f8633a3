"""Compares between ranks what every rank passes whole or has read whole: on the first steps, and now and then after.

Of lookup tables, the contents are compared: tables of tf.lookup, and those by which Keras layers number words.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import tensorflow as tf

from whale.distributed.collective_call_check import describe_likely_cause
from whale.errors import CommError, ProgramError
from whale.runtime.context import Context
from whale.runtime.variables.compared import compute_checksum

FIRST_STEPS = 3
_MOST_BYTES = 1 << 26
_WHOLE = "_whale_whole_batch"  # attribute of a rank's rows: the whole batch, if the rank has read it
_BLOCK = 256  # elements in a block whose sum is compared, where values may differ by rounding

# Sums in another order, on processors with other vector widths, differ by fewer units in the last place than this.
_ROUNDING = 1000.0
_UNITS = {1: 2.0**-2, 2: 2.0**-7, 4: 2.0**-23, 8: 2.0**-52}  # in the last place, by bytes of a number
_KEYS = (tf.string, tf.int64, tf.int32)
_VALUES = (tf.int64, tf.string, tf.int32, tf.float32, tf.float64, tf.bool)
_MOST_ENTRIES = 1 << 24  # of a larger table, only the size is compared: reading it all would take seconds
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # of SplitMix64


def with_whole(rows: tf.Tensor, batch: tf.Tensor) -> tf.Tensor:
    """Returns ``rows`` (this rank's part) with the whole batch attached, from which each rank has cut its rows. The
    step that takes the rows can then compare the whole batch between ranks.
    """
    setattr(rows, _WHOLE, batch)
    return rows


def as_rows_of(rows: Any, other: Any) -> Any:
    """Returns ``rows``, computed from ``other``, with the whole batch attached that ``with_whole`` has attached to
    ``other``; unchanged if none is.
    """
    return rows if (batch := getattr(other, _WHOLE, None)) is None else with_whole(rows, batch)


def compare_arguments(
    call: Callable[[list[Any]], Any],
    context: Context,
    step: str,
    names: Sequence[str],
    parts: Collection[str],
    constants: Mapping[str, tf.Tensor],
) -> Callable[[list[Any]], Any]:
    """Wraps ``call`` so that arguments that every rank passes whole, or has read whole, are compared between the ranks.

    This happens on the first three calls, and then on every n-th one, n being ``debug.check_inputs``; captured tensors
    and the contents of captured tables are compared once. Returns ``call`` itself if there is nothing to compare.

    Args:
      step: name of the step.
      names: of the arguments, in the order of ``call``'s tensors.
      parts: names of the arguments of which each rank passes its own rows.
      constants: name -> what the step captures beside its arguments.
    """
    every = context.config["debug.check_inputs"]
    brings = constants or any(name not in parts for name in names) or (parts and context.elastic is None)
    if not every or not context.has_other_processes or context.has_local_batch or not brings:
        return call
    calls = 0

    def check(tensors: list[Any]) -> Any:
        nonlocal calls
        if calls < FIRST_STEPS or not calls % every:
            given = {name: getattr(t, _WHOLE, None) if name in parts else t for name, t in zip(names, tensors)}
            if not calls:
                given |= {**constants, **number_tables(constants)}
            refuse_other_values(given, context, step, f"call {calls}", parts)
        calls += 1
        return call(tensors)

    return check


def refuse_other_values(
    given: Mapping[str, Any], context: Context, step: str, when: str, read: Collection[str] = (), key: str = ""
) -> None:
    """Raises an error if ranks are given different values of the same tensors; collective between processes.

    Args:
      given: name -> value; values that are not tensors of numbers or strings are ignored.
      step: name of the step that they are given to.
      when: which call this is, for messages.
      read: names of the tensors that the ranks have read from a dataset, to take their rows of them.
      key: distinguishes comparisons that several threads make at the same time.

    Raises:
      ProgramError: values differ; names the first.
      CommError: the ranks are at different steps.
    """
    purpose = f"the comparison of what `{step}` is given in {when}"

    def exchange(data: bytes) -> list[bytes]:
        return context.comms[0].allgather_bytes(
            f"whale/inputs{key}", data, context.config["debug.check_timeout_s"], purpose
        )

    given = {name: value for name, value in given.items() if _is_compared(value)}
    everyone = exchange(msgspec.json.encode((step, checksums(given))))
    said = [msgspec.json.decode(one, type=tuple[str, dict[str, int]]) for one in everyone]
    other = next((rank for rank, (name, _) in enumerate(said) if name != said[0][0]), None)
    if other is not None:
        raise CommError(
            "the ranks are about to run different things",
            given=f"rank 0: `{said[0][0]}`; rank {other}: `{said[other][0]}`",
            expected="the same steps in the same order on every rank",
            action="run the same script with the same arguments and data shapes on every rank",
        )
    found = find_difference(
        [sums for _, sums in said], given, exchange, rounding=given if context.rounds_otherwise else read
    )
    if found is None:
        return
    if found.name in read:
        raise ProgramError(
            "the ranks read different batches, of which each takes its rows",
            op=step,
            argument=found.name,
            given=f"ranks {' and '.join(found.ranks)} have read different values in {when}",
            **{"likely cause": describe_likely_cause(context, found.reordered)},
            expected="the same dataset in the same order on every rank (compared as debug.check_inputs says)",
            action="remove what depends on the rank, give it a seed after wh.init(), or sort it; or, where each rank "
            'is to read files of its own, wh.shard(dataset, by="file") or batch.mode="local"',
        )
    raise ProgramError(
        "the ranks pass different values to a step, which takes them for the same whole batch",
        op=step,
        argument=found.name,
        given=f"ranks {' and '.join(found.ranks)} pass different values in {when}",
        **{"likely cause": describe_likely_cause(context, found.reordered)},
        expected="the same values on every rank (compared on the first steps and every debug.check_inputs-th)",
        action='use wh.shard(dataset), or batch.mode="local" where each rank reads files of its own; give '
        "shuffles made before wh.init(), and random maps, a seed, and those no num_parallel_calls, which draw in any "
        "order; remove what depends on the rank",
    )


def other_datasets(found: Difference, context: Context) -> ProgramError:
    """Creates the error for ranks that have built different datasets."""
    return ProgramError(
        "the ranks pass different datasets to wh.shard",
        argument=found.name,
        given=f"ranks {' and '.join(found.ranks)} have different values of it",
        **{"likely cause": describe_likely_cause(context, found.reordered)},
        expected="the same dataset on every rank, of which each reads its rows",
        action="remove what depends on the rank, give it a seed after wh.init(), or sort it; or, where each rank has "
        'files of its own, wh.shard(dataset, by="file") or batch.mode="local"',
    )


@dataclass(frozen=True)
class Difference:
    """Describes the first value that differs between ranks.

    Attributes:
      name: of the value.
      ranks: the first rank, and those that have another value, as text.
      reordered: whether all have the same elements in different orders.
    """

    name: str
    ranks: tuple[str, ...]
    reordered: bool


class _Detail(msgspec.Struct):
    """Represents a rank's message about a value whose checksums differ, from which every rank finds out how it differs.

    Attributes:
      sums: weighted sums of blocks of its elements.
      absolute: the same of their absolute values, by which rounding is judged.
      elements: checksum of the sorted elements, equal if only the order differs.
    """

    sums: list[float]
    absolute: list[float]
    elements: int


def checksums(given: Mapping[str, tf.Tensor]) -> dict[str, int]:
    """Returns name -> checksum of a rank's values."""
    return {name: compute_checksum(_sample(value)) for name, value in given.items()}


def find_difference(
    said: Sequence[Mapping[str, int]],
    given: Mapping[str, tf.Tensor],
    exchange: Callable[[bytes], list[bytes]],
    rounding: Collection[str] = (),
) -> Difference | None:
    """Returns the first value that differs between the ranks; None if there is none. Collective if checksums differ.

    Args:
      said: the ``checksums`` of every rank.
      given: name -> value on this rank.
      exchange: takes this rank's bytes and returns those of every rank.
      rounding: names of the values that may differ by rounding, if they are of floating point.
    """
    names = list(dict.fromkeys(name for sums in said for name in sums))
    differing = [name for name in names if any(sums.get(name) != said[0].get(name) for sums in said)]
    if not differing:
        return None
    mine = {name: _detail(given[name]) for name in differing if name in given}
    details = [msgspec.json.decode(one, type=dict[str, _Detail]) for one in exchange(msgspec.json.encode(mine))]
    for name in differing:
        first, others = details[0].get(name), [there.get(name) for there in details]
        if (
            name in given
            and name in rounding
            and all(_differs_by_rounding(first, other, given[name].dtype) for other in others)
        ):
            continue
        ranks = [0, *(rank for rank, sums in enumerate(said) if sums.get(name) != said[0].get(name))]
        same = [other is not None and first is not None and other.elements == first.elements for other in others]
        return Difference(name, tuple(map(str, ranks)), all(same))
    return None


def _is_compared(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.dtype not in (tf.resource, tf.variant)


def _detail(value: tf.Tensor) -> _Detail:
    held = np.asarray(_sample(value).numpy(), object if value.dtype == tf.string else None).reshape(-1)
    if not value.dtype.is_floating:
        return _Detail([], [], compute_checksum(tf.constant(np.sort(held))))
    numbers = np.nan_to_num(held.astype(np.float64))
    blocks = np.pad(numbers, (0, -numbers.size % _BLOCK)).reshape(-1, _BLOCK)
    weights = 1.0 + np.arange(_BLOCK) / _BLOCK  # so that elements in another order give another sum
    sums, absolute = (blocks * weights).sum(1), (np.abs(blocks) * weights).sum(1)
    return _Detail(sums.tolist(), absolute.tolist(), zlib.crc32(np.sort(numbers).tobytes()))


def _differs_by_rounding(one: _Detail | None, other: _Detail | None, dtype: tf.DType) -> bool:
    if one is None or other is None or not dtype.is_floating or len(one.sums) != len(other.sums):
        return False
    unit = _UNITS[dtype.size]
    allowed = min(_ROUNDING * unit, max(1e-3, 4 * unit))
    with np.errstate(invalid="ignore"):
        near = np.abs(np.subtract(one.sums, other.sums)) <= allowed * np.maximum(one.absolute, other.absolute)
    return bool(near.all())


def _sample(value: tf.Tensor) -> tf.Tensor:
    """Returns the whole tensor, or of a large one elements at equal distances, since tensors that differ usually differ
    nearly everywhere.
    """
    size = 0 if value.dtype == tf.string else value.dtype.size * value.shape.num_elements()
    distance = -(-size // _MOST_BYTES)
    return value if distance <= 1 else tf.reshape(value, [-1])[::distance]


def number_tables(captured: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Returns checksums of the contents of the captured tensors that are handles of lookup tables: one of the keys, one
    of the entries.

    Tables with the same contents give the same numbers, in whatever order a process stores them.

    Args:
      captured: name -> captured tensor.
    """
    found: dict[str, tf.Tensor] = {}
    for name, handle in captured.items():
        if isinstance(handle, tf.__internal__.EagerTensor) and handle.dtype == tf.resource:
            table = name.partition("/table_handle")[0].removesuffix("/LookupTableFindV2")
            found |= {f"{what} of the table `{table}`": tf.constant(number) for what, number in _number_held(handle)}
    return found


def _number_held(handle: tf.Tensor) -> Iterator[tuple[str, np.uint64]]:
    try:
        size = int(tf.raw_ops.LookupTableSizeV2(table_handle=handle))
    except tf.errors.OpError:  # the handle is no table's, or the table is not initialised yet
        return
    if size > _MOST_ENTRIES:
        yield "size", np.uint64(size)
        return
    for keys_type, values_type in itertools.product(_KEYS, _VALUES):
        if not _is_of(handle, keys_type, values_type):
            continue
        keys, values = tf.raw_ops.LookupTableExportV2(table_handle=handle, Tkeys=keys_type, Tvalues=values_type)
        of_keys = _hashes(keys)
        yield "keys", of_keys.sum(dtype=np.uint64)
        yield "entries", _mix(of_keys ^ _hashes(values) * _MIX[0]).sum(dtype=np.uint64)
        return


def _is_of(handle: tf.Tensor, keys: tf.DType, values: tf.DType) -> bool:
    """Returns True if a table has keys and values of these dtypes; exporting it with others would abort the process."""
    nothing, default = tf.zeros([0], keys), tf.zeros([], values)
    try:
        tf.raw_ops.LookupTableFindV2(table_handle=handle, keys=nothing, default_value=default)
    except tf.errors.InvalidArgumentError as error:
        return "ignature mismatch" not in (error.message or "")  # else values have another shape
    return True


def _hashes(rows: tf.Tensor) -> np.ndarray:
    """Returns a 64-bit hash of each row, uint64[rows]."""
    if rows.dtype == tf.string:
        rows = tf.strings.to_hash_bucket_fast(rows, (1 << 63) - 1)
    count = int(rows.shape[0])
    held = np.ascontiguousarray(rows.numpy()).reshape(count, -1 if count else 0).view(np.uint8)
    words = np.pad(held, ((0, 0), (0, -held.shape[1] % 8))).view(np.uint64) if held.size else np.zeros((count, 0), "u8")
    found = np.zeros(count, np.uint64)
    for column in words.T:
        found = _mix(found * _MIX[1] + column)
    return found


def _mix(numbers: np.ndarray) -> np.ndarray:
    for mix, shift in zip(_MIX, (30, 27)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * mix
    return numbers ^ (numbers >> np.uint64(31))
