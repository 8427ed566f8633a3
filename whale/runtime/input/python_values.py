"""Keeps the Python values that a trace reads and may change: numbers, strings and flags of objects that a step can
reach.

TensorFlow runs a step's Python code once for a trace. The code sees the values of attributes, closures and globals at
that time, and changes them once: a counter of calls, a flag that the first call sets, a rate that the script changes
later. Whale runs the code once for each set of sizes. So the later runs must see what the first one saw, and their
changes must be undone.

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
_MOST_OBJECTS = 50_000  # objects that are visited
_LONGEST = 1_000  # length of lists and dictionaries that are searched: longer ones hold data
# Packages whose objects hold no state of a script; those of Keras do (rates of layers, what is trainable).
_FOREIGN = frozenset(
    "absl builtins collections contextlib functools google h5py importlib jax logging ml_collections numpy optree"
    " pandas queue random tensorflow tensorflow_probability threading torch weakref whale whale_ops wrapt".split()
)
_KERAS = frozenset(("keras", "tf_keras"))
_GRAPHS_OF_KERAS = frozenset("KerasTensor Node SymbolicArguments Tracker KerasHistory".split())


@dataclass(slots=True)
class _Names:
    """Holds a snapshot of the simple values in a dictionary: an object's attributes, a module's globals, or a dict of
    numbers. Its ``write`` and those of its sister classes restore the snapshot, and return a function that undoes this.

    Attributes:
      held: returns the dictionary as it is now; None once its object is gone.
      known: name -> value at the time of the snapshot.
      complete: all names at that time, so that names added later are removed again; None: they stay.
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
    """Holds a snapshot of a list of simple values.

    Attributes:
      held: the list itself, which the script may change.
      known: its elements at the time of the snapshot.
    """

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
    """Holds a snapshot of a closure variable.

    Attributes:
      held: the closure's cell, which the script may change.
      known: its value at the time of the snapshot.
    """

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
    """Holds a snapshot of a class attribute.

    Attributes:
      held: the class.
      name: of the attribute.
      known: its value at the time of the snapshot.
    """

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
    """Holds a snapshot of the simple Python values (numbers, strings, flags) that a function can reach, taken when the
    object is created; ``SharedTrace`` restores it for later traces of the function.

    Args:
      function: a step's Python function, a method, a partial of one, or a tf.function.
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
        """Restores the snapshot's values inside this context, and afterwards the values from before it, whatever was
        changed inside.
        """
        undo = [written for one in self._found if (written := one.write()) is not None]
        try:
            yield
        finally:
            for one in self._found:
                one.write()
            for back in reversed(undo):
                back()

    def _open(self, one: Any) -> Iterable[Any]:
        """Adds the simple values of an object to the snapshot, and returns the other objects that it refers to."""
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
        own = not _is_foreign(one)  # a foreign wrapper has no state of the script, but a cell with the step's function
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
        kind = one.__class__  # unlike `type`, the referent's class for a weak proxy
        if _is_foreign(kind) or kind.__name__ in _GRAPHS_OF_KERAS:
            return []
        try:
            held = one.__dict__
            owner = weakref.ref(one.__init__.__self__)  # weak, so that a method's step does not keep its object alive
        except Exception:  # an object's own `__getattr__` may raise anything
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
    """Yields the names of globals that a function, and functions defined in it, may read."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _list_names(constant)


def _is_foreign(one: Any) -> bool:
    return (one.__module__ or "").partition(".")[0] in _FOREIGN


def _is_of_keras(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _KERAS


def _may_change(value: Any) -> bool:
    """Returns True if a value may be overwritten when the snapshot is restored: it is simple, or a symbolic tensor of
    another trace.
    """
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
