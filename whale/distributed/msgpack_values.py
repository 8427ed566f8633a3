"""Encodes plain values as bytes to be sent to other ranks: numbers, text, containers and NumPy arrays, but never code.

What another rank sends is not unpickled, since unpickling can run code of the sender's choice. MessagePack encodes most
values; what it would change (a tuple becomes a list, a NumPy scalar a float) is encoded as an extension.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np

_TUPLE, _DICT, _SET, _FROZENSET, _INTEGER, _COMPLEX, _TEXT, _SCALAR, _ARRAY, _OBJECTS = range(10)
_DTYPE = re.compile(r"[<>|=][biufcSU]\d{1,9}")
_INT64 = range(-(1 << 63), 1 << 63)


def pack(value: Any) -> bytes:
    """Encodes a value as bytes.

    Raises:
      TypeError: the value contains something other than None, bool, int, float, complex, str, bytes, list, tuple, dict,
        set, frozenset, and NumPy scalars and arrays; the message names its type.
      ValueError: the value is nested too deeply.
    """
    try:
        return msgspec.msgpack.encode(_replace_values(value))
    except RecursionError:
        raise ValueError(
            "a value cannot be packed for other ranks: it is nested too deeply, or contains itself"
        ) from None


def unpack(data: bytes) -> Any:
    """Decodes bytes that ``pack`` has returned.

    Raises:
      ValueError: ``pack`` cannot have returned these bytes.
    """
    try:
        return msgspec.msgpack.decode(data, ext_hook=_from_extension)
    except (RecursionError, TypeError, LookupError, OverflowError) as error:
        raise ValueError(f"the bytes cannot be unpacked: they are not what `pack` has written ({error})") from error


def _replace_values(value: Any) -> Any:
    """Replaces values that MessagePack cannot represent by extensions, recursively.

    Types are compared exactly, since numpy.float64 is a subclass of float, and a named tuple one of tuple.
    """
    kind = type(value)
    if value is None or kind in (bool, float, bytes) or (kind is int and value in _INT64):
        return value
    if kind is str:
        return (
            value
            if value.isprintable() or _is_utf8(value)
            else _encode_extension(_TEXT, value.encode("utf-8", "surrogatepass"))
        )
    if kind is list:
        return [_replace_values(one) for one in value]
    if kind is tuple:
        return _encode_extension(_TUPLE, [_replace_values(one) for one in value])
    if kind is dict:
        return _encode_extension(_DICT, [[_replace_values(key), _replace_values(one)] for key, one in value.items()])
    if kind in (set, frozenset):
        return _encode_extension(_SET if kind is set else _FROZENSET, [_replace_values(one) for one in value])
    if kind is int:
        return _encode_extension(_INTEGER, hex(value))
    if kind is complex:
        return _encode_extension(_COMPLEX, [value.real, value.imag])
    if isinstance(value, np.ndarray) and value.dtype == object:
        return _encode_extension(
            _OBJECTS, [list(value.shape), [_replace_values(one) for one in value.ravel().tolist()]]
        )
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biufcSU":
        whole = np.asarray(value)
        said = [whole.dtype.str, list(whole.shape), whole.tobytes()]
        return _encode_extension(_SCALAR if isinstance(value, np.generic) else _ARRAY, said)
    if (
        isinstance(value, np.generic | np.ndarray)
        and value.dtype.kind == "V"
        and value.dtype.name in _list_extended_dtypes()
    ):
        whole = np.asarray(value)  # a dtype of ml_dtypes, such as bfloat16
        said = [whole.dtype.name, list(whole.shape), whole.tobytes()]
        return _encode_extension(_SCALAR if isinstance(value, np.generic) else _ARRAY, said)
    raise TypeError(
        f"a value of {kind.__module__}.{kind.__qualname__} cannot be sent to other ranks: give numbers, text, "
        "bytes, NumPy arrays, or lists, tuples, dictionaries and sets of these"
    )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _list_extended_dtypes() -> dict[str, np.dtype[Any]]:
    import ml_dtypes

    names = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "int4", "uint4")
    return {name: np.dtype(getattr(ml_dtypes, name)) for name in names if hasattr(ml_dtypes, name)}


def _encode_extension(code: int, content: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, content if isinstance(content, bytes) else msgspec.msgpack.encode(content))


def _from_extension(code: int, data: memoryview) -> Any:
    if code == _TEXT:
        return bytes(data).decode("utf-8", "surrogatepass")
    content = msgspec.msgpack.decode(data, ext_hook=_from_extension)
    if code == _TUPLE:
        return tuple(content)
    if code == _DICT:
        return {key: value for key, value in content}  # noqa: C416  (a pair that is none is an error)
    if code in (_SET, _FROZENSET):
        return set(content) if code == _SET else frozenset(content)
    if code == _INTEGER:
        return int(content, 16)
    if code == _COMPLEX:
        return complex(*content)
    if code == _OBJECTS:
        shape, elements = content
        objects = np.empty(len(elements), object)
        objects[:] = elements
        return objects.reshape(shape)
    if code in (_SCALAR, _ARRAY):
        name, shape, held = content
        if name not in _list_extended_dtypes() and not _DTYPE.fullmatch(name):
            raise ValueError(f"the bytes cannot be unpacked: they hold an array of the unknown dtype {name!r}")
        dtype = _list_extended_dtypes()[name] if name in _list_extended_dtypes() else np.dtype(name)
        whole = np.frombuffer(held, dtype).reshape(shape).copy()
        return whole[()] if code == _SCALAR else whole
    raise ValueError(f"the bytes cannot be unpacked: they hold a value of the unknown msgpack extension type {code}")
