"""Registers rules by op type. A family file holds ``RULES``, made with ``rule``; ``find_rule`` finds the rule of an op
type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from whale.errors import RuleError
from whale.ir.layout import B, Partial, Placement, Shard, is_in_runs, local_shape
from whale.ir.values import Dims, TensorType, find_numpy_dtype
from whale.sharding_rules import embedding
from whale.sharding_rules.base import UNCHANGED, Local, OpView, Strategy
from whale.sharding_rules.binding import (
    Binding,
    bind,
    find_whole_strategy,
    list_cut_strategies,
    list_partial_strategies,
)
from whale.sharding_rules.notation import FIRST_RANK, Line, Passes, Term, parse, parse_passes

_NUMBERED = re.compile(r"(in|out)(\d+)$")

FAMILIES = {
    "math": ("pointwise", "reductions", "einsum", "random", "linalg"),
    "nn": ("convolution", "pooling", "losses", "norm", "rnn", "attention"),
    "structure": (
        "shape", "slicing", "gather", "segment", "variables", "lists", "communication",
    ),
}  # fmt: skip

Text = str | None | Callable[[OpView], str | None]
Known = Callable[[OpView, Strategy, int], tuple[np.ndarray | None, ...]]


@dataclass(frozen=True, eq=False, slots=True)
class LineRule:
    """The rule of one op type: a line of the notation, or a function from the op to one.

    Attributes:
      lin: operands that P(sum) passes through (notation.parse_passes).
      mono: likewise for P(max) and P(min).
      copy: likewise for every reduction: each output element is an operand's element, or does not matter.
      reduce: what a cut ``+`` label makes of an output: sum, max, min, prod.
      local: what else changes on a rank, besides the operands that have a role.
      known: outputs that are known without running the op.
      produces_any: an output may be asked for in a placement that no operand has (``wanted`` of ``strategies``).
      any_partial: the output is right as a partial of any kind (empty lists).
      halo: gives operands of a strategy what neighbours have as well; None: the strategy is none.
      routes: what of it are a table, ids and rows, where rows may be exchanged by their ids (`embedding.py`).
      local_stream: the line by which each rank may draw the rows that it holds of a random tensor from a stream of its
        own, where that is asked for (``wanted``); otherwise there is one stream, and ``spec`` holds.
    """

    op: str
    spec: str | Callable[[OpView], str]
    lin: Text = None
    mono: Text = None
    copy: Text = None
    reduce: str | Callable[[OpView], str] = "sum"
    local: Callable[[OpView, Strategy, int], Local] | None = field(default=None, repr=False)
    known: Known | None = field(default=None, repr=False)
    produces_any: bool = False
    any_partial: bool = False
    local_stream: str = ""
    halo: Callable[[OpView, Strategy], Strategy | None] | None = field(default=None, repr=False)
    routes: embedding.Rows | None = None

    def write_line(self, op: OpView, outputs: Sequence[Placement | None] = ()) -> str:
        """Returns the line of the notation that holds for this op, when its outputs are wanted as ``outputs``."""
        if self.local_stream and any(isinstance(p, Shard) for p in outputs):
            return self.local_stream
        return self.spec if isinstance(self.spec, str) else self.spec(op)

    def strategies(
        self, op: OpView, current: Sequence[Placement], wanted: Sequence[Placement | None] = ()
    ) -> list[Strategy]:
        """Returns the legal strategies; see ``Rule.strategies``.

        Args:
          wanted: preferred placements of the outputs; they propose cuts as the operands' placements do.

        Raises:
          RuleError: the rule does not fit the op.
        """
        line = self.write_line(op, wanted)
        if line == FIRST_RANK:
            return []
        texts = (self.lin, self.mono, self.copy)
        if callable(self.lin) or callable(self.mono) or callable(self.copy):
            texts = tuple(t(op) if callable(t) else t for t in texts)  # type: ignore[assignment]
        try:
            reduce = self.reduce(op) if callable(self.reduce) else self.reduce
            found = _list_strategies(
                self, line, texts, reduce, op.inputs, op.node.outputs, tuple(current), tuple(wanted)
            )
        except RuleError as error:
            raise RuleError(
                error.message, action=error.action, op=f"{op.node.op} {op.node.name}", **error.facts
            ) from None
        if self.halo is not None:
            found = tuple(wide for s in found if (wide := self.halo(op, s)) is not None)
        if self.local is not None and any(is_in_runs(p) for s in found for p in s.inputs + s.outputs):
            found = tuple(s for s in found if (w := self.local(op, s, 0).window) is None or w.runs == 1)
        at_owners = embedding.list_owner_strategies(op, current, wanted)
        exchanged = embedding.list_exchanged_strategies(op, self.routes, current, wanted) if self.routes else []
        return [*at_owners, *exchanged, *found]

    def count_exchanged_bytes(self, op: OpView, strategy: Strategy) -> int:
        """Returns the bytes that the node itself moves; see ``Rule.count_exchanged_bytes``."""
        return embedding.count_exchanged_bytes(op, self.routes, strategy) if self.routes else 0

    def is_exchanging_rows(self, op: OpView, strategy: Strategy) -> bool:
        """Tells whether the node exchanges rows by their ids under ``strategy``, as `embedding.py` describes."""
        return self.routes is not None and embedding.is_exchanged(op, self.routes, strategy)

    def local_op(self, op: OpView, strategy: Strategy, coordinate: int) -> Local:
        """Returns the local form of the op on a coordinate; see ``Rule.local_op``."""
        if not any(isinstance(p, Shard) for p in strategy.inputs + strategy.outputs):
            return UNCHANGED
        if embedding.is_owned(op, strategy):
            return UNCHANGED
        if self.routes and self.is_exchanging_rows(op, strategy):
            return Local(route=embedding.make_route(op, self.routes, strategy))
        line = parse(self.write_line(op, strategy.outputs))
        consts: dict[int, np.ndarray] = {}
        if any(t.kind == "role" for t in line.inputs):
            consts = compute_constants(line, op, strategy, coordinate)
        if self.local is None:
            return Local(consts=consts) if consts else UNCHANGED
        more = self.local(op, strategy, coordinate)
        if not consts:
            return more
        return replace(more, consts={**consts, **more.consts})

    def format_line(self) -> str:
        """Formats the rule in one line, for people."""
        spec = self.spec if isinstance(self.spec, str) else f"by {(self.spec.__doc__ or '').strip().splitlines()[0]}"
        words = [spec]
        for name in ("lin", "mono", "copy"):
            value = getattr(self, name)
            if value is not None:
                words.append(f"{name}={'by op' if callable(value) else value}")
        words += [f"reduce={'by op' if callable(self.reduce) else self.reduce}"] * (self.reduce != "sum")
        words += ["halo"] * (self.halo is not None)
        words += [n for n in ("produces_any", "any_partial", "local_stream", "routes") if getattr(self, n)]
        return "  ".join(words)


def rule(
    names: str,
    spec: str | Callable[[OpView], str],
    *,
    lin: Text = None,
    mono: Text = None,
    copy: Text = None,
    reduce: str | Callable[[OpView], str] = "sum",
    local: Callable[[OpView, Strategy, int], Local] | None = None,
    known: Known | None = None,
    produces_any: bool = False,
    any_partial: bool = False,
    local_stream: str = "",
    halo: Callable[[OpView, Strategy], Strategy | None] | None = None,
    routes: embedding.Rows | None = None,
) -> tuple[LineRule, ...]:
    """Makes one rule for each op type in ``names`` (separated by blanks); see ``LineRule`` for the rest."""
    return tuple(
        LineRule(n, spec, lin, mono, copy, reduce, local, known, produces_any, any_partial, local_stream, halo, routes)
        for n in names.split()
    )


@cache
def load_rules() -> Mapping[str, LineRule]:
    """Returns every rule, by op type, sorted.

    Raises:
      RuleError: two families have a rule for one op type.
    """
    table: dict[str, LineRule] = {}
    families = [f"whale.sharding_rules.{room}.{family}" for room, names in FAMILIES.items() for family in names]
    for family in families:
        for group in import_module(family).RULES:
            for one in group:
                if one.op in table:
                    raise RuleError("two rules for one op type", op=one.op, given=family, expected="one rule",
                                    action="remove one of them")  # fmt: skip
                table[one.op] = one
    return dict(sorted(table.items()))


def find_rule(op_type: str) -> LineRule | None:
    """Returns the rule of ``op_type``; None: replicated if stateless, on the first rank if stateful."""
    return load_rules().get(op_type)


@cache
def is_decided_by_types(one: LineRule) -> bool:
    """Tells whether a rule's strategies depend only on the types and placements of operands and results."""
    asked = (one.spec, one.lin, one.mono, one.copy, one.reduce)
    more = one.local or one.halo or one.routes or one.local_stream
    return not more and not any(map(callable, asked))


@lru_cache(maxsize=65536)
def _bind_line(line: str, inputs: tuple[TensorType, ...], outputs: tuple[TensorType, ...], hint: int | None) -> Binding:
    return bind(parse(line), inputs, outputs, hint)


def _find_element_rank(
    inputs: tuple[TensorType, ...],
    current: tuple[Placement, ...],
    outputs: tuple[TensorType, ...],
    wanted: tuple[Placement | None, ...],
) -> int | None:
    """Returns the smallest rank that elements of lists must have, given where lists are cut; None if no list is cut."""
    pairs = list(zip(inputs, current)) + list(zip(outputs, wanted))
    ranks = [pl.dim + 1 for t, pl in pairs if t.dtype == "variant" and isinstance(pl, Shard)]
    return max(ranks) if ranks else None


def _parse_all_passes(texts: tuple[str | None, str | None, str | None]) -> tuple[Passes, ...]:
    lin, mono, copy = texts
    found = parse_passes(lin, ("sum",)) if lin else ()
    found += parse_passes(mono, ("max", "min")) if mono else ()
    return found + (parse_passes(copy, ("sum", "max", "min", "prod")) if copy else ())


def _can_be(partial: Placement, dtype: str) -> bool:
    """Tells whether a tensor of this dtype can have that kind of partial placement."""
    if not isinstance(partial, Partial):
        return True
    if dtype in ("string", "resource"):
        return False
    if dtype == "bool":
        return partial.op in ("max", "min")
    return not (dtype.startswith("complex") and partial.op in ("max", "min"))


@lru_cache(maxsize=65536)
def _list_strategies(
    rule: LineRule,
    line: str,
    texts: tuple[str | None, str | None, str | None],
    reduce: str,
    inputs: tuple[TensorType, ...],
    outputs: tuple[TensorType, ...],
    current: tuple[Placement, ...],
    wanted: tuple[Placement | None, ...],
) -> tuple[Strategy, ...]:
    binding = _bind_line(line, inputs, outputs, _find_element_rank(inputs, current, outputs, wanted))
    why = f"rule {rule.op}"
    found = list_cut_strategies(binding, current, wanted, reduce, why)
    if any(texts):
        found += list_partial_strategies(binding, _parse_all_passes(texts), current, wanted, why)
    if rule.any_partial:
        for pl in wanted:
            if isinstance(pl, Partial):
                found.append(Strategy((B,) * len(inputs), (pl,) * len(outputs), f"{why}: {pl} of nothing"))
    whole = find_whole_strategy(binding, current, why)
    if whole is not None:
        found.append(whole)
    types = inputs + outputs
    found = [s for s in found if all(_can_be(p, t.dtype) for p, t in zip(s.inputs + s.outputs, types))]
    parsed = parse(line)
    found = [s for s in found if can_localize(parsed, inputs, outputs, s)]
    found.append(Strategy((B,) * len(inputs), (B,) * len(outputs), "replicated"))
    return tuple(found)


# Replaces operands that carry shapes by local constants.
#
# Roles: ``[outN]`` shape of output N; ``[inN]`` shape of operand N; ``[shape]`` shape of output 0, one size may be
# unknown (-1); ``[elements]`` shape of a list's elements, any size may be unknown.
def _find_subject(role: str, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Any:
    """Returns the item of ``inputs`` or ``outputs`` whose shape the role carries."""
    if role == "shape":
        return outputs[0]
    match = _NUMBERED.match(role)
    if match is None:
        raise RuleError("an unknown role", given=f"[{role}]", expected="[outN], [inN], [shape], [elements]",
                        action="correct the rule line")  # fmt: skip
    return (inputs if match[1] == "in" else outputs)[int(match[2])]


def list_operand_terms(line: Line, count: int) -> list[Term]:
    """Returns the term of each of ``count`` operands, variadic terms repeated."""
    at = next((i for i, t in enumerate(line.inputs) if t.variadic), None)
    if at is None:
        return list(line.inputs)
    extra = count - len(line.inputs) + 1
    return [*line.inputs[:at], *[line.inputs[at]] * extra, *line.inputs[at + 1 :]]


def can_localize(
    line: Line, inputs: tuple[TensorType, ...], outputs: tuple[TensorType, ...], strategy: Strategy
) -> bool:
    """Tells whether the shapes that roles carry are static enough for local constants under ``strategy``."""
    for term in list_operand_terms(line, len(inputs)):
        if term.kind != "role" or term.role == "elements":
            continue
        placement = _find_subject(term.role, strategy.inputs, strategy.outputs)
        if not isinstance(placement, Shard):
            continue
        shape = _find_subject(term.role, inputs, outputs).shape
        unknown = 0 if shape is None else sum(s is None for i, s in enumerate(shape) if i != placement.dim)
        if shape is None or unknown > (1 if term.role == "shape" else 0):
            return False
    return True


def compute_constants(line: Line, op: OpView, strategy: Strategy, coordinate: int) -> dict[int, np.ndarray]:
    """Maps operand numbers to local constants, for each operand that has a role whose tensor is cut."""
    found: dict[int, np.ndarray] = {}
    for i, term in enumerate(list_operand_terms(line, len(op.inputs))):
        if term.kind != "role":
            continue
        dtype = find_numpy_dtype(op.inputs[i].dtype)
        if term.role == "elements":
            value = _compute_element_shape(op, strategy, coordinate, i)
            if value is not None:
                found[i] = value.astype(dtype)
            continue
        placement: Placement = _find_subject(term.role, strategy.inputs, strategy.outputs)
        if not isinstance(placement, Shard):
            continue
        shape: Dims = local_shape(_find_subject(term.role, op.inputs, op.outputs).shape, placement, coordinate)
        if op.inputs[i].shape == (len(shape) - 2,):  # spatial sizes only: convolution gradients accept them
            shape = shape[2:] if str(op.attr("data_format", "")).startswith("NC") else shape[1:-1]
        found[i] = np.array([-1 if s is None else s for s in shape], dtype)
    return found


def _compute_element_shape(op: OpView, strategy: Strategy, coordinate: int, i: int) -> np.ndarray | None:
    """Returns the element shape that operand ``i`` gives, with the local size where elements are cut; None:
    leave it.
    """
    if op.attr("element_dtype") == "variant":
        return None  # a list of lists: its elements are handles, and what is cut are the elements of the lists inside
    pairs = list(zip(op.inputs, strategy.inputs)) + list(zip(op.outputs, strategy.outputs))
    placement = next((p for t, p in pairs if t.dtype == "variant" and isinstance(p, Shard)), None)
    if placement is None:
        return None
    value = op.const(i)
    if value is None:
        rank = (op.inputs[i].shape or (None,))[0]
        return np.full((rank,), -1) if rank is not None else np.array(-1)
    if value.ndim == 0:
        return None
    value = value.copy()
    value[placement.dim] = placement.local_size(coordinate)
    return value
