"""Keeps the settings that a trace reads and may change, of objects that a step can reach: numbers, strings, flags, and
what is made of nothing else (tuples, small arrays, configuration objects, schedules, functions).

TensorFlow runs a step's Python code once for a trace. The code sees the values of attributes, closures and globals at
that time, and changes them once: a counter of calls, a flag that the first call sets, a rate that the script changes
later. Whale runs the code once for each set of sizes. So the later runs must see what the first one saw, and their
changes must be undone.

A setting refers to settings only. So it holds no variable, and to keep it keeps no model alive. What is replaced and is
no setting (a layer in another's place) is what it has become.

Decision: 0196.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import polymorphic_function

_SIMPLE = (bool, int, float, complex, str, bytes, type(None))
# What else refers to nothing that a script changes.
_ATOMS = (*_SIMPLE, np.generic, np.dtype, np.ufunc, tf.DType, enum.Enum, type, range, slice, types.BuiltinFunctionType)
_METHODS = (types.FunctionType, property, classmethod, staticmethod)  # of classes
_ABSENT = object()
_MOST_OBJECTS = 50_000  # objects that are visited
_LONGEST = 1_000  # length of lists, dictionaries and arrays that are searched: longer ones hold data
_DEEPEST = 10  # settings within settings
# Packages whose objects hold no state of a script; those of Keras do (rates of layers, what is trainable).
_FOREIGN = frozenset(
    "absl builtins collections contextlib functools google h5py importlib jax logging ml_collections numpy optree"
    " pandas queue random tensorflow tensorflow_probability threading torch weakref whale whale_ops wrapt".split()
)
_KERAS = frozenset(("keras", "tf_keras"))
_GRAPHS_OF_KERAS = frozenset("KerasTensor Node SymbolicArguments Tracker KerasHistory".split())


@dataclass(slots=True)
class _Names:
    """Holds a snapshot of the settings in a dictionary: an object's attributes, a module's globals, or a dict. Its
    ``write`` and those of its sister classes restore the snapshot, and return a function that undoes this.

    Attributes:
      held: returns the dictionary as it is now; None once its object is gone.
      known: name -> setting at the time of the snapshot, as ``_note`` returns it.
      complete: all names at that time, so that names added later are removed again; None: they stay.
    """

    held: Callable[[], dict[Any, Any] | None]
    known: dict[Any, Any]
    complete: frozenset[Any] | None = None

    def write(self) -> Callable[[], None] | None:
        held = self.held()
        if held is None:
            return None
        wanted = {name: value for name, noted in self.known.items() if (value := _resolve(noted)) is not _ABSENT}
        changed = {
            name: held.get(name, _ABSENT) for name, value in wanted.items() if _differs(held.get(name, _ABSENT), value)
        }
        if self.complete is not None:
            added = [name for name in held if name not in self.complete]
            changed |= {name: held[name] for name in added if _may_change(held[name])}
        for name in changed:
            _set(held, name, wanted.get(name, _ABSENT))
        return functools.partial(_put_back, held, changed) if changed else None


@dataclass(slots=True)
class _Elements:
    """Holds a snapshot of a list or a set of settings.

    Attributes:
      held: the list or set itself, which the script may change.
      known: its elements at the time of the snapshot.
    """

    held: list[Any] | set[Any]
    known: list[Any]

    def write(self) -> Callable[[], None] | None:
        now = list(self.held)
        if isinstance(self.held, set):
            same = self.held == set(self.known)
        else:
            same = len(now) == len(self.known) and not any(map(_differs, now, self.known))
        if same or not all(map(_may_change, now)):
            return None
        self._fill(self.known)
        return functools.partial(self._fill, now)

    def _fill(self, elements: list[Any]) -> None:
        if isinstance(self.held, set):
            self.held.clear()
            self.held.update(elements)
        else:
            list.__setitem__(self.held, slice(None), elements)  # also that of Keras' lists, which follow what is added


@dataclass(slots=True)
class _Numbers:
    """Holds a snapshot of a small NumPy array.

    Attributes:
      held: the array itself, whose elements the script may change.
      known: a copy of it from the time of the snapshot.
    """

    held: np.ndarray
    known: np.ndarray

    def write(self) -> Callable[[], None] | None:
        if self.held.tobytes() == self.known.tobytes() or not self.held.flags.writeable:
            return None
        now = self.held.copy()
        self.held[...] = self.known
        return functools.partial(self.held.__setitem__, ..., now)


@dataclass(slots=True)
class _Cell:
    """Holds a snapshot of a closure variable.

    Attributes:
      held: the closure's cell, which the script may change.
      known: its value at the time of the snapshot, as ``_note`` returns it.
    """

    held: Any
    known: Any

    def write(self) -> Callable[[], None] | None:
        now, known = self.held.cell_contents, _resolve(self.known)
        if known is _ABSENT or not _differs(now, known):
            return None
        self.held.cell_contents = known
        return functools.partial(setattr, self.held, "cell_contents", now)


@dataclass(slots=True)
class _Attribute:
    """Holds a snapshot of a class attribute, or of a slot of an object.

    Attributes:
      held: the class or the object.
      name: of the attribute.
      known: its value at the time of the snapshot.
      put: sets an attribute: ``setattr``, or the like of it for an object that refuses this.
    """

    held: Any
    name: str
    known: Any
    put: Callable[[Any, str, Any], None] = setattr

    def write(self) -> Callable[[], None] | None:
        now = getattr(self.held, self.name, _ABSENT)
        if now is _ABSENT or not _differs(now, self.known):
            return None
        self.put(self.held, self.name, self.known)
        return functools.partial(self.put, self.held, self.name, now)


class PythonValues:
    """Holds a snapshot of the settings that a function can reach, taken when the object is created; ``SharedTrace``
    restores it for later traces of the function.

    Args:
      function: a step's Python function, a method, a partial of one, or a tf.function.
    """

    def __init__(self, function: Any) -> None:
        self._found: list[_Names | _Elements | _Numbers | _Cell | _Attribute] = []
        self._seen: dict[int, Any] = {}
        self._settings: dict[int, bool] = {}
        waiting = [function]
        while waiting and len(self._seen) < _MOST_OBJECTS:
            one = waiting.pop()
            if id(one) not in self._seen:
                self._seen[id(one)] = one
                waiting += [part for part in self._open(one) if _shows_class(part) and not isinstance(part, _SIMPLE)]
        self._seen, self._settings = {}, {}

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
        """Adds the settings of an object to the snapshot, and returns the objects that it refers to."""
        if isinstance(one, types.FunctionType):
            return self._open_function(one)
        if isinstance(one, types.MethodType):
            return one.__func__, one.__self__
        if isinstance(one, functools.partial):
            return one.func, one.args, one.keywords
        if isinstance(one, list | tuple | set | frozenset | dict) and len(one) > _LONGEST:
            return ()
        if isinstance(one, list | tuple | set | frozenset):
            self._note_elements(getattr(one, "_storage", one))  # behind a list that TensorFlow tracks
            return list(one)
        if isinstance(one, dict):
            held = getattr(one, "__wrapped__", one)  # behind a dict that TensorFlow tracks
            self._note_names(lambda: held, held, not any(self._note(v) is _ABSENT for v in held.values()))
            return list(held.values())
        if isinstance(one, np.ndarray):
            if _find_parts(one) is not None:
                self._found.append(_Numbers(one, one.copy()))
            return ()
        if isinstance(one, tf.Tensor | tf.Variable | types.ModuleType):
            return ()
        if isinstance(one, type):
            return self._open_class(one)
        if isinstance(one, polymorphic_function.Function):
            return (one.python_function,)
        return self._open_instance(one)

    def _note(self, value: Any) -> Any:
        """Returns a setting as a snapshot holds it; ``_ABSENT`` if a value is none."""
        if _shows_class(value) and isinstance(value, types.MethodType):  # held without the object that it is of
            try:
                return weakref.WeakMethod(value)
            except TypeError:  # its object knows no weak references
                return _ABSENT
        return value if _is_setting(value, self._settings) else _ABSENT

    def _note_names(self, find: Callable[[], dict[Any, Any] | None], held: dict[Any, Any], complete: bool) -> None:
        known = {name: noted for name, value in list(held.items()) if (noted := self._note(value)) is not _ABSENT}
        if known or complete:
            self._found.append(_Names(find, known, frozenset(held) if complete else None))

    def _note_elements(self, one: Any) -> None:
        may_change = isinstance(one, list) or type(one) is set
        if may_change and all(_is_setting(part, self._settings) for part in one):
            self._found.append(_Elements(one, list(one)))

    def _open_function(self, one: types.FunctionType) -> list[Any]:
        own = not _is_foreign(one)  # a foreign wrapper has no state of the script, but a cell with the step's function
        parts = [one.__defaults__ or (), one.__kwdefaults__ or {}]
        for cell in one.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # it is empty
                continue
            if own and (noted := self._note(value)) is not _ABSENT:
                self._found.append(_Cell(cell, noted))
            parts.append(value)
        if own:
            held = one.__globals__
            read = {name: held[name] for name in _list_names(one.__code__) if name in held}
            # Functions of Keras' modules are replaced by Whale, not by the script.
            noted = read if not _is_of_keras(one) else {n: v for n, v in read.items() if type(v) in _SIMPLE}
            self._note_names(lambda: held, noted, False)
            parts += read.values()
        return parts

    def _open_class(self, one: type) -> list[Any]:
        if _is_foreign(one) or _is_of_keras(one):
            return []
        parts: list[Any] = list(one.__bases__)
        for name, value in list(vars(one).items()):
            if not _shows_class(value):
                continue
            if isinstance(value, _METHODS):  # what they read and hold
                parts.append(getattr(value, "fget", None) or getattr(value, "__func__", value))
                continue
            if name.startswith("__"):
                continue
            if _is_setting(value, self._settings) and not hasattr(value, "__get__"):
                self._found.append(_Attribute(one, name, value))
            parts.append(value)
        return parts

    def _open_instance(self, one: Any) -> list[Any]:
        kind = one.__class__  # unlike `type`, the referent's class for a weak proxy
        if _is_foreign(kind) or kind.__name__ in _GRAPHS_OF_KERAS:
            return []
        try:
            held = one.__dict__
            owner = weakref.ref(one.__init__.__self__)  # weak, so that a method's step does not keep its object alive
        except Exception:  # an object's own `__getattr__` may raise anything, and one with slots has no `__dict__`
            return self._open_setting(one)
        self._note_names(functools.partial(_find_names, owner), held, not _is_of_keras(kind))
        return [*held.values(), kind]

    def _open_setting(self, one: Any) -> list[Any]:
        """Does the work of ``_open_instance`` for an object that knows no weak references, if it may be kept."""
        if not _is_setting(one, self._settings):
            return []
        held, slots = getattr(one, "__dict__", None), _list_slots(one)
        if held is not None:
            self._note_names(lambda: held, held, True)
        self._found += [_Attribute(one, name, value, object.__setattr__) for name, value in slots.items()]
        return [*(held or {}).values(), *slots.values(), one.__class__]


def _find_names(owner: weakref.ref[Any]) -> dict[Any, Any] | None:
    found = owner()
    return None if found is None else found.__dict__


def _list_names(code: types.CodeType) -> Iterator[str]:
    """Yields the names of globals that a function, and functions defined in it, may read."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _list_names(constant)


def _list_slots(one: Any) -> dict[str, Any]:
    """Returns the values of an object's slots, by name."""
    named = [getattr(kind, "__slots__", ()) for kind in type(one).__mro__]
    names = [name for some in named for name in ([some] if isinstance(some, str) else some)]
    return {name: getattr(one, name) for name in names if not name.startswith("__") and hasattr(one, name)}


def _is_setting(value: Any, known: dict[int, bool] | None = None, depth: int = 0) -> bool:
    """Returns True if a value is a setting: it refers, directly or not, to settings only.

    Args:
      known: Python's ``id`` of a value -> whether it is a setting; extended. What refers to itself is none.
      depth: number of values around this one.
    """
    if not _shows_class(value):
        return False
    if isinstance(value, _ATOMS):
        return True
    known = {} if known is None else known
    if id(value) not in known:
        known[id(value)] = False
        parts = _find_parts(value) if depth < _DEEPEST else None
        known[id(value)] = parts is not None and all(_is_setting(part, known, depth + 1) for part in parts)
    return known[id(value)]


def _shows_class(value: Any) -> bool:
    """Returns False for what raises when its class is asked for, as isinstance does: a weak proxy whose object is gone,
    a lazy object that cannot be made yet. A step may hold one and not use it.
    """
    try:
        return value.__class__ is not None
    except Exception:
        return False


def _find_parts(value: Any) -> list[Any] | None:
    """Returns what a value refers to; None if it cannot be a setting."""
    try:
        if isinstance(value, np.ndarray):
            return [] if value.size <= _LONGEST and value.dtype.kind != "O" else None
        if isinstance(value, list | tuple | set | frozenset | dict):
            parts = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
            return parts if len(value) <= _LONGEST else None
        if isinstance(value, types.FunctionType):
            if getattr(sys.modules.get(value.__module__), value.__qualname__, None) is value:
                return []  # a module has it
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        if isinstance(value, functools.partial):
            return [value.func, *value.args, *value.keywords.values()]
        if isinstance(value, types.MethodType):
            return [value.__self__]
        if _is_foreign(value.__class__):
            return None
        held = [*getattr(value, "__dict__", {}).values(), *_list_slots(value).values()]
        return held or None  # an object that shows nothing may be anything
    except Exception:  # an object's own methods may raise anything
        return None


def _is_foreign(one: Any) -> bool:
    return (one.__module__ or "").partition(".")[0] in _FOREIGN


def _is_of_keras(one: Any) -> bool:
    return (one.__module__ or "").partition(".")[0] in _KERAS


def _may_change(value: Any) -> bool:
    """Returns True if a value may be overwritten when the snapshot is restored: it is a setting, a method, or a
    symbolic tensor of another trace.
    """
    if not _shows_class(value):
        return False
    if isinstance(value, tf.Tensor):
        return not isinstance(value, tf.__internal__.EagerTensor)
    return isinstance(value, types.MethodType) or _is_setting(value)


def _differs(now: Any, known: Any) -> bool:
    if now is known:
        return False
    if type(now) is type(known) and isinstance(now, _SIMPLE):
        return bool(now != known)
    return now is _ABSENT or _may_change(now)


def _resolve(noted: Any) -> Any:
    """Returns a setting that ``PythonValues`` has noted; ``_ABSENT`` if the object of a method is gone."""
    if not isinstance(noted, weakref.WeakMethod):
        return noted
    method = noted()
    return _ABSENT if method is None else method


def _set(held: dict[Any, Any], name: Any, value: Any) -> None:
    if value is _ABSENT:
        held.pop(name, None)
    else:
        held[name] = value


def _put_back(held: dict[Any, Any], values: dict[Any, Any]) -> None:
    for name, value in values.items():
        _set(held, name, value)
