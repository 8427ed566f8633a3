"""Lets a process join an elastic run in the middle of Keras' ``fit``.

Before each training step a rank commits the state of ``fit``: the epoch, the step in the epoch, the position in the
data, the seeds with which the data were created, and the values in callbacks that have changed. A process that joins
waits in its own call of ``fit`` for such a state. It then starts with that epoch, skips the steps that the others have
taken, creates its data with the same seeds, and copies the callbacks' values. Variables are sent with the step.

Decision: 0110.
"""

from __future__ import annotations

import contextvars
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import tensorflow as tf

from whale.distributed.msgpack_values import pack, unpack
from whale.errors import ProgramError
from whale.frontends.keras.input_pipeline import find_whole_dataset
from whale.log import log
from whale.runtime.context import Context, ElasticHooks
from whale.runtime.elastic.requirements import make_other_place_error
from whale.runtime.input.data import ShardedDataset
from whale.runtime.input.dataset_position import ShardedIterator
from whale.runtime.input.shuffle_orders import reshuffles
from whale.started import joins

_COPIED_BYTES = (
    64 << 10
)  # arrays up to this size are copied; callbacks replace larger ones (weights), not write to them
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OWN = {"_model", "model", "params", "_params", "verbose"}  # callbacks' attributes that Keras sets on each rank
_OTHER = object()
_FUNCTION = "function of Keras"
TRAINING, VALIDATION = "training", "validation"
_fit: contextvars.ContextVar[FitCall | None] = contextvars.ContextVar("fit", default=None)
_done: weakref.WeakKeyDictionary[ElasticHooks, list[Any]] = (
    weakref.WeakKeyDictionary()
)  # (history, epochs) of calls of fit
_closed: weakref.WeakSet[ElasticHooks] = (
    weakref.WeakSet()
)  # where a joining rank could not know the order of data any more
_ahead: weakref.WeakKeyDictionary[ElasticHooks, Any] = weakref.WeakKeyDictionary()  # what a process that joins was told


class FitCall:
    """Tracks one call of ``fit`` in a run that other processes may join.

    Attributes:
      taken_up: the state of another rank from which this call continues; None: the call starts from the beginning.
    """

    def __init__(self, context: Context, elastic: ElasticHooks, model: Any, arguments: dict[str, Any]) -> None:
        self._elastic, self._seeds, self._model = elastic, context.seeds, model
        self._done: list[Any] = _done.setdefault(elastic, [])
        given = arguments.get("callbacks") or []
        given = getattr(given, "callbacks", given)  # of a CallbackList
        self._callbacks: Sequence[Any] = given if isinstance(given, (list, tuple)) else [given]
        self._told = _find_told(elastic, arguments.get("x"), arguments.get("validation_data"))
        self.taken_up = self._told if self._told is not None and self._told["fit"] == len(self._done) else None
        self._asked: dict[str, Any] = {}  # of data: (how often for seeds before they were made, whether made again)
        self._data: dict[str, ShardedDataset] = {}
        self._read = self._epochs = self._step = self._seen = 0  # data, epochs; where Keras' iterator is
        self._placed = self.taken_up is None
        self._held_first: list[dict[str, Any]] | None = None  # by callbacks, before the first step of this process
        if self.taken_up is not None:
            arguments["initial_epoch"], self._asked = self.taken_up["epoch"], self.taken_up["asked"]
        self._first_epoch, self._last_epoch = arguments.get("initial_epoch", 0), arguments.get("epochs", 1)
        self._batches: int | None = None  # of an epoch, where Keras knows that

    def find_past(self) -> Any:
        """Returns this call's History, without training, if the other ranks finished the call before this process
        joined.

        Returns None otherwise.
        """
        if self._told is None or self._told["fit"] <= len(self._done):
            return None
        modules = (c.__module__.partition(".")[0] for c in type(self._model).__mro__)
        history = sys.modules[next(name for name in modules if name == "keras")].callbacks.History()
        history.set_model(self._model)
        history.history, history.epoch = self._told["done"][len(self._done)]
        self._model.history = history
        self._done.append((history.history, history.epoch))
        return history

    def end(self) -> None:
        """Records the history of the finished call, for processes that join later."""
        self._done.append((self._model.history.history, self._model.history.epoch))

    # -- data

    def next_kind(self) -> str:
        """Returns which data ``fit`` creates next: at the first call TRAINING, at later ones VALIDATION."""
        self._read += 1
        return TRAINING if self._read == 1 else VALIDATION

    @contextmanager
    def use_common_seeds(self, what: str, again: bool = False) -> Iterator[tuple[bool, bool]]:
        """Sets the seeds so that data created inside of the context equal those of the other ranks.

        Args:
          what: name of the data within this call of ``fit``, e.g. "training/begun", equal on all ranks.
          again: whether the data were created before in this call.

        Yields:
          (whether the other ranks created these data before this process joined, whether to create the data again).
        """
        known = self._asked.get(what) if self.taken_up is not None and not again else None
        now = self._count_seeds()
        if known is None:
            self._asked[what] = now, again
            yield False, again
            return
        self._go_to(known[0])
        try:
            yield True, known[1]
        finally:
            self._go_to(now)

    def note_made(self, kind: str, data: Any, agreed: bool) -> None:
        """Records a dataset that was created, so that its number of iterations becomes part of the state.

        Args:
          kind: TRAINING or VALIDATION.
          data: the dataset.
          agreed: True if the other ranks created it before this process joined; the first value of
            ``use_common_seeds``.
        """
        if isinstance(data, ShardedDataset):
            self._data[kind] = data
            if agreed and self.taken_up is not None:
                data.begun = self.taken_up["iterations"][kind]

    def begin_iteration(self, iterator: Any) -> None:
        """Moves the first iterator over the training data to the position of the other ranks, if this process has
        joined them.
        """
        if not self._placed and self.taken_up is not None and isinstance(iterator, ShardedIterator):
            iterator.go_to(self.taken_up["place"])
            self._placed = True

    def read_beside(self, data: Any, context: Context) -> None:
        """Closes the run to further processes if a callback iterates over a dataset that reshuffles at each iteration.

        Each iteration moves the shuffle on to its next order, and a process that joins later could not reproduce this
        order.

        Args:
          data: the data that the callback passes to ``evaluate`` or ``predict``.
          context: the run.
        """
        if not isinstance(data, tf.data.Dataset) or not reshuffles(data) or self._elastic in _closed:
            return
        _closed.add(self._elastic)
        if context.rank == 0:
            log.warning(
                "no more processes can join this run: a callback of fit reads a dataset that is shuffled anew in each "
                "iteration, so a joining rank would read other rows than the rest; evaluate data without a shuffle"
            )

    # -- steps

    def iterate_steps(self, epochs: Any, numbered: Iterator[Any]) -> Iterator[Any]:
        """Yields the numbered steps of an epoch, except for those that the other ranks took before this process joined.

        Args:
          epochs: Keras' epoch iterator.
          numbered: its own (step, iterator) pairs.
        """
        self._epochs += 1
        told = self.taken_up if self._epochs == 1 else None
        for item in numbered:
            if told is not None:
                if item[0] < told["step"]:
                    continue
                epochs._steps_seen, told = told["seen"], None
            self._step, self._seen, self._batches = item[0], epochs._steps_seen, epochs.num_batches
            yield item

    def commit(self, iterator: Any) -> None:
        """Commits the state of ``fit`` before a training step; other processes may join here.

        Args:
          iterator: the iterator over the training data.
        """
        if self._held_first is None:
            self._held_first = self._list_held()
            if self.taken_up is not None:
                for callback, changed in zip(self._list_callbacks(), self.taken_up["callbacks"]):
                    vars(callback).update({name: _restore_value(value) for name, value in changed.items()})
                self._go_to(self.taken_up["seeds"])
        if self._elastic in _closed:
            return
        before, held, done = self._held_first, self._list_held(), list(self._done)
        now = {
            "fit": len(done),
            "done": done,
            "epoch": (self._model._initial_epoch or self._first_epoch) + self._epochs - 1,
            "step": self._step,
            "seen": self._seen,
            "place": iterator.elements.place,
            "iterations": {kind: made.begun for kind, made in self._data.items()},
            "asked": dict(self._asked),
            "seeds": self._count_seeds(),
        }

        def pack_state() -> bytes:
            return pack({**now, "callbacks": [_find_changes(one, other) for one, other in zip(before, held)]})

        left = self._batches and (self._last_epoch - now["epoch"]) * self._batches - self._step
        self._elastic.commit(pack_state, left)

    def _list_held(self) -> list[dict[str, Any]]:
        """Returns the values in each callback's attributes that can be sent to another process."""
        found = []
        for callback in self._list_callbacks():
            kept = ((name, _keep_value(value)) for name, value in vars(callback).items() if name not in _OWN)
            found.append({name: value for name, value in kept if value is not _OTHER})
        return found

    def _list_callbacks(self) -> list[Any]:
        """Returns the script's callbacks, and the History that ``fit`` returns."""
        return [*self._callbacks, self._model.history]

    def _count_seeds(self) -> dict[str, int]:
        return {} if self._seeds is None else self._seeds.draw_counts

    def _go_to(self, asked: Mapping[str, int]) -> None:
        if self._seeds is not None:
            self._seeds.go_to(asked)


def begin(context: Context, model: Any, arguments: dict[str, Any]) -> FitCall | None:
    """Returns a FitCall for a call of ``fit`` with these arguments; None if no process may join this run.

    In a process that joins, waits until the other ranks admit it.

    Raises:
      ProgramError: the data are of a kind whose position a joining process cannot find.
      ClusterError: the other ranks are in a training loop of the script's own, not in ``fit``.
    """
    elastic = context.elastic
    return FitCall(context, elastic, model, arguments) if elastic is not None and elastic.is_keeping_commits else None


@contextmanager
def enter(fit: FitCall | None) -> Iterator[None]:
    """Makes ``find_current`` return ``fit`` inside of the context."""
    token = _fit.set(fit)
    try:
        yield
    finally:
        _fit.reset(token)


def find_current() -> FitCall | None:
    """Returns the FitCall that this thread is in; None if no process may join the run, or inside of nested calls."""
    return _fit.get()


def _find_told(elastic: ElasticHooks, data: Any, validation: Any) -> dict[str, Any] | None:
    """Returns the state of ``fit`` that another rank has committed, in a process that joins the run; None in other
    processes.

    The first call in a joining process waits until the other ranks admit it; later calls return the same state.

    Raises:
      ProgramError: the data are of a kind whose position a joining process cannot find.
      ClusterError: the other ranks are in a training loop of the script's own.
    """
    if elastic not in _ahead and joins():
        _refuse_unknown(data)
        _refuse_shared(find_whole_dataset(data), find_whole_dataset(validation))
        said = elastic.come_in()
        _ahead[elastic] = None if said is None else unpack(said)  # None: wh.State has taken it in
    told = _ahead.get(elastic)
    if told is not None and not isinstance(told, dict):
        raise make_other_place_error("a loop with wh.State", "Keras' fit")
    return told


def _refuse_unknown(data: Any) -> None:
    if isinstance(data, (tf.data.Dataset, ShardedDataset)):
        return
    wrong = next((leaf for leaf in tf.nest.flatten(data) if not hasattr(leaf, "__array__")), None)
    if wrong is not None:
        raise ProgramError(
            "a process cannot join fit with this kind of data: it would not know which batches the others have had",
            given=f"data of type {type(wrong).__name__}",
            expected="a tf.data.Dataset, or arrays",
            action="pass fit a tf.data.Dataset, for example by tf.data.Dataset.from_generator",
        )


def _refuse_shared(data: Any, validation: Any) -> None:
    """Raises a ProgramError if training and validation data contain the same reshuffling dataset.

    Each iteration over one would change the order of the other, and a joining rank could not reproduce this.
    """
    shared = [
        one
        for one in _list_datasets(data)
        if any(one is other for other in _list_datasets(validation)) and reshuffles(one)
    ]
    if shared:
        raise ProgramError(
            "a process cannot join fit if training and validation data share a shuffle: it would not know which "
            "batches the others have had",
            given="validation_data made from the same shuffled dataset as the training data",
            expected="validation data without a shuffle, or with one of their own",
            action="split the dataset by take and skip first, and then shuffle the training part",
        )


def _list_datasets(dataset: Any) -> list[Any]:
    """Returns a tf.data.Dataset and all datasets that it is made of."""
    if not isinstance(dataset, tf.data.Dataset):
        return []
    return [dataset, *(one for made_of in dataset._inputs() for one in _list_datasets(made_of))]


def _keep_value(value: Any) -> Any:
    """Returns a copy of a callback's value that can be sent to another process; `_OTHER` if it cannot be sent."""
    if isinstance(value, _PLAIN) or isinstance(value, np.generic):
        return value
    if isinstance(value, FunctionType) and _find_keras_function(value.__module__, value.__qualname__) is value:
        return {_FUNCTION: (value.__module__, value.__qualname__)}
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.copy() if value.nbytes <= _COPIED_BYTES else value
    if type(value) in (list, tuple, set):
        few = [_keep_value(one) for one in value]
        return _OTHER if any(one is _OTHER for one in few) else type(value)(few)
    if type(value) is dict:
        pairs = {key: _keep_value(one) for key, one in value.items()}
        return _OTHER if any(one is _OTHER for one in pairs.values()) else pairs
    return _OTHER


def _restore_value(value: Any) -> Any:
    """Returns a value that another process has sent; a function of Keras is looked up by its name."""
    named = value.get(_FUNCTION) if isinstance(value, dict) else None
    return value if named is None else _find_keras_function(*named)


def _find_keras_function(module: str, name: str) -> Any:
    """Returns a function of Keras by module and name; None if there is none.

    Callbacks hold such functions, e.g. ``monitor_op`` of EarlyStopping.
    """
    return getattr(sys.modules.get(module), name, None) if module.startswith("keras.") else None


def _find_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a callback that have changed since this process took its first step.

    Args:
      before: the callback's values, by name of the attribute, before that step.
      now: its present values.
    """
    return {name: value for name, value in now.items() if name not in before or pack(before[name]) != pack(value)}
