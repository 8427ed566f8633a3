"""Implements ``wh.State``, which keeps how far a training loop has come, so that a process that joins can continue it
there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from whale.distributed.msgpack_values import pack, unpack
from whale.errors import ProgramError
from whale.runtime.context import require_current
from whale.runtime.elastic.requirements import make_other_place_error
from whale.runtime.input.data import ShardedDataset
from whale.runtime.input.dataset_position import Place, ShardedIterator


class State:
    """Holds what a training loop needs to continue where it is: its epoch, what it has counted, its position in the
    data.

        state = wh.State(epoch=0, losses=[])
        for epoch in range(state.epoch, 10):
            state.epoch = epoch
            for x, y in state.rest(batches):  # of wh.shard
                state.losses.append(float(step(x, y)))

    The keywords become attributes. In a process that joins an elastic run (``whale run --hosts-from``), creating the
    state waits until the other ranks admit the process, and the attributes get their values; ``rest`` then begins with
    the batch that is their next one. Variables need not be in it: a step sends them. In other runs it just holds what
    it is given.

    Args:
      values: numbers, strings, arrays, and lists, tuples and dicts of these.

    Raises:
      ClusterError: called before ``wh.init``; or the ranks that a process joins are in Keras' ``fit``.
      CommError: a process that joins is not admitted, since another rank is gone.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, **values: Any) -> None:
        context = require_current("wh.State")
        self._elastic = context.elastic
        self._iterator: ShardedIterator | None = None
        self._place: Place | None = None
        self._seeds = context.seeds
        self._asked_at_making = self._count_seeds()
        self._asked_before_commit: Counter[str] | None = None  # by lines between the making and the first commit
        self._asked_by_others: Counter[str] | None = None  # when they committed; of a process that has come in
        self._build: dict[str, int] = {}  # of the dataset that is iterated; in a process that has come in, the others'
        vars(self).update(values)
        said = self._elastic.come_in() if self._elastic is not None else None
        if said is not None:
            taken_up = unpack(said)
            if not isinstance(taken_up, tuple):
                raise make_other_place_error("Keras' fit", "a loop with wh.State")
            values, self._place, self._build, now, before_commit = taken_up
            vars(self).update(values)
            now, before_commit = Counter(now), Counter(before_commit)
            self._asked_by_others, self._asked_before_commit = now, before_commit
            # What stands between here and the commit asks once more, as for an epoch that the others have begun.
            self._go_to_seeds(now - before_commit)

    def rest(self, dataset: ShardedDataset, epochs: int | None = None) -> Iterator[Any]:
        """Yields the batches of an epoch, or in a process that has joined those that are left of it; commits the state
        before each.

        Args:
          dataset: of ``wh.shard``.
          epochs: number of epochs that are left, with this one; None: unknown. If known, joining processes are admitted
            only if that pays.

        Raises:
          ProgramError: ``dataset`` is not a dataset of ``wh.shard``.
        """
        if not isinstance(dataset, ShardedDataset):
            raise ProgramError(
                "state.rest cannot continue in the middle of this dataset",
                given=f"an object of type {type(dataset).__name__}",
                expected="a dataset of wh.shard, whose batches are counted",
                action="write state.rest(wh.shard(dataset))",
            )
        build = dataset.build if self._elastic is not None and self._elastic.is_keeping_commits else {}
        if self._build and self._elastic is not None and self._elastic.is_catching_up:
            _refuse_other_dataset(build, self._build)
        self._build = build
        self._iterator = iter(dataset)
        if self._place is not None:
            self._iterator.go_to(self._place)
            self._place = None
        try:
            count = int(dataset.whole.cardinality())
            while True:
                self.commit(None if epochs is None or count < 0 else epochs * count - self._iterator.place[0])
                try:
                    batch = next(self._iterator)
                except StopIteration:
                    return
                yield batch
        finally:
            self._iterator = None

    def commit(self, steps_left: int | None = None) -> None:
        """Commits the state: another process can continue the loop from here, before the next call that all ranks make
        together.

        Args:
          steps_left: number of steps that the loop still takes; None: unknown.
        """
        if self._asked_by_others is not None:  # lines behind an epoch's steps have asked there, and not here
            self._go_to_seeds(self._asked_by_others)
            self._asked_by_others = None
        if self._asked_before_commit is None:
            self._asked_before_commit = self._count_seeds() - self._asked_at_making
        if self._elastic is not None and self._elastic.is_keeping_commits:
            values = {name: value for name, value in vars(self).items() if not name.startswith("_")}
            place = self._iterator.place if self._iterator is not None else self._place
            asked = dict(self._count_seeds()), dict(self._asked_before_commit)
            packed = pack((values, place, self._build, *asked))  # now: the script goes on to change them
            self._elastic.commit(lambda: packed, steps_left)

    def _count_seeds(self) -> Counter[str]:
        return Counter() if self._seeds is None else Counter(self._seeds.draw_counts)

    def _go_to_seeds(self, asked: Mapping[str, int]) -> None:
        if self._seeds is not None:
            self._seeds.go_to(asked)


def _refuse_other_dataset(mine: Mapping[str, int], others: Mapping[str, int]) -> None:
    """Raises ProgramError if the dataset of a process that joins is not that of the other ranks.

    Args:
      mine: ``ShardedDataset.build`` of this process.
      others: the same of the other ranks.
    """
    different = [name for name in dict.fromkeys([*others, *mine]) if mine.get(name) != others.get(name)]
    if different:
        raise ProgramError(
            "a process that joins reads another dataset than the other ranks, in their present epoch",
            given=f"different on the other ranks: {', '.join(different[:3])}",
            expected="the dataset that the others read, made by the same lines of the script",
            action="make the dataset before wh.State or alike in every epoch; give its shuffle a seed",
        )
