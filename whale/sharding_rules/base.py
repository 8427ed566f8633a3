"""Defines the interface of a sharding rule: for one mesh axis, the placements that an op allows, and its local form.

``Rule.strategies`` answers the planner's question: given the operands' present placements, in which ways may this op
run? ``Rule.local_op`` answers the question of lowering: with this strategy, what changes in the node on coordinate i?

The helpers at the end of the module write lines of the rule notation (``whale.sharding_rules.notation``) for rules
whose line depends on the op's attributes and shapes.

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
    """Presents a node to its rule: its attributes, and the types and constant values of its operands.

    Attributes:
      node: the node.
      inputs: the global types of its operands.
      parts: number of coordinates of the mesh axis.
      consts: returns the value of the operand with this number if it is a constant of the program, else None.
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
        """Returns the value of the node's attribute ``name``; ``default`` if it has no such attribute."""
        return self.node.attrs.get(name, default)

    @property
    def marks(self) -> Marks:
        """Returns what Whale's passes have recorded about the node."""
        return self.node.marks

    def const(self, i: int) -> np.ndarray | None:
        """Returns the value of operand ``i`` if it is a constant of the program, else None."""
        return self.consts(i)


@dataclass(frozen=True, slots=True)
class Window:
    """Describes indices into a dimension of which a rank holds only ``size`` positions, from position ``offset`` on.

    Rules of gathers and scatters return it, in ``Local.window``; lowering subtracts ``offset`` from the indices.
    ``masked`` says what becomes of an outside index, one whose position is on another rank.

    Attributes:
      indices: number of the operand that has the indices.
      offset: first position of the rank.
      size: number of positions of the rank.
      masked: None: outside indices become -1, which the op ignores. Otherwise they become valid positions, and the
        elements that belong to them are set to zero: in operand number ``masked``, or in the first output if it is -1.
      at: which dimension of the masked tensor corresponds to the first dimension of the indices.
      runs: number of runs of the sharded dimension; indices can be counted from ``offset`` only if it is 1.
      column: if the last dimension of the indices is a position in several dimensions, which of its elements is the
        position in the sharded one; None: each index is a single number.
      rows: with ``column``, without ``masked``: number of the operand that has a row per index; rows of outside indices
        are dropped.
      old: with ``column`` and ``masked``: number of the operand from which elements of outside indices are copied, in
        place of zeros.
      blocks: with ``old``, the number of blocks within which the positions stay (``Marks.blocks``).
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
        """Returns (the indices counted from the rank's first position, whether each of them is on this rank).

        Outside indices become -1 or a valid position, as the class says; if indices have rows, the caller drops those.
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
        """Returns ``values`` with zeros for the indices that are not on this rank.

        Args:
          inside: whether each index is on this rank.
        """
        return self._replace_outside(values, inside, np.zeros((), values.dtype))

    def select_masked(self, operands: Sequence[np.ndarray], inside: np.ndarray) -> np.ndarray:
        """Returns the masked operand with zeros, or with the old elements, for the indices that are not on this rank.

        Args:
          operands: the op's operands, with indices that are already local.
          inside: whether each index is on this rank.
        """
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
    """Describes how ids are sent to the ranks that hold their table rows (see ``whale.sharding_rules.embedding``).

    Attributes:
      starts: number of the first row of each rank, and at the end the number of rows.
      ids: number of the operand that has the ids.
      table: number of the operand that has the rows; None: the result is the table.
      values: number of the operand that is added to rows; None: rows are read.
      strides: for ids that are positions in several dimensions: by how many rows a step in each dimension counts; ():
        an id is the number of a row.
      dim: the dimension of the table that is sharded; rows are numbered as if this dimension were the outermost one.
      unknown: the dimension of the table whose size is known only at run time; None: all sizes are known. ``strides``
        are computed as if its size were very large.
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
    """Describes how a node on one rank differs from the node in the program. Rules return it, and lowering applies it.

    Attributes:
      attrs: attribute -> its value on the rank, for attributes that change.
      blocks: new value of the mark ``Marks.blocks``; None: unchanged.
      consts: operand number -> constant that replaces the operand (shapes, multiples, slice bounds).
      op: another op type with the same operands, such as Sum for a Mean over a sharded dimension; None: unchanged.
      divide_by: divisor of the first output, such as the global count of a mean; None: it is not divided.
      plus: array that is added to the first output, such as the other ranks' sizes to a rank's shape; None: nothing.
      added: operand number -> value added to the operand, such as the number of the rank's random stream to a seed.
      seeds: attribute -> value added to the attribute, for seeds that are attributes.
      moved: operand number -> offset added to the operand, so that indices count from the rank's first position.
      at_most: operand number -> the largest values of its elements, such as the rank's size in place of the whole size.
      window: which indices into a sharded dimension the rank holds; None: no operand has such indices.
      route: how ids, and the values of ids, are sent to the ranks that hold their rows; None: nothing is sent.
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
    at_most: Mapping[int, np.ndarray] = field(default_factory=dict)
    window: Window | None = None
    route: Route | None = None


UNCHANGED = Local()


class Rule(Protocol):
    """Defines what the sharding rule of an op type provides.

    Attributes:
      produces_any: True if the op can make an output in a placement that no operand has, such as a Fill; such
        placements are proposed by ``wanted``.
    """

    produces_any: bool

    def strategies(
        self, op: OpView, current: Sequence[Placement], wanted: Sequence[Placement | None] = ()
    ) -> list[Strategy]:
        """Returns the strategies that are legal for an op.

        Args:
          op: the op.
          current: the operands' present placements; the sizes of their shards are the ones that are proposed.
          wanted: preferred placements of the outputs, whose shards are proposed too; None for an output without
            preference.

        Returns:
          the strategies, the replicated one (everything ``B``) last. An empty list means that the op must run on the
            first rank only.
        """

    def local_op(self, op: OpView, strategy: Strategy, coordinate: int) -> Local:
        """Returns how the op's node on ``coordinate`` differs from the program's under ``strategy``."""

    def count_exchanged_bytes(self, op: OpView, strategy: Strategy) -> int:
        """Returns the logical bytes that the op itself moves between ranks under ``strategy``, over all ranks; 0 for
        most ops.

        Resharding of operands is not included. Ops that exchange table rows by ids move bytes themselves.
        """


def replicate_all(op: OpView) -> Strategy:
    """Returns the strategy in which every coordinate computes the whole op."""
    return Strategy((B,) * len(op.inputs), (B,) * len(op.outputs), "replicated")


def replace_per_rank(placement: Placement) -> Placement:
    """Returns ``B`` for a per-rank placement (``own``), and any other placement unchanged.

    To one rank, its per-rank value is a whole tensor like a replicated one.
    """
    return B if type(placement) is PerRank else placement


def adapt_to_per_rank(option: Strategy, current: Sequence[Placement]) -> Strategy | None:
    """Returns ``option`` for operands that hold a value of each rank's own (placement ``own``: computed from the rank's
    own rows, like the statistics of local batch normalisation), where ``option`` takes replicated ones.

    The op then computes on each rank's own value, so outputs that ``option`` leaves replicated become ``own`` as well;
    sharded and partial outputs stay. For ops without side effects.

    Args:
      option: a strategy of the op.
      current: the operands' present placements.

    Returns:
      the strategy; None if no operand is ``own``, if two are ``own`` with other numbers of rows, or if ``option`` does
      not take such an operand replicated.
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
    """Returns ``count`` labels: ``make_labels("a", 2)`` is ["a0", "a1"]."""
    return [f"{prefix}{i}" for i in range(count)]


def write_runs(runs: int, label: str, *, inner: bool = False) -> str:
    """Writes a dimension that consists of ``runs`` runs: ``write_runs(2, "n")`` is "(2 n)", 2 runs of length n.

    Args:
      inner: True for ``label`` runs of length ``runs`` instead: "(n 2)".
    """
    if runs == 1:
        return label
    return f"({label} {runs})" if inner else f"({runs} {label})"


def write_windows(sizes: Dims | None, window: Sequence[int], steps: Sequence[int]) -> list[str | None]:
    """Writes, for each dimension, the item by which windows can be sharded; they can if no element is in two windows.

    Args:
      sizes: sizes of the dimensions.
      window: size of the window in each dimension.
      steps: distance between windows in each dimension.

    Returns:
      for each dimension, ``s0`` for steps of one element; ``(s0 2)`` for steps of two; None if it cannot be sharded,
        since windows overlap, or since the size is not known to be a multiple of the step (only the last rank would
        have the padding or the remainder).
    """
    found: list[str | None] = []
    for n, (size, one, step) in enumerate(zip(sizes or (None,) * len(window), window, steps)):
        fits = one <= step and (step == 1 or (size is not None and size % step == 0))
        found.append(write_runs(step, f"s{n}", inner=True) if fits else None)
    return found


def write_term(items: Iterable[str]) -> str:
    """Writes a term of the notation from its items, separated by blanks; ``.`` if there are none (a scalar)."""
    return " ".join(items) or "."


def write_terms(*many: Iterable[str]) -> str:
    """Writes several terms, separated by commas."""
    return ", ".join(map(write_term, many))


def freeze(items: list[str], dims: Iterable[int]) -> list[str]:
    """Returns ``items`` with the flag ``^`` (cannot be cut) on those at the positions ``dims``."""
    chosen = set(dims)
    return [f"{x}^" if i in chosen else x for i, x in enumerate(items)]


def read_constant(op: OpView, i: int) -> list[int] | None:
    """Returns the integers of constant operand ``i``, flattened; None if the operand is not a constant."""
    value = op.const(i)
    return None if value is None else [int(v) for v in np.asarray(value).reshape(-1)]


def read_axis(op: OpView, i: int, rank: int) -> int | None:
    """Returns the dimension that constant scalar operand ``i`` names, counted from the front; None if it is not
    constant.

    Args:
      rank: number of dimensions, for negative axes.
    """
    value = read_constant(op, i)
    return None if not value else value[0] % max(rank, 1)


def is_same_size(a: int | None, b: int | None) -> bool:
    """Returns True if both sizes are known and equal."""
    return a is not None and a == b


def _count_dims(shape: Dims | None) -> int | None:
    """Returns the number of dimensions; None if it is unknown."""
    return None if shape is None else len(shape)
