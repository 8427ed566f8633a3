"""``fit`` in a run that other processes may join: where it is, and how a joining rank takes it up there.

Before each of its calls of the model's step a rank notes the epoch, the step in it, the place in the data, the seeds
that data were made with, and what callbacks have come to hold. A process that joins waits for this where it calls
``fit``. It begins with that epoch, leaves out the steps that the others have taken in it, makes its data with the same
seeds, and gives its callbacks what the others' hold. Variables come with the step.

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

_COPIED_BYTES = 64 << 10  # of an array that a callback may write into; larger ones, as weights, it replaces
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OWN = {"_model", "model", "params", "_params", "verbose"}  # of callbacks: what Keras gives each rank itself
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
    """A call of ``fit``.

    Attributes:
      taken_up: the record of another process from which this call continues; None: it starts from the beginning.
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
        """Returns the history of this call if the other ranks have already finished it; else None."""
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
        """Ends the call."""
        self._done.append((self._model.history.history, self._model.history.epoch))

    # -- data

    def next_kind(self) -> str:
        """Returns the kind of the next data that ``fit`` itself reads."""
        self._read += 1
        return TRAINING if self._read == 1 else VALIDATION

    @contextmanager
    def use_common_seeds(self, what: str, again: bool = False) -> Iterator[tuple[bool, bool]]:
        """Creates data with the seeds of the other ranks inside the context.

        Yields whether they have created these data already, and whether the data are to be created again.
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
        """Records that data of this kind were created; ``agreed``: as of ``use_common_seeds``."""
        if isinstance(data, ShardedDataset):
            self._data[kind] = data
            if agreed and self.taken_up is not None:
                data.begun = self.taken_up["iterations"][kind]

    def begin_iteration(self, iterator: Any) -> None:
        """Records that an iteration over the training data is about to begin."""
        if not self._placed and self.taken_up is not None and isinstance(iterator, ShardedIterator):
            iterator.go_to(self.taken_up["place"])
            self._placed = True

    def read_beside(self, data: Any, context: Context) -> None:
        """A callback reads data. Their shuffle has gone on to another order then, which a joining rank cannot know."""
        if not isinstance(data, tf.data.Dataset) or not reshuffles(data) or self._elastic in _closed:
            return
        _closed.add(self._elastic)
        if context.rank == 0:
            log.warning(
                "processes that come are not taken in any more: a callback reads data of which each iteration has "
                "another order, and a joining rank would read other rows than the rest; evaluate data without a shuffle"
            )

    # -- steps

    def iterate_steps(self, epochs: Any, numbered: Iterator[Any]) -> Iterator[Any]:
        """Yields the steps of an epoch, except for those already taken by other ranks."""
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
        """Commits the state of ``fit`` before a step: other processes may join here."""
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
        """Returns the callbacks' changed values."""
        found = []
        for callback in self._list_callbacks():
            kept = ((name, _keep_value(value)) for name, value in vars(callback).items() if name not in _OWN)
            found.append({name: value for name, value in kept if value is not _OTHER})
        return found

    def _list_callbacks(self) -> list[Any]:
        """Returns the script's callbacks, and the one whose history ``fit`` returns."""
        return [*self._callbacks, self._model.history]

    def _count_seeds(self) -> dict[str, int]:
        return {} if self._seeds is None else self._seeds.draw_counts

    def _go_to(self, asked: Mapping[str, int]) -> None:
        if self._seeds is not None:
            self._seeds.go_to(asked)


def begin(context: Context, model: Any, arguments: dict[str, Any]) -> FitCall | None:
    """Begins a call of ``fit`` with these arguments; returns None if no process may join this run.

    A joining process waits until the others admit it.

    Raises:
      ProgramError: a process that joins could not find its place in the data.
      ClusterError: the others are in a loop of the script's.
    """
    elastic = context.elastic
    return FitCall(context, elastic, model, arguments) if elastic is not None and elastic.is_keeping_commits else None


@contextmanager
def enter(fit: FitCall | None) -> Iterator[None]:
    """Makes ``find_current`` return this call inside the context."""
    token = _fit.set(fit)
    try:
        yield
    finally:
        _fit.reset(token)


def find_current() -> FitCall | None:
    """Returns the present call of ``fit`` in a run that processes may join; None inside nested calls."""
    return _fit.get()


def _find_told(elastic: ElasticHooks, data: Any, validation: Any) -> dict[str, Any] | None:
    """Returns, in a process that has joined, the record of another one."""
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
            "a process that joins a run has to know which batches of fit the others have had",
            given=f"data of {type(wrong).__name__}",
            expected="a tf.data.Dataset, or arrays",
            action="make a tf.data.Dataset of it",
        )


def _refuse_shared(data: Any, validation: Any) -> None:
    """Refuses datasets shared by training and validation: iterating over one changes the other's shuffle order, which a
    joining rank cannot reproduce.
    """
    shared = [
        one
        for one in _list_datasets(data)
        if any(one is other for other in _list_datasets(validation)) and reshuffles(one)
    ]
    if shared:
        raise ProgramError(
            "a process that joins a run has to know which batches of fit the others have had",
            given="validation data that are part of the data trained with, behind the same shuffle",
            expected="a shuffle of their own, which this is not, or none",
            action="divide them before shuffling: take and skip first, then shuffle what is trained with",
        )


def _list_datasets(dataset: Any) -> list[Any]:
    """Returns a dataset and all its input datasets."""
    if not isinstance(dataset, tf.data.Dataset):
        return []
    return [dataset, *(one for made_of in dataset._inputs() for one in _list_datasets(made_of))]


def _keep_value(value: Any) -> Any:
    """Copies a callback's value; returns `_OTHER` if it cannot be sent to another process."""
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
    """Converts a value from another process to one of this process."""
    named = value.get(_FUNCTION) if isinstance(value, dict) else None
    return value if named is None else _find_keras_function(*named)


def _find_keras_function(module: str, name: str) -> Any:
    """Returns a function of Keras by its name, as callbacks compare with; None: there is none."""
    return getattr(sys.modules.get(module), name, None) if module.startswith("keras.") else None


def _find_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the callback's values that have changed since its process took its first step."""
    return {name: value for name, value in now.items() if name not in before or pack(before[name]) != pack(value)}
