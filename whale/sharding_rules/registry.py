"""Registers sharding rules by op type.

The module of each family of ops has a tuple ``RULES``, made by ``rule``; ``find_rule`` returns the rule of an op type.
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
from whale.ir.ops import NEEDS_ELEMENTS
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
    """Represents the rule of one op type: a line of the notation, or a function that writes the line for an op.

    Attributes:
      op: the op type.
      spec: the line, or the function that writes it.
      lin: operands through which partial sums pass (see ``parse_passes``), because the op is linear in them.
      mono: operands through which partial maxima and minima pass, because the op never decreases in them.
      copy: operands through which partial values of every reduction pass, because each output element is an element of
        theirs, or does not matter.
      reduce: the reduction (sum, max, min, prod) of an output that becomes partial where a ``+`` label is sharded.
      local: returns what else changes in a rank's node, besides operands with a role.
      known: returns outputs that are known without running the op.
      produces_any: an output may be requested, by ``wanted``, in a placement that no operand has.
      any_partial: the output is also valid as a partial of any kind, as that of an empty list is.
      halo: widens the operands of a strategy by the halo they need; it returns None if the strategy is impossible.
      routes: which operands are a table, ids and values, if rows may be exchanged by their ids (`embedding.py`).
      local_stream: the line by which each rank may draw its rows of a random tensor from a random stream of its own, if
        the output is wanted sharded; otherwise the program has one stream, and ``spec`` holds. "": never.
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
        """Returns the line of the notation for this op.

        Args:
          outputs: preferred placements of the outputs, which decide between ``spec`` and ``local_stream``.
        """
        if self.local_stream and any(isinstance(p, Shard) for p in outputs):
            return self.local_stream
        return self.spec if isinstance(self.spec, str) else self.spec(op)

    def strategies(
        self, op: OpView, current: Sequence[Placement], wanted: Sequence[Placement | None] = ()
    ) -> list[Strategy]:
        """Returns the legal strategies of an op; see ``Rule.strategies``.

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
        """Returns True if the node exchanges table rows by their ids under ``strategy``, as `embedding.py`
        describes.
        """
        return self.routes is not None and embedding.is_exchanged(op, self.routes, strategy)

    def local_op(self, op: OpView, strategy: Strategy, coordinate: int) -> Local:
        """Returns how the op's node on ``coordinate`` differs from the program's; see ``Rule.local_op``."""
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
        """Formats the rule in one line, for people: its line, or the first line of the docstring of the function that
        writes it.
        """
        spec = (
            self.spec if isinstance(self.spec, str) else f"by op: {(self.spec.__doc__ or '').strip().splitlines()[0]}"
        )
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
    """Returns one ``LineRule`` for each op type in ``names``, which are separated by blanks: ``rule("Neg Conj", "* ->
    *", lin="0")``.

    The other arguments are the fields of ``LineRule``.
    """
    return tuple(
        LineRule(n, spec, lin, mono, copy, reduce, local, known, produces_any, any_partial, local_stream, halo, routes)
        for n in names.split()
    )


@cache
def load_rules() -> Mapping[str, LineRule]:
    """Returns the rules of all op types, by op type, in alphabetical order.

    Raises:
      RuleError: two families have a rule for the same op type.
    """
    table: dict[str, LineRule] = {}
    families = [f"whale.sharding_rules.{room}.{family}" for room, names in FAMILIES.items() for family in names]
    for family in families:
        for group in import_module(family).RULES:
            for one in group:
                if one.op in table:
                    raise RuleError("two rules for one op type", op=one.op, given=f"a second rule in {family}.RULES",
                                    expected="one rule for each op type in all modules of sharding rules",
                                    action=f"remove {one.op} from one of the two calls of rule(...)")  # fmt: skip
                table[one.op] = one
    return dict(sorted(table.items()))


def find_rule(op_type: str) -> LineRule | None:
    """Returns the rule of an op type; None if it has none.

    Without a rule, a stateless op is replicated, and a stateful one runs on the first rank.
    """
    return load_rules().get(op_type)


@lru_cache(maxsize=65536)
def _bind_line(line: str, inputs: tuple[TensorType, ...], outputs: tuple[TensorType, ...], hint: int | None) -> Binding:
    return bind(parse(line), inputs, outputs, hint)


def _find_element_rank(
    inputs: tuple[TensorType, ...],
    current: tuple[Placement, ...],
    outputs: tuple[TensorType, ...],
    wanted: tuple[Placement | None, ...],
) -> int | None:
    """Returns the smallest number of dimensions that the elements of sharded TensorLists can have; None if no list is
    sharded.

    A list has no static element shape, but if its elements are sharded along dimension d they have at least d + 1
    dimensions.
    """
    pairs = list(zip(inputs, current)) + list(zip(outputs, wanted))
    ranks = [pl.dim + 1 for t, pl in pairs if t.dtype == "variant" and isinstance(pl, Shard)]
    return max(ranks) if ranks else None


def _parse_all_passes(texts: tuple[str | None, str | None, str | None]) -> tuple[Passes, ...]:
    lin, mono, copy = texts
    found = parse_passes(lin, ("sum",)) if lin else ()
    found += parse_passes(mono, ("max", "min")) if mono else ()
    return found + (parse_passes(copy, ("sum", "max", "min", "prod")) if copy else ())


def _can_be(partial: Placement, dtype: str) -> bool:
    """Returns True if a tensor of this dtype can have this placement; only partial placements are limited.

    Strings and resources cannot be partial, bools only partial maxima or minima, and complex numbers neither of these.
    """
    if not isinstance(partial, Partial):
        return True
    if dtype in ("string", "resource"):
        return False
    if dtype == "bool":
        return partial.op in ("max", "min")
    return not (dtype.startswith("complex") and partial.op in ("max", "min"))


def _has_empty_share(placement: Placement) -> bool:
    return isinstance(placement, Shard) and placement.smallest == 0


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
    if rule.op in NEEDS_ELEMENTS and not all(t.is_static for t in outputs):
        found = [s for s in found if not any(map(_has_empty_share, s.inputs + s.outputs))]
    found.append(Strategy((B,) * len(inputs), (B,) * len(outputs), "replicated"))
    return tuple(found)


# The functions below replace operands that carry shapes (operands with a role) by local constants.
#
# Roles: ``[outN]`` shape of output N; ``[inN]`` shape of operand N; ``[shape]`` shape of output 0, one size may be
# unknown (-1); ``[elements]`` shape of a list's elements, any size may be unknown.
def _find_subject(role: str, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Any:
    """Returns the item that belongs to the operand or output of which a role carries the shape: "in1" is ``inputs[1]``.

    Args:
      role: name of the role, without brackets.
      inputs: an item for each operand, such as its type or its placement.
      outputs: likewise for each output.

    Raises:
      RuleError: there is no such role.
    """
    if role == "shape":
        return outputs[0]
    match = _NUMBERED.match(role)
    if match is None:
        raise RuleError(
            "a rule line has an unknown role",
            given=f"[{role}]",
            expected="[outN] (the operand is the shape of output N, such as [out0]), [inN] (of operand N), [shape] (of "
            "output 0, with at most one unknown size) or [elements] (of a list's elements)",
            action='correct the role in the rule line; for example, rule("Fill", "[out0], . -> p*")',
        )
    return (inputs if match[1] == "in" else outputs)[int(match[2])]


def list_operand_terms(line: Line, count: int) -> list[Term]:
    """Returns the line's term for each of ``count`` operands, with a variadic term repeated."""
    at = next((i for i, t in enumerate(line.inputs) if t.variadic), None)
    if at is None:
        return list(line.inputs)
    extra = count - len(line.inputs) + 1
    return [*line.inputs[:at], *[line.inputs[at]] * extra, *line.inputs[at + 1 :]]


def can_localize(
    line: Line, inputs: tuple[TensorType, ...], outputs: tuple[TensorType, ...], strategy: Strategy
) -> bool:
    """Returns True if all operands with roles can be replaced by local constants under ``strategy``.

    For a sharded tensor, the sizes of its other dimensions must be known; with the role ``[shape]`` one may be unknown,
    which follows from the number of elements if no share is empty.
    """
    for term in list_operand_terms(line, len(inputs)):
        if term.kind != "role" or term.role == "elements":
            continue
        placement = _find_subject(term.role, strategy.inputs, strategy.outputs)
        if not isinstance(placement, Shard):
            continue
        shape = _find_subject(term.role, inputs, outputs).shape
        unknown = 0 if shape is None else sum(s is None for i, s in enumerate(shape) if i != placement.dim)
        if shape is None or unknown > (1 if term.role == "shape" and placement.smallest else 0):
            return False
    return True


def compute_constants(line: Line, op: OpView, strategy: Strategy, coordinate: int) -> dict[int, np.ndarray]:
    """Returns operand number -> constant with the local shape, for each operand with a role whose tensor is sharded."""
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
    """Returns the element shape that operand ``i`` of a list op must have on ``coordinate``; None if the operand can
    stay.

    Sizes that are not constant in the program become -1 (unknown).
    """
    if op.attr("element_dtype") == "variant":
        return None  # a list of lists has handles as elements; what is sharded are the elements of the inner lists
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
