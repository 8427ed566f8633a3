"""Defines sharding rules of ops that rearrange elements: reshapes, transposes, joins, splits, repeats."""

from __future__ import annotations

import math

import numpy as np

from whale.ir.layout import Shard
from whale.ir.values import Dims, TensorType, find_numpy_dtype
from whale.sharding_rules.base import (
    UNCHANGED,
    Local,
    OpView,
    Strategy,
    freeze,
    is_same_size,
    local_input_shape,
    local_output_shape,
    make_labels,
    read_axis,
    read_constant,
    write_runs,
    write_term,
)
from whale.sharding_rules.notation import REPLICATED
from whale.sharding_rules.registry import rule


def write_reshape_terms(
    before: Dims, after: Dims, in_runs: bool = False, parts: int = 1
) -> tuple[list[str], list[str]]:
    """Writes the terms of a reshape's operand and result, which say which of their dimensions can be sharded together.

    From the left, the dimensions of both sides are divided into shortest groups of equal product. In each group, the
    outermost dimensions of both sides can be sharded together, in units of their greatest common divisor. A dimension
    of size 1 that both sides have in the same place is a group of its own: it may be a batch of one row. So may a first
    dimension of size 1 that one side alone has: on the other side it is the outermost part of the first dimension.
    Examples: for (6, 4) and (24,) the terms are "g1 x" and "(g1 4)", so that 24 is sharded in multiples of 4; for
    (1, 6, 4) and (24,) they are "row g1 x" and "(row g1 4)".

    Args:
      before: shape of the operand.
      after: shape of the result.
      in_runs: True to allow, in a group with one dimension on one side and several on the other, to shard each of the
        several; inner ones are then sharded in runs (``Shard.blocks``).
      parts: number of ranks. Groups whose outermost dimension is smaller than that are treated as with ``in_runs``: for
        example (choices, rows) of experts, where each row has 2 choices.
    """
    if 0 in before and 0 in after:
        return _write_empty_terms(before, after)
    left: list[str] = []
    right: list[str] = []
    i = j = group = 0
    while i < len(before) or j < len(after):
        if before[i : i + 1] == after[j : j + 1] == (1,):
            group += 1
            left.append(f"g{group}")
            right.append(f"g{group}")
            i, j = i + 1, j + 1
            continue
        if i < len(before) and before[i] == 1:
            left.append("1")
            i += 1
            continue
        if j < len(after) and after[j] == 1:
            right.append("1")
            j += 1
            continue
        i2, j2 = _write_run(before, after, i, j)
        group += 1
        few = 1 < (max(before[i:i2], after[j:j2], key=len)[0] or 0) < parts
        first, second = _write_pair(f"g{group}", before[i:i2], after[j:j2], in_runs or few)
        if i + j == 1 and first and second and None not in before[:i2] + after[:j2]:
            if i:
                left[0], second[0] = "row", _write_around("row", second[0])
            else:
                right[0], first[0] = "row", _write_around("row", first[0])
        left += first
        right += second
        i, j = i2, j2
    return left, right


def _write_around(label: str, term: str) -> str:
    """Writes the term of a dimension that is made of ``label``, outermost, and of what ``term`` says."""
    return f"({label} {term.removeprefix('(').removesuffix(')')})"


def _write_empty_terms(before: Dims, after: Dims) -> tuple[list[str], list[str]]:
    """Writes the terms of a reshape of a tensor without elements, for which the products of sizes are 0 and tell
    nothing.

    Trailing dimensions that both sides share can be sharded. The dimensions before them are treated as those of a
    reshape of their own if their products are equal and not 0; otherwise the leading ones that both sides share can be
    sharded.
    """
    same = 0
    while same < min(len(before), len(after)) and before[-1 - same] == after[-1 - same]:
        same += 1
    first, second = before[: len(before) - same], after[: len(after) - same]
    if 0 not in (*first, *second) and _multiply(first) == _multiply(second) is not None:
        left, right = write_reshape_terms(first, second)
    else:
        front = 0
        while front < min(len(first), len(second)) and first[front] == second[front]:
            front += 1
        left, right = ([f"f{i}" for i in range(front)] + [f"{side}{i}^" for i in range(front, len(dims))]
                       for side, dims in (("l", first), ("r", second)))  # fmt: skip
    alike = [f"s{i}" for i in range(same)]
    return left + alike, right + alike


def _write_run(before: Dims, after: Dims, i: int, j: int) -> tuple[int, int]:
    """Returns where the shortest groups of dimensions with equal products end, which begin at ``before[i]`` and
    ``after[j]``.

    Returns:
      (index after the group's last dimension in ``before``, the same in ``after``); the ends of both shapes if no
        groups have equal products.
    """
    if i >= len(before) or j >= len(after):
        return len(before), len(after)
    if before[i] is None and after[j] is None:
        if _multiply(before[i + 1 :]) == _multiply(after[j + 1 :]) and None not in before[i + 1 :] + after[j + 1 :]:
            return i + 1, j + 1
        return len(before), len(after)
    a, b = before[i], after[j]
    i, j = i + 1, j + 1
    while a is not None and b is not None and a != b:
        if a < b and i < len(before):
            a = _multiply_size(a, before[i])
            i += 1
        elif b < a and j < len(after):
            b = _multiply_size(b, after[j])
            j += 1
        else:
            return len(before), len(after)
    return (len(before), len(after)) if a is None or b is None else (i, j)


def _multiply_size(a: int, b: int | None) -> int | None:
    return None if b is None else a * b


def _multiply(sizes: Dims) -> int:
    return math.prod(s for s in sizes if s is not None)


def _write_pair(label: str, before: Dims, after: Dims, in_runs: bool = False) -> tuple[list[str], list[str]]:
    """Writes the terms of one group of dimensions: the outermost ones of both sides share ``label``, the others cannot
    be sharded.

    Args:
      label: the label, from which the others' labels are made.
      before: the group's dimensions in the operand.
      after: those in the result.
      in_runs: as in ``write_reshape_terms``.
    """
    if in_runs and (len(before) == 1) != (len(after) == 1) and before and after and all(before + after):
        several = [label if n == 0 else f"{label}i{n}" for n in range(max(len(before), len(after)))]
        joined = [f"({' '.join(several)})"]
        return (joined, several) if len(before) == 1 else (several, joined)
    rest = ([f"{label}x{n}^" for n in range(1, len(before))], [f"{label}y{n}^" for n in range(1, len(after))])
    if not before or not after:
        return [f"{label}x0^"] * bool(before) + rest[0], [f"{label}y0^"] * bool(after) + rest[1]
    a, b = before[0], after[0]
    if a is None or b is None:
        inner = _find_unknown_ratio(before, after)
    elif a == 0 or b == 0:
        inner = None
    else:
        common = math.gcd(a, b)
        inner = (a // common, b // common) if common > 1 else None
    if inner is None:
        return [f"{label}x0^", *rest[0]], [f"{label}y0^", *rest[1]]
    words = [label if n == 1 else f"({label} {n})" for n in inner]
    return [words[0], *rest[0]], [words[1], *rest[1]]


def _find_unknown_ratio(before: Dims, after: Dims) -> tuple[int, int] | None:
    """Returns by how much both sides' outermost dimensions, which are of unknown size, are compound: a pair of inner
    sizes.

    For (None, 4) and (None,) it is (1, 4): the result's dimension is ``(label 4)``. The result is None if other sizes
    are unknown, or neither product of the inner sizes divides the other.
    """
    if before[0] is not None or after[0] is not None or None in before[1:] + after[1:]:
        return None
    a, b = _multiply(before[1:]), _multiply(after[1:])
    if a and b and max(a, b) % min(a, b) == 0:
        return (b // a, 1) if b > a else (1, a // b)
    return None


def reshape(op: OpView) -> str:
    """Writes the sharding rule of Reshape, from the factors that operand and result have in common."""
    before, after = op.inputs[0].shape, op.outputs[0].shape
    if before is None or after is None:
        return REPLICATED
    left, right = write_reshape_terms(before, after, op.marks.cut_in_runs, op.parts)
    return f"{write_term(left)}, [shape] -> {write_term(right)}"


def expand_dims(op: OpView) -> str:
    """Writes the sharding rule of ExpandDims, from the position of the new dimension."""
    before = op.inputs[0].shape
    if before is None:
        return REPLICATED
    at = read_axis(op, 1, len(before) + 1)
    if at is None:
        return REPLICATED
    labels = make_labels("a", len(before))
    return f"{write_term(labels)}, . -> {write_term([*labels[:at], '1', *labels[at:]])}"


def _find_squeezed_dims(op: OpView) -> set[int] | None:
    before = op.inputs[0].shape
    if before is None:
        return None
    given = op.attr("squeeze_dims", ()) or op.attr("axis", ())
    if given:
        return {d % len(before) for d in given}
    return None if None in before else {d for d, s in enumerate(before) if s == 1}


def squeeze(op: OpView) -> str:
    """Writes the sharding rule of Squeeze, from ``squeeze_dims``, or from the shape if none are given."""
    gone = _find_squeezed_dims(op)
    if gone is None:
        return REPLICATED
    labels = make_labels("a", len(op.inputs[0].shape or ()))
    operand = ["1" if d in gone else x for d, x in enumerate(labels)]
    return f"{write_term(operand)} -> {write_term(x for d, x in enumerate(labels) if d not in gone)}"


def _set_squeeze_dims(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    """Names the dimensions to squeeze, since a shard of size 1 must not be squeezed too."""
    return Local(attrs={"squeeze_dims": tuple(sorted(_find_squeezed_dims(op) or ()))})


def transpose(op: OpView) -> str:
    """Writes the sharding rule of Transpose, from the constant permutation."""
    before, order = op.inputs[0].shape, read_constant(op, 1)
    if before is None or order is None:
        return REPLICATED
    labels = make_labels("a", len(before))
    return f"{write_term(labels)}, . -> {write_term(labels[d] for d in order)}"


def concat(op: OpView) -> str:
    """Writes the sharding rule of Concat: all dimensions can be sharded, that of the axis in whole runs.

    Along the axis, values and result are runs of one common length (see ``_write_runs``).
    """
    first = op.node.op == "Concat"
    shape = op.inputs[1 if first else 0].shape
    if shape is None:
        return REPLICATED
    at = read_axis(op, 0 if first else len(op.inputs) - 1, len(shape))
    if at is None:
        return REPLICATED
    labels = make_labels("a", len(shape))
    values = op.inputs[1:] if first else op.inputs[:-1]
    parts, whole = _write_runs([v.shape[at] if v.shape is not None else None for v in values])
    lead, tail = " ".join(labels[:at]), " ".join(labels[at + 1 :])
    texts = [f"{lead} {part} {tail}".strip() for part in parts]
    operands = [".", *texts] if first else [*texts, "."]
    return f"{', '.join(operands)} -> {f'{lead} {whole} {tail}'.strip()}"


def _write_runs(sizes: list[int | None]) -> tuple[list[str], str]:
    """Writes concatenated dimensions as runs of one label ``j``, and the dimension that they make together.

    For sizes 2 and 4 these are ``j``, ``(2 j)``, and ``(3 j)`` together. They cannot be sharded if sizes are unknown.
    """
    known = [s for s in sizes if s is not None]
    run = math.gcd(*known) if known else 0
    if len(known) < len(sizes) or run == 0 or 0 in known:
        return [f"j{n}^" for n in range(len(sizes))], "j^"
    return [write_runs(s // run, "j") for s in known], write_runs(sum(known) // run, "j")


def _list_concat_values(op: OpView) -> str:
    """Returns ``copy`` of Concat: partial values pass if all concatenated operands are partial."""
    shift = int(op.node.op == "Concat")
    return "&".join(str(i + shift) for i in range(len(op.inputs) - 1))


def pack(op: OpView) -> str:
    """Writes the sharding rule of Pack, from the axis of the new dimension, which cannot be sharded."""
    after = op.outputs[0].shape
    if after is None:
        return REPLICATED
    at = int(op.attr("axis", 0)) % len(after)
    labels = make_labels("a", len(after) - 1)
    return f"{{{write_term(labels)}}} -> {write_term([*labels[:at], 'j^', *labels[at:]])}"


def unpack(op: OpView) -> str:
    """Writes the sharding rule of Unpack, from the axis, which cannot be sharded."""
    before = op.inputs[0].shape
    if before is None:
        return REPLICATED
    at = int(op.attr("axis", 0)) % len(before)
    labels = make_labels("a", len(before))
    return f"{write_term(freeze(labels, [at]))} -> {{{write_term(x for d, x in enumerate(labels) if d != at)}}}"


def split_op(op: OpView) -> str:
    """Writes the sharding rule of Split: all dimensions can be sharded, that of the axis in whole runs.

    Along the axis, operand and results are runs of one common length (see ``_write_runs``).
    """
    value, where = (1, 0) if op.node.op == "Split" else (0, 2)
    before = op.inputs[value].shape
    if before is None:
        return REPLICATED
    at = read_axis(op, where, len(before))
    if at is None:
        return REPLICATED
    labels = make_labels("a", len(before))
    lead, tail = " ".join(labels[:at]), " ".join(labels[at + 1 :])
    parts, whole = _write_runs([t.shape[at] if t.shape is not None else None for t in op.outputs])
    operand = f"{lead} {whole} {tail}".strip()
    results = ", ".join(f"{lead} {part} {tail}".strip() for part in parts)
    return (f"., {operand}" if value else f"{operand}, ., .") + f" -> {results}"


def _set_split_sizes(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    """Sets the sizes of the results of a SplitV to local ones, if its axis is sharded."""
    placement, rank = strategy.inputs[0], len(op.inputs[0].shape or ())
    if not isinstance(placement, Shard) or placement.dim != read_axis(op, 2, rank):
        return UNCHANGED
    shapes = [local_output_shape(op, strategy, i, coordinate) for i in range(len(op.outputs))]
    sizes = [-1 if shape is None else shape[placement.dim] for shape in shapes]
    return Local(consts={1: np.array(sizes, find_numpy_dtype(op.inputs[1].dtype))})


def _find_repeats(op: OpView) -> list[int | None] | None:
    """Returns how often Tile repeats each dimension; None in place of a count, or of the list, if unknown."""
    before, after = op.inputs[0].shape, op.outputs[0].shape
    given = read_constant(op, 1)
    if given is not None:
        return list(given)
    if before is None or after is None:
        return None
    return [b // a if a and b is not None else None for a, b in zip(before, after)]


def tile(op: OpView) -> str:
    """Writes the sharding rule of Tile, from the multiples.

    A dimension that is made by repeating one element can be sharded anywhere. Ranks then need multiples of their own,
    which is why all of them have to be known.
    """
    before, repeats = op.inputs[0].shape, _find_repeats(op)
    if before is None or repeats is None:
        return REPLICATED
    left, right, are_known = [], [], None not in repeats
    for n, (size, count) in enumerate(zip(before, repeats)):
        if count == 1:
            left.append(f"a{n}")
            right.append(f"a{n}")
        elif size == 1 and are_known:
            left.append("1")
            right.append(f"t{n}")
        elif size is not None and are_known:
            left.append(f"a{n}")
            right.append(f"(t{n} a{n})")
        else:
            left.append(f"a{n}^")
            right.append(f"b{n}^")
    return f"{write_term(left)}, . -> {write_term(right)}"


def _set_local_multiples(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    placement, repeats = strategy.outputs[0], _find_repeats(op)
    if not isinstance(placement, Shard) or repeats is None:
        return UNCHANGED
    if strategy.inputs[0] == placement or repeats[placement.dim] == 1:
        return UNCHANGED
    before = local_input_shape(op, strategy, 0, coordinate)
    after = local_output_shape(op, strategy, 0, coordinate)
    mine, result = (before or ())[placement.dim], (after or ())[placement.dim]
    if not mine or result is None:
        return UNCHANGED
    repeats[placement.dim] = result // mine
    return Local(consts={1: np.array(repeats, find_numpy_dtype(op.inputs[1].dtype))})


def broadcast_to(op: OpView) -> str:
    """Writes the sharding rule of BroadcastTo, from the shapes.

    A dimension that is broadcast can be sharded anywhere.
    """
    before, after = op.inputs[0].shape, op.outputs[0].shape
    if before is None or after is None:
        return REPLICATED
    labels = make_labels("a", len(after))
    own = labels[len(after) - len(before) :]
    grown = after[len(after) - len(before) :]
    operand = [
        "1" if a == 1 and b != 1 else x if is_same_size(a, b) or a is b else f"{x}^"
        for x, a, b in zip(own, before, grown)
    ]
    frozen = {x[:-1] for x in operand if x.endswith("^")}
    return f"{write_term(operand)}, [out0] -> {write_term(f'{x}^' if x in frozen else x for x in labels)}"


def _compute_static_shapes(op: OpView, strategy: Strategy, coordinate: int) -> tuple[np.ndarray | None, ...]:
    """Returns the global shapes as known outputs of Shape ops, since a shard has another shape."""
    if not any(isinstance(p, Shard) for p in strategy.inputs) or not all(t.is_static for t in op.inputs):
        return (None,) * len(op.outputs)
    return tuple(_make_shape_value(op.node.op, t, o) for t, o in zip(op.inputs, op.outputs))


def _make_shape_value(name: str, kind: TensorType, output: TensorType) -> np.ndarray:
    shape = kind.shape or ()
    value = math.prod(shape) if name == "Size" else list(shape)  # type: ignore[arg-type]
    return np.array(value, find_numpy_dtype(output.dtype))


def shape_of(op: OpView) -> str:
    """Writes the sharding rule of Shape ops, from whether shapes are static; the operands' values are not read."""
    shape = op.inputs[0].shape
    if all(t.is_static for t in op.inputs) or (op.node.op == "Shape" and shape and shape[0] is not None):
        return "{?} -> {.}"
    if op.node.op != "Shape" or shape is None:
        return "{~.} -> {.}"
    # A dimension of unknown size cannot be sharded: its rows may lie with the owners of a table's rows, and then the
    # placement tells which rank has which ids, and not how many there are.
    return f"~{write_term([f'd{i}' + '^' * (n is None) for i, n in enumerate(shape)])} -> =k^"


def _add_remote_sizes(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    """Adds the other ranks' sizes to the result of Shape, if the sharded tensor has sizes known only at run time.

    A rank then computes the shape of its own shard, and the sum is the global shape.
    """
    cut = strategy.inputs[0]
    if op.inputs[0].is_static or not isinstance(cut, Shard):
        return UNCHANGED
    elsewhere = np.zeros(len(op.inputs[0].shape or ()), np.int64)
    elsewhere[cut.dim] = cut.extent - cut.local_size(coordinate)
    return Local(plus=elsewhere)


RULES = (
    rule("Reshape", reshape, copy="0"),
    rule("ExpandDims", expand_dims, copy="0"),
    rule("Squeeze", squeeze, copy="0", local=_set_squeeze_dims),
    rule("Transpose", transpose, copy="0"),
    rule("ConjugateTranspose", transpose, lin="0"),
    rule("ConcatV2 Concat", concat, copy=_list_concat_values),
    rule("Pack ParallelConcat", pack, copy="all"),
    rule("Unpack", unpack, copy="0"),
    rule("Split", split_op, copy="1"),
    rule("SplitV", split_op, copy="0", local=_set_split_sizes),
    rule("Tile", tile, copy="0", local=_set_local_multiples, produces_any=True),
    rule("BroadcastTo", broadcast_to, copy="0", produces_any=True),
    rule("Fill", "[out0], . -> p*", copy="1", produces_any=True),
    rule("Shape ShapeN Size", shape_of, known=_compute_static_shapes, local=_add_remote_sizes),
    rule("Rank", "? -> ."),
    rule("BroadcastGradientArgs BroadcastArgs ConcatOffset InvertPermutation Range", REPLICATED),
    rule("LinSpace", "., ., . -> .", lin="0&1"),
)
