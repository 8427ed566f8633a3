"""Defines the interface of a rule: for one mesh axis, the placements that an op allows, and its local form on a rank.

``Rule.strategies`` answers the planner's question ("given the operands' placements now, what may this op do?");
``Rule.local_op`` answers lowering's ("with this strategy, what changes on coordinate i?").

Rules whose line depends on the op write it with the helpers that stand last.

Decision: 0040.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from whale.ir.layout import B, PerRank, Placement, Strategy, local_shape
from whale.ir.marks import Marks
from whale.ir.program import Node
from whale.ir.values import Dims, TensorType

__all__ = [
    "UNCHANGED",
    "Local",
    "OpView",
    "Route",
    "Rule",
    "Strategy",
    "Window",
    "local_input_shape",
    "local_output_shape",
    "replicate_all",
]


@dataclass(frozen=True, slots=True)
class OpView:
    """A node in the form that its rule needs: global types, attributes, constant operands, and the size of the mesh
    axis.
    """

    node: Node
    inputs: tuple[TensorType, ...]
    parts: int
    consts: Callable[[int], np.ndarray | None]

    @property
    def outputs(self) -> tuple[TensorType, ...]:
        """Returns the global types of the node's outputs."""
        return self.node.outputs

    def attr(self, name: str, default: Any = None) -> Any:
        """Returns the value of an attribute of the node; ``default`` where it has none of that name."""
        return self.node.attrs.get(name, default)

    @property
    def marks(self) -> Marks:
        """Returns the marks of the node."""
        return self.node.marks

    def const(self, i: int) -> np.ndarray | None:
        """Returns the value of operand ``i`` if it is a constant of the program, else None."""
        return self.consts(i)


@dataclass(frozen=True, slots=True)
class Window:
    """The indices into a divided dimension of which a rank has ``size`` positions from ``offset``.

    Indices on the rank are relative to ``offset``. An index outside of the rank's part becomes
    -1 without ``masked``, which the op ignores; with ``masked`` it becomes a valid position, and its elements are
    zeroed, in that
    operand (a number), or in the first output (-1), whose dimensions from ``at`` are those of the indices.
    ``runs`` is how many runs the dimension consists of; only one can be counted from an offset.
    With ``column``, the last dimension of the indices is a position in several dimensions, one of which is cut;
    then elements of an index outside are dropped, with their rows in the operands ``rows``, or zeroed.
    With ``old``, elements of that operand at the valid positions replace those of indices outside; the
    positions stay within ``blocks``.
    """

    indices: int
    offset: int
    size: int
    masked: int | None = None
    at: int = 0
    runs: int = 1
    column: int | None = None
    rows: int | None = None
    old: int | None = None
    blocks: int = 0

    def to_local(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (the indices relative to the rank's part, whether each is inside it); if indices have rows, those
        outside are to be dropped.
        """
        if self.column is not None:
            one = replace(self, column=None, masked=0 if self.rows is None else None)
            near, inside = one.to_local(indices[..., self.column])
            seen = indices.copy()
            seen[..., self.column] = near
            return seen, inside
        moved = indices - np.array(self.offset, indices.dtype)
        inside = (moved >= 0) & (moved < self.size)
        other = np.clip(moved, 0, self.size - 1) if self.masked is not None else np.full_like(moved, -1)
        return np.where(inside, moved, other), inside

    def zero_outside(self, values: np.ndarray, inside: np.ndarray) -> np.ndarray:
        """Zeroes ``values`` whose index is outside of the rank's part."""
        return self._replace_outside(values, inside, np.zeros((), values.dtype))

    def select_masked(self, operands: Sequence[np.ndarray], inside: np.ndarray) -> np.ndarray:
        """Returns the masked operand among operands with the rank's own indices."""
        values = operands[self.masked or 0]
        if self.old is None:
            return self.zero_outside(values, inside)
        at = tuple(np.moveaxis(operands[self.indices], -1, 0))
        return self._replace_outside(values, inside, operands[self.old][at])

    def _replace_outside(self, values: np.ndarray, inside: np.ndarray, others: np.ndarray) -> np.ndarray:
        shape = (1,) * self.at + inside.shape + (1,) * (values.ndim - self.at - inside.ndim)
        return np.where(inside.reshape(shape), values, others)


@dataclass(frozen=True, slots=True)
class Route:
    """A route by which ids go to the ranks that hold their rows (see ``whale.sharding_rules.embedding``).

    Attributes:
      starts: the first row of each rank, and the number of rows.
      ids: the operand that has the ids.
      table: the operand that has the rows; None: the result.
      values: the operand that is added to rows; None: rows are read.
      strides: of the columns of the ids, each a position in one dimension: in rows; empty: an id is a row's number.
      dim: the dimension of the table that is cut; rows are counted with this one outermost.
      unknown: the dimension of the table whose size only the run knows, if there is one; strides are of a larger one.
    """

    starts: tuple[int, ...]
    ids: int
    table: int | None = None
    values: int | None = None
    strides: tuple[int, ...] = ()
    dim: int = 0
    unknown: int | None = None


@dataclass(frozen=True, slots=True)
class Local:
    """The differences between a rank's node and the program's.

    Attributes:
      attrs: attributes with other values.
      blocks: the number of blocks of its rows; None: as in the program (``Marks.blocks``).
      consts: operand number -> a new local constant (shapes, multiples, slice bounds).
      op: another op type (same operands), e.g. Sum for a Mean over a split dimension.
      divide_by: divisor of the first output (the global count of a mean).
      plus: added to the first output (to a rank's shape, the sizes on other ranks).
      added: operand number -> added value (a seed of the rank's own).
      seeds: attribute -> added value, likewise.
      moved: operand number -> added offset, because it counts from the rank's first position.
      window: indices into a dimension that is cut.
      route: how ids, and the values of ids, are sent to the ranks that hold their rows.
    """

    attrs: Mapping[str, Any] = field(default_factory=dict)
    blocks: int | None = None
    consts: Mapping[int, np.ndarray] = field(default_factory=dict)
    op: str | None = None
    divide_by: float | None = None
    plus: np.ndarray | None = None
    added: Mapping[int, np.ndarray] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)
    moved: Mapping[int, np.ndarray] = field(default_factory=dict)
    window: Window | None = None
    route: Route | None = None


UNCHANGED = Local()


class Rule(Protocol):
    """The rule of one op type.

    ``produces_any``: the op can make an output in a placement that no operand has (a Fill or a Tile cut anywhere, an
    empty list); ask for it with ``wanted``.
    """

    produces_any: bool

    def strategies(
        self, op: OpView, current: Sequence[Placement], wanted: Sequence[Placement | None] = ()
    ) -> list[Strategy]:
        """Returns the legal strategies, given the operands' present placements (``current`` supplies the sizes of
        splits).

        ``wanted`` are preferred placements of the outputs: they propose splits as ``current`` does. The
        replicated strategy (everything ``B``) comes last. An empty list means that the op must run on the group's
        first rank (``Owner``).
        """

    def local_op(self, op: OpView, strategy: Strategy, coordinate: int) -> Local:
        """Returns the local form of the op on coordinate ``coordinate`` under ``strategy``."""

    def count_exchanged_bytes(self, op: OpView, strategy: Strategy) -> int:
        """Returns the bytes that the node itself moves between all ranks under ``strategy``."""


def replicate_all(op: OpView) -> Strategy:
    """Returns the strategy in which every coordinate computes the whole op."""
    return Strategy((B,) * len(op.inputs), (B,) * len(op.outputs), "replicated")


def replace_per_rank(placement: Placement) -> Placement:
    """Replaces ``own`` by ``B``: a per-rank value is a whole tensor to its rank."""
    return B if type(placement) is PerRank else placement


def adapt_to_per_rank(option: Strategy, current: Sequence[Placement]) -> Strategy | None:
    """Adapts ``option``, which takes some operands replicated, to per-rank operands.

    Any op without side effects allows that: its results of replicated operands are then per rank as well, and those of
    rows or partial sums keep their placement. None: ``current`` are per-rank values of different rows, or ``option``
    wants one of them in another placement.
    """
    own = {p for p in current if type(p) is PerRank}
    if len(own) != 1:
        return None
    inputs = tuple([c if type(c) is PerRank else p for p, c in zip(option.inputs, current)])
    if any(type(c) is PerRank and p != B for p, c in zip(option.inputs, current)):
        return None
    one = next(iter(own))
    outputs = tuple([one if p == B else p for p in option.outputs])
    return Strategy(inputs, outputs, option.why)


def local_input_shape(op: OpView, strategy: Strategy, i: int, coordinate: int) -> Dims | None:
    """Returns the shape of operand ``i`` on ``coordinate``; None when the rank is unknown."""
    return local_shape(op.inputs[i].shape, strategy.inputs[i], coordinate)


def local_output_shape(op: OpView, strategy: Strategy, i: int, coordinate: int) -> Dims | None:
    """Returns the shape of output ``i`` on ``coordinate``; None when the rank is unknown."""
    return local_shape(op.outputs[i].shape, strategy.outputs[i], coordinate)


def make_labels(prefix: str, count: int) -> list[str]:
    """Returns ``count`` labels: a0 a1 ..."""
    return [f"{prefix}{i}" for i in range(count)]


def write_runs(runs: int, label: str, *, inner: bool = False) -> str:
    """Writes a dimension of ``runs`` runs of ``label``; with ``inner``, of ``label`` runs of ``runs`` each."""
    if runs == 1:
        return label
    return f"({label} {runs})" if inner else f"({runs} {label})"


def write_windows(sizes: Dims | None, window: Sequence[int], steps: Sequence[int]) -> list[str | None]:
    """Writes each dimension for windows of these sizes and steps that see each element at most once.

    ``h``: one element each; ``(h 2)``: non-overlapping windows of 2. None: windows overlap, or the size is not known to
    be a multiple of the step (then padding or a remainder would have to be at one end only).
    """
    found: list[str | None] = []
    for n, (size, one, step) in enumerate(zip(sizes or (None,) * len(window), window, steps)):
        fits = one <= step and (step == 1 or (size is not None and size % step == 0))
        found.append(write_runs(step, f"s{n}", inner=True) if fits else None)
    return found


def write_term(items: Iterable[str]) -> str:
    """Writes a term of these items; ``.`` where there are none (a scalar)."""
    return " ".join(items) or "."


def write_terms(*many: Iterable[str]) -> str:
    """Writes several terms, separated by commas."""
    return ", ".join(map(write_term, many))


def freeze(items: list[str], dims: Iterable[int]) -> list[str]:
    """Returns ``items`` with those at ``dims`` frozen."""
    chosen = set(dims)
    return [f"{x}^" if i in chosen else x for i, x in enumerate(items)]


def read_constant(op: OpView, i: int) -> list[int] | None:
    """Returns the integers of constant operand ``i``, flat; None if it is not a constant."""
    value = op.const(i)
    return None if value is None else [int(v) for v in np.asarray(value).reshape(-1)]


def read_axis(op: OpView, i: int, rank: int) -> int | None:
    """Returns the dimension that constant scalar operand ``i`` names, counted from the front; None if it is no
    constant.
    """
    value = read_constant(op, i)
    return None if not value else value[0] % max(rank, 1)


def is_same_size(a: int | None, b: int | None) -> bool:
    """Tells whether two sizes are known and equal."""
    return a is not None and a == b


def _count_dims(shape: Dims | None) -> int | None:
    """Returns the number of dimensions, None if unknown."""
    return None if shape is None else len(shape)
