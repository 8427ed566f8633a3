"""Slices, pads, flips: dimensions that are taken whole can be cut, the others cannot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whale.ir.layout import Split
from whale.ir.values import Dims, numpy_dtype
from whale.rules.base import UNCHANGED, Local, OpView, Strategy
from whale.rules.dims import constant, freeze, names, same, term
from whale.rules.notation import REPLICATED
from whale.rules.registry import rule


def _kept(before: Dims | None, after: Dims | None) -> list[str] | None:
    """Labels, frozen where the size changes or is unknown."""
    if before is None or after is None:
        return None
    return freeze(names("a", len(before)), [n for n, (x, y) in enumerate(zip(before, after)) if not same(x, y)])


def _pairwise(left: list[str]) -> str:
    """The result's term: frozen dimensions have other labels there (their size differs)."""
    return term(f"b{n}^" if x.endswith("^") else x for n, x in enumerate(left))


def slice_op(op: OpView) -> str:
    """the dimensions taken whole"""
    before, after = op.inputs[0].shape, op.outputs[0].shape
    begin, size = constant(op, 1), constant(op, 2)
    left = _kept(before, after)
    if left is None:
        return REPLICATED
    if begin is not None and size is not None:
        whole = [b == 0 and (s == -1 or same(s, n)) for b, s, n in zip(begin, size, before or ())]
        left = [f"a{n}" if w else f"a{n}^" for n, w in enumerate(whole)]
    return f"{term(left)}, ., . -> {_pairwise(left)}"


def _slice_sizes(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    placement, size = strategy.outputs[0], constant(op, 2)
    if not isinstance(placement, Split):
        return UNCHANGED
    if size is None:
        size = [-1 if n is None else n for n in op.outputs[0].shape or ()]
    size[placement.dim] = placement.sizes[coordinate]
    return Local(consts={2: np.array(size, numpy_dtype(op.inputs[2].dtype))})


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry of a strided slice: its place in begin/end, the dimensions it reads and makes, taken whole or not."""

    entry: int | None
    source: int | None
    result: int | None
    whole: bool
    stride: int = 1

    def label(self) -> str:
        """The label of the dimension sliced: whole strides of it can be cut."""
        name = f"a{self.source}" if self.whole else f"a{self.source}^"
        return name if self.stride == 1 else f"({name} {self.stride})"


def _entries(op: OpView, shape: Dims) -> list[_Entry] | None:
    """What each entry of begin/end/strides does to a tensor of ``shape`` (tf.strided_slice); None: not known."""
    operand = op.inputs[1].shape
    if not operand or operand[0] is None:
        return None
    count = operand[0]
    begin, end, strides = constant(op, 1), constant(op, 2), constant(op, 3)
    masks = {m: int(op.attr(f"{m}_mask", 0)) for m in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    bit = lambda name, k: bool(masks[name] >> k & 1)  # noqa: E731
    used = sum(not bit("new_axis", k) and not bit("ellipsis", k) for k in range(count))
    found: list[_Entry] = []
    source = result = 0
    seen_ellipsis = False
    for k in range(count):
        if bit("ellipsis", k):
            for _ in range(len(shape) - used):
                found.append(_Entry(None, source, result, True))
                source, result = source + 1, result + 1
            seen_ellipsis = True
        elif bit("new_axis", k):
            found.append(_Entry(None, None, result, False))
            result += 1
        elif bit("shrink_axis", k):
            found.append(_Entry(k, source, None, False))
            source += 1
        else:
            size = shape[source]
            first = bit("begin", k) or (begin is not None and _is_start(begin[k], size))
            last = bit("end", k) or (end is not None and size is not None and end[k] >= size)
            stride = strides[k] if strides is not None else 0
            whole = first and last and (stride == 1 or (stride > 1 and size is not None and size % stride == 0))
            found.append(_Entry(k, source, result, whole, stride if whole else 1))
            source, result = source + 1, result + 1
    if not seen_ellipsis:
        for _ in range(len(shape) - source):
            found.append(_Entry(None, source, result, True))
            source, result = source + 1, result + 1
    return found


def _is_start(begin: int, size: int | None) -> bool:
    return begin == 0 or (size is not None and begin <= -size)


def _strided(op: OpView, shape: Dims | None) -> tuple[str, str] | None:
    """Terms of the tensor sliced and of the slice."""
    entries = None if shape is None else _entries(op, shape)
    if entries is None:
        return None
    left, right = [], []
    for e in entries:
        if e.source is not None:
            left.append(e.label())
        if e.result is not None:
            right.append("1" if e.source is None else f"a{e.source}" if e.whole else f"b{e.result}^")
    return term(left), term(right)


def strided_slice(op: OpView) -> str:
    """the masks and bounds"""
    terms = _strided(op, op.inputs[0].shape)
    return REPLICATED if terms is None else f"{terms[0]}, ., ., . -> {terms[1]}"


def strided_slice_grad(op: OpView) -> str:
    """the masks and bounds"""
    terms = _strided(op, op.outputs[0].shape)
    return REPLICATED if terms is None else f"[out0], ., ., ., {terms[1]} -> {terms[0]}"


def strided_slice_update(op: OpView) -> str:
    """the masks and bounds"""
    terms = _strided(op, op.inputs[0].shape)
    return REPLICATED if terms is None else f"{terms[0]}, ., ., ., {terms[1]} -> {terms[0]}"


def _bounds(op: OpView, shape: Dims | None, placement: object, coordinate: int) -> Local:
    """``end`` of the cut dimension, where it is not masked: the local size (``begin`` is 0)."""
    if not isinstance(placement, Split) or shape is None:
        return UNCHANGED
    entry = next(e.entry for e in _entries(op, shape) or () if e.source == placement.dim)
    if entry is None:
        return UNCHANGED
    consts: dict[int, np.ndarray] = {}
    for operand, mask, value in ((1, "begin_mask", 0), (2, "end_mask", placement.sizes[coordinate])):
        given = constant(op, operand)
        if given is not None and not int(op.attr(mask, 0)) >> entry & 1:
            given[entry] = value
            consts[operand] = np.array(given, numpy_dtype(op.inputs[operand].dtype))
    return Local(consts=consts)


def _slice_bounds(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    return _bounds(op, op.inputs[0].shape, strategy.inputs[0], coordinate)


def _grad_bounds(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    return _bounds(op, op.outputs[0].shape, strategy.outputs[0], coordinate)


def pad(op: OpView) -> str:
    """the dimensions that are not padded"""
    before, after = op.inputs[0].shape, op.outputs[0].shape
    given = constant(op, 1)
    if before is None:
        return REPLICATED
    if given is not None:
        left = [f"a{n}" if given[2 * n] == given[2 * n + 1] == 0 else f"a{n}^" for n in range(len(before))]
    else:
        left = _kept(before, after) or []
        if not left and before:
            return REPLICATED
    more = ", ." * (len(op.inputs) - 1)
    return f"{term(left)}{more} -> {_pairwise(left)}"


def reverse(op: OpView) -> str:
    """the axes, which are whole"""
    before, axes = op.inputs[0].shape, constant(op, 1)
    if before is None or axes is None:
        return REPLICATED
    if op.node.op == "Reverse":
        axes = [n for n, flag in enumerate(axes) if flag]
    labels = term(freeze(names("a", len(before)), [a % max(len(before), 1) for a in axes]))
    return f"{labels}, . -> {labels}"


def roll(op: OpView) -> str:
    """the axes, which are whole"""
    before, axes = op.inputs[0].shape, constant(op, 2)
    if before is None or axes is None:
        return REPLICATED
    labels = term(freeze(names("a", len(before)), [a % max(len(before), 1) for a in axes]))
    return f"{labels}, ., . -> {labels}"


def reverse_sequence(op: OpView) -> str:
    """seq_dim (whole) and batch_dim"""
    before = op.inputs[0].shape
    if before is None:
        return REPLICATED
    rank = len(before)
    batch = int(op.attr("batch_dim", 0)) % rank
    labels = freeze(names("a", rank), [int(op.attr("seq_dim", 0)) % rank])
    return f"{term(labels)}, a{batch} -> {term(labels)}"


def space(op: OpView) -> str:
    """data_format"""
    if str(op.attr("data_format", "NHWC")) != "NHWC":
        return "b p*^ -> b q*^"
    return "b h^ w^ c^ -> b y^ x^ d^"


RULES = (
    rule("Slice", slice_op, copy="0", local=_slice_sizes),
    rule("StridedSlice", strided_slice, copy="0", local=_slice_bounds),
    rule("StridedSliceGrad", strided_slice_grad, lin="4", local=_grad_bounds),
    rule("TensorStridedSliceUpdate", strided_slice_update, copy="0&4", local=_slice_bounds),
    rule("Pad", pad, lin="0"),
    rule("PadV2", pad, copy="0&2"),
    rule("MirrorPad", pad, copy="0"),
    rule("MirrorPadGrad", pad, lin="0"),
    rule("ReverseV2 Reverse", reverse, copy="0"),
    rule("Roll", roll, copy="0"),
    rule("ReverseSequence", reverse_sequence, copy="0"),
    rule("SpaceToDepth DepthToSpace", space, copy="0"),
    rule("SpaceToBatch BatchToSpace", "b^ h^ w^ c, . -> d^ y^ x^ c", lin="0"),
)
