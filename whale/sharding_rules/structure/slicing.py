"""Defines sharding rules of slices, pads and flips: dimensions that are taken whole can be sharded, others only in
runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from whale.ir.layout import Shard
from whale.ir.values import Dims, find_numpy_dtype
from whale.sharding_rules.base import (
    UNCHANGED,
    Local,
    OpView,
    Strategy,
    freeze,
    is_same_size,
    make_labels,
    read_constant,
    write_runs,
    write_term,
)
from whale.sharding_rules.notation import REPLICATED
from whale.sharding_rules.registry import rule


def _label_kept_dims(before: Dims | None, after: Dims | None) -> list[str] | None:
    """Returns a label for each dimension, with the flag ``^`` if its size changes or is unknown; None for an unknown
    rank.
    """
    if before is None or after is None:
        return None
    return freeze(
        make_labels("a", len(before)), [n for n, (x, y) in enumerate(zip(before, after)) if not is_same_size(x, y)]
    )


def _write_result_term(left: list[str]) -> str:
    """Writes the term of the result: dimensions with the flag ``^`` get other labels there, as their sizes differ."""
    return write_term(f"b{n}^" if x.endswith("^") else x for n, x in enumerate(left))


def slice_op(op: OpView) -> str:
    """Writes the sharding rule of Slice: dimensions taken whole, or in equal runs, can be sharded."""
    before, after = op.inputs[0].shape, op.outputs[0].shape
    begin, size = read_constant(op, 1), read_constant(op, 2)
    left = _label_kept_dims(before, after)
    if left is None:
        return REPLICATED
    if begin is None or size is None:
        return f"{write_term(left)}, ., . -> {_write_result_term(left)}"
    right = []
    for n, (b, s, whole) in enumerate(zip(begin, size, before or ())):
        if b == 0 and (s == -1 or is_same_size(s, whole)):
            left[n] = f"a{n}"
            right.append(left[n])
            continue
        run = _run(b, whole - b if s == -1 and whole is not None else s, whole)
        left[n], kept = (f"a{n}^", f"b{n}^") if run is None else run.labels(f"a{n}")
        right.append(kept)
    return f"{write_term(left)}, ., . -> {write_term(right)}"


@dataclass(frozen=True, slots=True)
class _Run:
    """Represents a slice of a dimension as a number of equal runs.

    Attributes:
      first: number of the first run that the slice takes.
      kept: number of runs that it takes.
      all: number of runs of the dimension.
    """

    first: int
    kept: int
    all: int

    def labels(self, label: str) -> tuple[str, str]:
        """Writes (the sliced dimension, the slice) as runs of ``label``."""
        return write_runs(self.all, label), write_runs(self.kept, label)

    def local(self, placement: Shard, coordinate: int) -> tuple[int, int]:
        """Returns the (begin, end) of the slice on a coordinate, given the placement of the sliced dimension."""
        run = placement.local_size(coordinate) // self.all
        return self.first * run, (self.first + self.kept) * run


def _run(begin: int, size: int, whole: int | None) -> _Run | None:
    """Returns a slice in runs that are as long as possible; None if sizes are unknown or runs would be single
    elements.
    """
    if whole is None or size <= 0 or begin < 0:
        return None
    run = math.gcd(begin, size, whole)
    return None if run <= 1 else _Run(begin // run, size // run, whole // run)


def _set_local_slice_bounds(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    placement, begin, size = strategy.inputs[0], read_constant(op, 1), read_constant(op, 2)
    if not isinstance(placement, Shard):
        return UNCHANGED
    dtype = find_numpy_dtype(op.inputs[2].dtype)
    if begin is None or size is None:
        # The rule takes the dimension whole then. Of the others only the run knows how much is taken.
        limit = np.full(len(op.inputs[0].shape or ()), np.iinfo(dtype).max, dtype)
        limit[placement.dim] = placement.local_size(coordinate)
        return Local(at_most={2: limit})
    first, kept, whole = begin[placement.dim], size[placement.dim], (op.inputs[0].shape or ())[placement.dim]
    if first == 0 and (kept == -1 or is_same_size(kept, whole)):
        size[placement.dim] = -1 if kept == -1 else placement.local_size(coordinate)
        return Local(consts={2: np.array(size, dtype)})
    run = _run(first, whole - first if kept == -1 and whole is not None else kept, whole)
    assert run is not None, op.node.name
    begin[placement.dim], end = run.local(placement, coordinate)
    size[placement.dim] = end - begin[placement.dim]
    consts = {1: np.array(begin, find_numpy_dtype(op.inputs[1].dtype)), 2: np.array(size, dtype)}
    return Local(consts=consts)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Represents one dimension that a strided slice reads or makes.

    Attributes:
      entry: position in begin, end and strides; None for dimensions that an ellipsis or omission takes whole.
      source: the dimension that is read; None for a new axis.
      result: the dimension that is made; None if it is shrunk away.
      whole: True if all of the dimension is taken, in steps of ``stride``.
      stride: the step.
      run: the slice as runs, if it takes a part of the dimension in steps of 1.
    """

    entry: int | None
    source: int | None
    result: int | None
    whole: bool
    stride: int = 1
    run: _Run | None = None

    def labels(self) -> tuple[str, str]:
        """Writes (the sliced dimension, that of the result), which can be sharded in whole strides, or in whole
        runs.
        """
        if self.run is not None:
            return self.run.labels(f"a{self.source}")
        if not self.whole:
            return f"a{self.source}^", f"b{self.result}^"
        name = f"a{self.source}"
        return (name if self.stride == 1 else f"({name} {self.stride})"), name


def _read_entries(op: OpView, shape: Dims) -> list[_Entry] | None:
    """Returns what a strided slice does to each dimension of a tensor of ``shape``, as in ``tf.strided_slice``.

    The result is None if the number of entries is unknown.
    """
    operand = op.inputs[1].shape
    if not operand or operand[0] is None:
        return None
    count = operand[0]
    begin, end, strides = read_constant(op, 1), read_constant(op, 2), read_constant(op, 3)
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
            run = None
            bounded = (first or begin is not None) and (last or end is not None)
            if not whole and stride == 1 and size is not None and bounded:
                low = 0 if first else _find_position(begin[k], size)  # type: ignore[index]
                high = size if last else _find_position(end[k], size)  # type: ignore[index]
                run = _run(low, high - low, size)
            found.append(_Entry(k, source, result, whole, stride if whole else 1, run))
            source, result = source + 1, result + 1
    if not seen_ellipsis:
        for _ in range(len(shape) - source):
            found.append(_Entry(None, source, result, True))
            source, result = source + 1, result + 1
    return found


def _find_position(bound: int, size: int) -> int:
    return min(max(bound + size if bound < 0 else bound, 0), size)


def _is_start(begin: int, size: int | None) -> bool:
    return begin == 0 or (size is not None and begin <= -size)


def _write_strided_terms(op: OpView, shape: Dims | None) -> tuple[str, str] | None:
    """Writes the terms of (the sliced tensor, the slice); None if they are unknown."""
    entries = None if shape is None else _read_entries(op, shape)
    if entries is None:
        return None
    left, right = [], []
    for e in entries:
        before, after = e.labels()
        if e.source is not None:
            left.append(before)
        if e.result is not None:
            right.append("1" if e.source is None else after)
    return write_term(left), write_term(right)


def strided_slice(op: OpView) -> str:
    """Writes the sharding rule of StridedSlice, from its masks and bounds."""
    terms = _write_strided_terms(op, op.inputs[0].shape)
    return REPLICATED if terms is None else f"{terms[0]}, ., ., . -> {terms[1]}"


def strided_slice_grad(op: OpView) -> str:
    """Writes the sharding rule of StridedSliceGrad, from its masks and bounds."""
    terms = _write_strided_terms(op, op.outputs[0].shape)
    return REPLICATED if terms is None else f"[out0], ., ., ., {terms[1]} -> {terms[0]}"


def strided_slice_update(op: OpView) -> str:
    """Writes the sharding rule of TensorStridedSliceUpdate, from its masks and bounds."""
    terms = _write_strided_terms(op, op.inputs[0].shape)
    return REPLICATED if terms is None else f"{terms[0]}, ., ., ., {terms[1]} -> {terms[0]}"


def _set_bounds(op: OpView, shape: Dims | None, placement: object, coordinate: int) -> Local:
    """Sets the unmasked bounds of a strided slice along the sharded dimension to local ones."""
    if not isinstance(placement, Shard) or shape is None:
        return UNCHANGED
    entry = next(e for e in _read_entries(op, shape) or () if e.source == placement.dim)
    if entry.entry is None:
        return UNCHANGED
    bounds = entry.run.local(placement, coordinate) if entry.run else (0, placement.local_size(coordinate))
    consts: dict[int, np.ndarray] = {}
    for operand, mask, value in ((1, "begin_mask", bounds[0]), (2, "end_mask", bounds[1])):
        given = read_constant(op, operand)
        if given is not None and not int(op.attr(mask, 0)) >> entry.entry & 1:
            given[entry.entry] = value
            consts[operand] = np.array(given, find_numpy_dtype(op.inputs[operand].dtype))
    return Local(consts=consts)


def _set_slice_bounds(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    return _set_bounds(op, op.inputs[0].shape, strategy.inputs[0], coordinate)


def _set_grad_bounds(op: OpView, strategy: Strategy, coordinate: int) -> Local:
    return _set_bounds(op, op.outputs[0].shape, strategy.outputs[0], coordinate)


def pad(op: OpView) -> str:
    """Writes the sharding rule of Pad: dimensions that are not padded can be sharded."""
    before, after = op.inputs[0].shape, op.outputs[0].shape
    given = read_constant(op, 1)
    if before is None:
        return REPLICATED
    if given is not None:
        left = [f"a{n}" if given[2 * n] == given[2 * n + 1] == 0 else f"a{n}^" for n in range(len(before))]
    else:
        left = _label_kept_dims(before, after) or []
        if not left and before:
            return REPLICATED
    more = ", ." * (len(op.inputs) - 1)
    return f"{write_term(left)}{more} -> {_write_result_term(left)}"


def reverse(op: OpView) -> str:
    """Writes the sharding rule of Reverse: dimensions that are not reversed can be sharded."""
    before, axes = op.inputs[0].shape, read_constant(op, 1)
    if before is None or axes is None:
        return REPLICATED
    if op.node.op == "Reverse":
        axes = [n for n, flag in enumerate(axes) if flag]
    labels = write_term(freeze(make_labels("a", len(before)), [a % max(len(before), 1) for a in axes]))
    return f"{labels}, . -> {labels}"


def roll(op: OpView) -> str:
    """Writes the sharding rule of Roll: dimensions that are not rolled can be sharded."""
    before, axes = op.inputs[0].shape, read_constant(op, 2)
    if before is None or axes is None:
        return REPLICATED
    labels = write_term(freeze(make_labels("a", len(before)), [a % max(len(before), 1) for a in axes]))
    return f"{labels}, ., . -> {labels}"


def reverse_sequence(op: OpView) -> str:
    """Writes the sharding rule of ReverseSequence: all dimensions but ``seq_dim`` can be sharded."""
    before = op.inputs[0].shape
    if before is None:
        return REPLICATED
    rank = len(before)
    batch = int(op.attr("batch_dim", 0)) % rank
    labels = freeze(make_labels("a", rank), [int(op.attr("seq_dim", 0)) % rank])
    return f"{write_term(labels)}, a{batch} -> {write_term(labels)}"


def space_and_depth(op: OpView) -> str:
    """Writes the sharding rule of SpaceToDepth and DepthToSpace, from ``data_format`` and ``block_size``."""
    if str(op.attr("data_format", "NHWC")) != "NHWC":
        return "b p*^ -> b q*^"
    block = int(op.attr("block_size"))
    fine, coarse = f"b (h {block}) (w {block}) c^", "b h w d^"
    return f"{fine} -> {coarse}" if op.node.op == "SpaceToDepth" else f"{coarse} -> {fine}"


def _write_block_batch_terms(op: OpView, batch: int) -> tuple[str, str] | None:
    """Writes the terms of (the side with the plain batch, the side whose batch has one run per position in a block).

    Spatial dimensions without padding or cropping can be sharded in multiples of the block. None: sizes are unknown.

    Args:
      batch: 0 if the operand has the plain batch (SpaceToBatch), 1 if the result has it (BatchToSpace).
    """
    before, after, margins = op.inputs[0].shape, op.outputs[0].shape, read_constant(op, len(op.inputs) - 1)
    size = op.attr("block_size")
    block = [int(size)] * 2 if size is not None else read_constant(op, 1)
    rank = 2 if size is not None else op.inputs[1].shape[0] if op.inputs[1].shape else None
    if before is None or after is None or rank is None:
        return None
    small, large = (after, before) if batch else (before, after)
    runs = math.prod(block) if block is not None else None
    if runs is None and small[0] and large[0] is not None:
        runs = large[0] // small[0]
    if runs is None:
        return None
    channels = [f"c{n}" for n in range(len(small) - 1 - rank)]
    fine, coarse = [f"x{n}^" for n in range(rank)], [f"y{n}^" for n in range(rank)]
    for n in range(rank):
        if block is not None and margins is not None and margins[2 * n] == margins[2 * n + 1] == 0:
            fine[n], coarse[n] = write_runs(block[n], f"s{n}", inner=True), f"s{n}"
    return write_term(["n", *fine, *channels]), write_term([write_runs(runs, "n"), *coarse, *channels])


def space_to_batch(op: OpView) -> str:
    """Writes the sharding rule of SpaceToBatch, whose result's batch has one run per position in a block."""
    found = _write_block_batch_terms(op, 0)
    return REPLICATED if found is None else f"{found[0]}{', .' * (len(op.inputs) - 1)} -> {found[1]}"


def batch_to_space(op: OpView) -> str:
    """Writes the sharding rule of BatchToSpace, whose operand's batch has one run per position in a block."""
    found = _write_block_batch_terms(op, 1)
    return REPLICATED if found is None else f"{found[1]}{', .' * (len(op.inputs) - 1)} -> {found[0]}"


RULES = (
    rule("Slice", slice_op, copy="0", local=_set_local_slice_bounds),
    rule("StridedSlice", strided_slice, copy="0", local=_set_slice_bounds),
    rule("StridedSliceGrad", strided_slice_grad, lin="4", local=_set_grad_bounds),
    rule("TensorStridedSliceUpdate", strided_slice_update, copy="0&4", local=_set_slice_bounds),
    rule("Pad", pad, lin="0"),
    rule("PadV2", pad, copy="0&2"),
    rule("MirrorPad", pad, copy="0"),
    rule("MirrorPadGrad", pad, lin="0"),
    rule("ReverseV2 Reverse", reverse, copy="0"),
    rule("Roll", roll, copy="0"),
    rule("ReverseSequence", reverse_sequence, copy="0"),
    rule("SpaceToDepth DepthToSpace", space_and_depth, copy="0"),
    rule("SpaceToBatchND SpaceToBatch", space_to_batch, lin="0"),
    rule("BatchToSpaceND BatchToSpace", batch_to_space, copy="0"),
)
