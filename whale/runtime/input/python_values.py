"""Keeps the values of Python that a trace reads and may change: numbers, texts, flags of objects that a step reaches.

TensorFlow runs a step's Python once for a trace, with what attributes, cells and globals hold then, and what it does to
them it does once: a count of calls, a flag that the first call sets, a rate that a script has changed since. Whale runs
it once for each set of sizes, so the later runs have to find what the first one found, and to leave nothing behind.

Decision: 0196.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import polymorphic_function

_SIMPLE = (bool, int, float, complex, str, bytes, type(None))
_ABSENT = object()
_MOST_OBJECTS = 50_000  # that are looked at
_LONGEST = 1_000  # list or dictionary that is looked into: what is longer holds data
# Packages whose objects hold no state of a script; those of Keras do (rates of layers, what is trainable).
_FOREIGN = frozenset(
    "absl builtins collections contextlib functools google h5py importlib jax logging ml_collections numpy optree"
    " pandas queue random tensorflow tensorflow_probability threading torch weakref whale whale_ops wrapt".split()
)
_KERAS = frozenset(("keras", "tf_keras"))
_GRAPHS_OF_KERAS = frozenset("KerasTensor Node SymbolicArguments Tracker KerasHistory".split())


@dataclass(slots=True)
class _Names:
    """A snapshot of the simple values in a dictionary: an object's attributes, a module's globals, a dict of numbers.

    Attributes:
      held: returns the live dictionary; None once its object is gone.
      known: the values at the time of the snapshot, by name.
      complete: all names at that time, so that later ones are removed again; None: later ones stay.
    """

    held: Callable[[], dict[Any, Any] | None]
    known: dict[Any, Any]
    complete: frozenset[Any] | None = None

    def write(self) -> Callable[[], None] | None:
        held = self.held()
        if held is None:
            return None
        changed = {
            name: held.get(name, _ABSENT)
            for name, value in self.known.items()
            if _differs(held.get(name, _ABSENT), value)
        }
        if self.complete is not None:
            added = [name for name in held if name not in self.complete]
            changed |= {name: held[name] for name in added if _may_change(held[name])}
        for name in changed:
            _set(held, name, self.known.get(name, _ABSENT))
        return functools.partial(_put_back, held, changed) if changed else None


@dataclass(slots=True)
class _Elements:
    """The elements of a list of simple values."""

    held: list[Any]
    known: list[Any]

    def write(self) -> Callable[[], None] | None:
        if self.held == self.known or not all(map(_may_change, self.held)):
            return None
        now = list(self.held)
        self.held[:] = self.known
        return functools.partial(self.held.__setitem__, slice(None), now)


@dataclass(slots=True)
class _Cell:
    """A name of a function around another one."""

    held: Any
    known: Any

    def write(self) -> Callable[[], None] | None:
        now = self.held.cell_contents
        if not _differs(now, self.known):
            return None
        self.held.cell_contents = self.known
        return functools.partial(setattr, self.held, "cell_contents", now)


@dataclass(slots=True)
class _OfClass:
    """An attribute of a class."""

    held: type
    name: str
    known: Any

    def write(self) -> Callable[[], None] | None:
        now = self.held.__dict__.get(self.name, _ABSENT)
        if now is _ABSENT or not _differs(now, self.known):
            return None
        setattr(self.held, self.name, self.known)
        return functools.partial(setattr, self.held, self.name, now)


class PythonValues:
    """The simple values of Python that a function can reach, as they are now.

    Args:
      function: a step's Python function, a method, a partial of one, a tf.function.
    """

    def __init__(self, function: Any) -> None:
        self._found: list[_Names | _Elements | _Cell | _OfClass] = []
        self._seen: dict[int, Any] = {}
        waiting = [function]
        while waiting and len(self._seen) < _MOST_OBJECTS:
            one = waiting.pop()
            if id(one) not in self._seen:
                self._seen[id(one)] = one
                waiting += [part for part in self._open(one) if not isinstance(part, _SIMPLE)]
        self._seen = {}

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Inside, Python finds these values; behind it, those that were there, whatever was done to them inside."""
        undo = [written for one in self._found if (written := one.write()) is not None]
        try:
            yield
        finally:
            for one in self._found:
                one.write()
            for back in reversed(undo):
                back()

    def _open(self, one: Any) -> Iterable[Any]:
        """Notes the simple values of an object, and returns others that it holds."""
        if isinstance(one, types.FunctionType):
            return self._open_function(one)
        if isinstance(one, types.MethodType):
            return one.__func__, one.__self__
        if isinstance(one, functools.partial):
            return one.func, one.args, one.keywords
        if isinstance(one, list | tuple | set | frozenset | dict) and len(one) > _LONGEST:
            return ()
        if isinstance(one, list | tuple | set | frozenset):
            if type(one) is list and all(isinstance(part, _SIMPLE) for part in one):
                self._found.append(_Elements(one, list(one)))
            return list(one)
        if isinstance(one, dict):
            parts = list(one.values())
            if type(one) is dict and all(isinstance(part, _SIMPLE) for part in parts):
                self._found.append(_Names(lambda: one, dict(one), frozenset(one)))
            return parts
        if isinstance(one, tf.Tensor | tf.Variable | types.ModuleType):
            return ()
        if isinstance(one, type):
            return self._open_class(one)
        if isinstance(one, polymorphic_function.Function):
            return (one.python_function,)
        return self._open_instance(one)

    def _open_function(self, one: types.FunctionType) -> list[Any]:
        own = not _is_foreign(one)  # what is wrapped around a step's function has that in a cell
        parts = [one.__defaults__ or (), one.__kwdefaults__ or {}]
        for cell in one.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # it is empty
                continue
            if own and isinstance(value, _SIMPLE):
                self._found.append(_Cell(cell, value))
            parts.append(value)
        if own:
            held = one.__globals__
            read = {name: held[name] for name in _list_names(one.__code__) if name in held}
            simple = {name: value for name, value in read.items() if isinstance(value, _SIMPLE)}
            if simple:
                self._found.append(_Names(lambda: held, simple))
            parts += read.values()
        return parts

    def _open_class(self, one: type) -> list[Any]:
        if _is_foreign(one) or _is_of_keras(one):
            return []
        parts = []
        for name, value in list(vars(one).items()):
            if isinstance(value, _SIMPLE) and not name.startswith("__"):
                self._found.append(_OfClass(one, name, value))
            elif not isinstance(value, types.FunctionType | property | classmethod | staticmethod):
                parts.append(value)
        return parts

    def _open_instance(self, one: Any) -> list[Any]:
        kind = one.__class__  # of what a weak proxy stands for, too
        if _is_foreign(kind) or kind.__name__ in _GRAPHS_OF_KERAS:
            return []
        try:
            held = one.__dict__
            owner = weakref.ref(one.__init__.__self__)  # a step that knows its object would keep it
        except Exception:  # of an object's own way to look up names, too
            return []
        own = not _is_of_keras(kind)
        known = {name: value for name, value in held.items() if isinstance(value, _SIMPLE)}
        if known or own:
            self._found.append(_Names(functools.partial(_find_names, owner), known, frozenset(held) if own else None))
        return [*held.values(), kind]


def _find_names(owner: weakref.ref[Any]) -> dict[Any, Any] | None:
    found = owner()
    return None if found is None else found.__dict__


def _list_names(code: types.CodeType) -> Iterator[str]:
    """Yields the names of globals that a function and the functions in it may read."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _list_names(constant)


def _is_foreign(one: Any) -> bool:
    return (one.__module__ or "").partition(".")[0] in _FOREIGN


def _is_of_keras(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _KERAS


def _may_change(value: Any) -> bool:
    """Tells whether a value may give way to another one: it is simple, or a tensor of another trace."""
    if isinstance(value, _SIMPLE):
        return True
    return isinstance(value, tf.Tensor) and not isinstance(value, tf.__internal__.EagerTensor)


def _differs(now: Any, known: Any) -> bool:
    if now is known:
        return False
    return now is _ABSENT or (_may_change(now) and (type(now) is not type(known) or now != known))


def _set(held: dict[Any, Any], name: Any, value: Any) -> None:
    if value is _ABSENT:
        held.pop(name, None)
    else:
        held[name] = value


def _put_back(held: dict[Any, Any], values: dict[Any, Any]) -> None:
    for name, value in values.items():
        _set(held, name, value)
