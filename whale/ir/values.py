"""Defines the values of node attributes, and the types of tensors.

A node's attributes are plain Python values: ``bool``, ``int``, ``float``, ``str`` (text), ``bytes`` (text that is not
UTF-8), ``DType``, ``Shape``, ``Tensor``, ``Func``, or a tuple of those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from whale.errors import ProgramError

Dims = tuple[int | None, ...]
_T = TypeVar("_T")

_ITEM_BYTES = {
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
    "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1,
}  # fmt: skip
UNMOVABLE = frozenset({"resource", "variant", "string"})
FLOATING = frozenset({"float16", "bfloat16", "float32", "float64", "complex64", "complex128"})


def count_item_bytes(dtype: str) -> int:
    """Returns the bytes of one element; 0 for string, resource and variant, which have no fixed size and cannot be
    sent.
    """
    return _ITEM_BYTES.get(dtype, 0)


def find_numpy_dtype(dtype: str) -> np.dtype:
    """Returns the NumPy dtype called ``dtype``; ``bfloat16`` and 8-bit floats come from ml_dtypes, which TensorFlow
    installs.
    """
    try:
        return np.dtype(dtype)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, dtype))


class DType(str):
    """Represents an element type as an attribute value, by its name: ``DType("float32")``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"DType({str.__repr__(self)})"


@dataclass(frozen=True, slots=True)
class Shape:
    """Represents a shape as an attribute value; ``dims`` is None if the rank is unknown, a dimension is None if its
    size is.
    """

    dims: Dims | None = None


@dataclass(frozen=True, slots=True)
class Tensor:
    """Represents a constant tensor as an attribute value.

    ``data`` holds the elements in row-major order as raw little-endian bytes; for strings, a tuple of ``bytes``.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Any = field(repr=False)

    @staticmethod
    def from_numpy(array: np.ndarray, dtype: str | None = None) -> Tensor:
        """Creates the constant with the elements of ``array``.

        Args:
          dtype: the element type, if NumPy's dtype does not name it; None: that of the array. String arrays ignore it.
        """
        if array.dtype.kind in "OSU":
            items = tuple(x if isinstance(x, bytes) else str(x).encode() for x in array.reshape(-1).tolist())
            return Tensor("string", tuple(array.shape), items)
        return Tensor(dtype or array.dtype.name, tuple(array.shape), np.ascontiguousarray(array).tobytes())

    def numpy(self) -> np.ndarray:
        """Returns the elements as a read-only NumPy array; strings as a writable array of dtype object."""
        if self.dtype == "string":
            return np.array(self.data, dtype=object).reshape(self.shape)
        return np.frombuffer(self.data, find_numpy_dtype(self.dtype)).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Func:
    """Represents a reference to a function of the program, with the attributes of the call."""

    name: str
    attrs: Mapping[str, Any] = field(default_factory=dict)


class SharedAttrs(dict[str, Any]):
    """Holds attributes that several nodes share. Objects compare by identity, so derived values can be cached per
    object.

    Attributes:
      large: True if the attributes belong to one node and have a large value that is decoded on demand.
    """

    __slots__ = ("large",)

    def __init__(self, values: Mapping[str, Any], large: bool = False) -> None:
        super().__init__(values)
        self.large = large

    @property
    def shared(self) -> SharedAttrs | None:
        """Returns the object itself, as key of caches of derived values; None if ``large``, for which nothing is
        cached.
        """
        return None if self.large else self

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


@dataclass(frozen=True, slots=True)
class TensorType:
    """Describes a tensor: its element type, and its static shape (global, unless a docstring says local)."""

    dtype: str
    shape: Dims | None = None

    @property
    def is_static(self) -> bool:
        """Returns True if the rank and all sizes are known."""
        return self.shape is not None and None not in self.shape

    @property
    def elements(self) -> int:
        """Returns the number of elements, with each unknown size counted as 1; 1 if the rank is unknown."""
        count = 1
        for size in self.shape or ():
            count *= 1 if size is None else size
        return count

    @property
    def bytes(self) -> int:
        """Returns the bytes of the elements; 0 for strings, resources and variants."""
        return self.elements * count_item_bytes(self.dtype)

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.dtype}[*]"
        return f"{self.dtype}[{','.join('?' if d is None else str(d) for d in self.shape)}]"


def require_static_shape(t: TensorType) -> tuple[int, ...]:
    """Returns the shape of ``t``, for callers that need every size before the run.

    Raises:
      ProgramError: the rank or a size is unknown.
    """
    if not t.is_static:
        raise ProgramError(
            "a tensor has unknown sizes, and its shape has to be known before the run",
            given=str(t),
            expected="a size for every dimension",
            action="give the inputs of the step static shapes, for example by `dataset.batch(n, drop_remainder=True)`",
        )
    return tuple(d for d in t.shape or () if d is not None)


def group_by_bytes(items: Iterable[_T], bytes_of: Callable[[_T], int], most_bytes: int) -> list[list[_T]]:
    """Divides ``items``, in their order, into groups of at most ``most_bytes``; a larger item forms a group of its own.

    Args:
      bytes_of: returns the bytes of an item.
    """
    groups: list[list[_T]] = []
    used = 0
    for item in items:
        size = bytes_of(item)
        if not groups or used + size > most_bytes:
            groups.append([])
            used = 0
        groups[-1].append(item)
        used += size
    return groups
