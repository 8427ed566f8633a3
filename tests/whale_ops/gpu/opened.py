"""Ranks in threads with an open device each, and exchanges by ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import tensorflow as tf

import whale_ops
from tests.whale_ops.harness import ranks
from whale_ops import Communicator


class Opened:
    """Ranks with an open device each, and their exchanges under a key."""

    def __init__(self, comms: Sequence[Communicator]) -> None:
        self.comms, self.ops = comms, whale_ops.load_ops()

    def reduce(self, rank: int, tensors: Sequence[tf.Tensor], key: str, **attrs: object) -> list[tf.Tensor]:
        name = self.comms[rank].name
        return self.ops.whale_device_all_reduce(tensors, communicator=name, rank=rank, key=key, **attrs)

    def exchange(self, op: str, rank: int, *inputs: tf.Tensor, key: str = "x", **attrs: object) -> tf.Tensor:
        """One of the other exchanges: ``op`` is "all_gather", ..."""
        name = self.comms[rank].name
        function = getattr(self.ops, f"whale_device_{op}")
        return function(*inputs, communicator=name, rank=rank, key=key, **attrs)

    def together(self, body: Callable[[int], object]) -> list:
        """body(rank) of every rank inside one tf.function, as numpy."""
        step = tf.function(lambda: [body(rank) for rank in range(len(self.comms))])
        return tf.nest.map_structure(lambda t: t.numpy(), step())

    def each(self, body: Callable[[int], object]) -> list:
        """body(rank) of every rank in a graph and a thread of its own; errors of TensorFlow are returned."""

        def of_rank(rank: int) -> object:
            try:
                return tf.nest.map_structure(lambda t: t.numpy(), tf.function(lambda: body(rank))())
            except tf.errors.OpError as error:
                return error

        with ThreadPoolExecutor(len(self.comms)) as pool:
            return list(pool.map(of_rank, range(len(self.comms))))


@contextmanager
def opened_ranks(size: int, open_device: Callable[[Communicator], None], hosts: Sequence[int] = ()) -> Iterator[Opened]:
    """`size` ranks whose devices `open_device` opens; closed at the end.

    Args:
      hosts: how many ranks each emulated host has.
    """
    with ranks(size, hosts=hosts) as comms:
        with ThreadPoolExecutor(size) as pool:
            list(pool.map(open_device, comms))
        try:
            yield Opened(comms)
        finally:
            for comm in comms:
                comm.close_device()


def device_of(library: Path | str, transport: str, ordinal: int, buffer_bytes: int) -> Callable[[Communicator], None]:
    """What opens a rank's device for `opened_ranks`."""
    return lambda comm: comm.open_device(library, transport, ordinal, buffer_bytes)
