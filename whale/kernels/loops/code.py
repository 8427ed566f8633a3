"""Writes what an iteration of a loop computes as the text of the op WhaleLoop (whale_ops/core/compute/loop_program.h).

``TurnCode`` collects the instructions of one iteration ("turn"). Their operands are *views*: parts of buffers, with
strides. Buffers are the slices of tensors that iterations read, tensors that are the same in each, the loop's states,
stacked results, and temporaries.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from whale.ir.ops import IDENTITIES
from whale.ir.program import Node, Program, Ref
from whale.ir.values import TensorType
from whale.kernels.loops.turns import NotFollowed, find_root, require_sizes

# Loops with larger products are not replaced: TensorFlow's kernels work in blocks on what does not fit into a cache.
MOST_ROWS, MOST_PRODUCTS = 256, 1 << 26
# Letters of buffers: an iteration's slice of a tensor, a tensor that is the same in each, a state before and after the
# iteration, a result of which all iterations are kept, a temporary; and a number in the text.
SLICE, SAME, STATE, NEXT, STACKED, TEMPORARY, NUMBER = "x", "w", "s", "n", "y", "t", "="

_UNARY = {
    **{name: name for name in "Neg Abs Sign Square Sqrt Rsqrt Reciprocal Exp Log Log1p Tanh Sigmoid".split()},
    **{name: name for name in "Relu Relu6 Elu Softplus".split()},
    **dict.fromkeys(IDENTITIES, "Copy"),
    "Inv": "Reciprocal",
    "LogicalNot": "Not",
}
_BINARY = {
    **{name: name for name in "Sub Mul SquaredDifference TanhGrad SigmoidGrad SqrtGrad RsqrtGrad".split()},
    **{name: name for name in "ReciprocalGrad ReluGrad Relu6Grad EluGrad SoftplusGrad Less LessEqual".split()},
    **{name: name for name in "Equal NotEqual".split()},
    "Add": "Add",
    "AddV2": "Add",
    "BiasAdd": "Add",
    "RealDiv": "Div",
    "Maximum": "Max",
    "Minimum": "Min",
    "InvGrad": "ReciprocalGrad",
    "LogicalAnd": "And",
    "LogicalOr": "Or",
}
_TURNED = {"Greater": "Less", "GreaterEqual": "LessEqual"}  # written with the operands swapped
_VIEWS = frozenset(
    "Reshape ExpandDims Squeeze Transpose Split SplitV Slice StridedSlice Tile BroadcastTo Unpack".split()
)
SUPPORTED = (
    _UNARY.keys()
    | _BINARY.keys()
    | _TURNED.keys()
    | _VIEWS
    | frozenset(
        """AddN Select SelectV2 Cast ConcatV2 Pack Sum Mean BiasAddGrad MatMul ZerosLike Fill Const StridedSliceGrad
        Pad""".split()
    )
)
_FUNCTIONS = frozenset("Sqrt Rsqrt Exp Log Log1p Tanh Sigmoid Elu Softplus SoftplusGrad".split())
_FUNCTION_FLOPS = 20  # as cost_model counts them


@dataclass(frozen=True, slots=True)
class View:
    """Represents a tensor within a buffer.

    Attributes:
      buffer: the letter of the buffer's kind: x (slice of an iteration), w (same in each), s (state), n (next state), y
        (stacked result), t (temporary), = (a number in the text).
      number: number of the buffer among those of its kind.
      shape: the tensor's shape.
      strides: for each dimension, the distance in elements from one index to the next; 0 repeats.
      first: the element of the buffer at which the tensor begins.
      value: the number, if ``buffer`` is "=".
    """

    buffer: str
    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first: int = 0
    value: float = 0.0

    @property
    def is_dense(self) -> bool:
        """Returns True if the elements are contiguous, in row-major order."""
        return all(n == 1 or s == own for n, s, own in zip(self.shape, self.strides, find_strides(self.shape)))

    def broadcast(self, shape: tuple[int, ...]) -> View:
        """Returns the view broadcast to a larger shape.

        Raises:
          NotFollowed: the shapes do not broadcast.
        """
        more = len(shape) - len(self.shape)
        own = (1,) * more + self.shape
        if more < 0 or any(a not in (1, b) for a, b in zip(own, shape)):
            raise NotFollowed(f"a tensor of shape {self.shape} cannot be broadcast to the shape {shape}")
        strides = (0,) * more + self.strides
        return replace(self, shape=shape, strides=tuple([s if a == b else 0 for s, a, b in zip(strides, own, shape)]))

    def as_matrix(self) -> tuple[int, int]:
        """Returns the distances in elements from row to row and from column to column, with all first dimensions as
        rows and the last one as columns.

        Raises:
          NotFollowed: rows are not at equal distances.
        """
        if self.buffer == NUMBER or not self.shape:
            return 0, 0
        sizes = [(n, s) for n, s in zip(self.shape[:-1], self.strides[:-1]) if n != 1]
        for (_, outer), (n, inner) in itertools.pairwise(sizes):
            if outer != n * inner:
                raise NotFollowed("the rows of a tensor are not at equal distances in memory")
        return (sizes[-1][1] if sizes else 0), (self.strides[-1] if self.shape[-1] != 1 else 0)

    def write(self) -> str:
        """Returns the view as text, such as "x0+0:64:1" (buffer, first element, distances of rows and columns)."""
        if self.buffer == NUMBER:
            return f"={self.value!r}"
        row, column = self.as_matrix()
        return f"{self.buffer}{self.number}+{self.first}:{row}:{column}"


def find_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a tensor whose elements are contiguous."""
    return tuple([prod(shape[i + 1 :]) for i in range(len(shape))])


def make_view(buffer: str, number: int, t: TensorType) -> View:
    """Returns the view of a whole buffer that holds a tensor of type ``t``."""
    shape = require_sizes(t)
    return View(buffer, number, shape, find_strides(shape))


@dataclass(frozen=True, slots=True)
class _Step:
    """Represents an instruction.

    Attributes:
      op: its name in the text.
      to: the result.
      operands: the operands.
      shape: shape of the elements that it goes over: of the result, or of what it sums.
      summed: inner size of a matrix product; 0 for others.
    """

    op: str
    to: View
    operands: tuple[View, ...]
    shape: tuple[int, ...]
    summed: int = 0

    @property
    def sides(self) -> tuple[int, int]:
        """Returns (rows, columns) of the elements that the instruction goes over."""
        return prod(self.shape[:-1]), self.shape[-1] if self.shape else 1

    @property
    def is_elementwise(self) -> bool:
        return self.op not in ("MatMul", "SumRows", "SumColumns")

    @property
    def flops(self) -> int:
        each = 2 * self.summed if self.op == "MatMul" else _FUNCTION_FLOPS if self.op in _FUNCTIONS else 1
        return each * prod(self.shape)


@dataclass
class TurnCode:
    """Collects the instructions of one iteration.

    Attributes:
      body: the loop's body.
      find_view: returns the view of a tensor that is there before the iteration; None: the iteration computes it.
      steps: the instructions so far.
      views: tensors of the body that are known or were computed.
      temporaries: number of temporaries so far.
    """

    body: Program
    find_view: Callable[[Ref], View | None]
    steps: list[_Step] = field(default_factory=list)
    views: dict[Ref, View] = field(default_factory=dict)
    temporaries: int = 0

    def view(self, ref: Ref) -> View:
        """Returns the view of a tensor of the body that is given, or was computed before.

        Raises:
          NotFollowed: it is neither.
        """
        ref = find_root(self.body, ref)
        if ref not in self.views:
            found = self.find_view(ref)
            if found is None:
                raise NotFollowed(
                    f"the loop reads a result of {self.body.by_name[ref.node].op} that no iteration computes"
                )
            self.views[ref] = found
        return self.views[ref]

    def new(self, shape: tuple[int, ...]) -> View:
        """Returns the view of a new temporary."""
        self.temporaries += 1
        return View(TEMPORARY, self.temporaries - 1, shape, find_strides(shape))

    def add(self, op: str, to: View, *operands: View, shape: tuple[int, ...] | None = None, summed: int = 0) -> View:
        """Adds an instruction and returns its result, ``to``."""
        self.steps.append(_Step(op, to, operands, to.shape if shape is None else shape, summed))
        return to

    def compute(self, node: Node, to: View | None) -> None:
        """Adds the instructions that compute a node.

        Args:
          to: where the node's only result is written; None: to a temporary, or nowhere if it is a view of an operand.

        Raises:
          NotFollowed: there are no instructions for the node.
        """
        shape = require_sizes(node.outputs[0])
        if 0 in shape:
            raise NotFollowed("an iteration of the loop computes a tensor without elements")
        if node.op in _VIEWS or node.op in IDENTITIES or (node.op == "Cast" and to is None):
            for i, view in enumerate(self._views_of(node)):
                self.views[Ref(node.name, i)] = view
            if to is not None:
                self.views[Ref(node.name)] = self.add("Copy", to, self.views[Ref(node.name)])
            return
        self.views[Ref(node.name)] = self._result(node, shape, to or self.new(shape))

    def _result(self, node: Node, shape: tuple[int, ...], to: View) -> View:
        op = node.op
        if op == "MatMul":
            return self._multiply(node, to)
        if op in ("ConcatV2", "Pack"):
            return self._join(node, to)
        if op in ("Sum", "Mean", "BiasAddGrad"):
            return self._sum(node, to)
        if op in ("ZerosLike", "Fill"):
            value = self.body.const(node.inputs[1]) if op == "Fill" else np.zeros(())
            if value is None:
                raise NotFollowed("the value of a Fill in the loop is not constant")
            return self.add("Copy", to, make_number(float(value)))
        if op in ("StridedSliceGrad", "Pad"):
            return self._fill_around(node, to)
        operands = [self.view(ref) for ref in node.inputs]
        if op == "AddN":
            total = operands[0]
            for one in operands[1:]:
                total = self.add("Add", to, total, one)
            return total if total is to else self.add("Copy", to, total)
        if op == "Select" and len(operands[0].shape) < len(shape):  # the condition is a vector, one element per row
            rows = operands[0]
            extra = len(shape) - len(rows.shape)
            operands[0] = replace(rows, shape=rows.shape + (1,) * extra, strides=rows.strides + (0,) * extra)
        if op in ("Select", "SelectV2"):
            code = "Select"
        elif op in _TURNED:
            code, operands = _TURNED[op], operands[::-1]
        elif op == "Cast":
            code = "Copy"
        else:
            code = _UNARY.get(op) or _BINARY.get(op) or ""
        if not code:
            raise NotFollowed(f"WhaleLoop has no instruction for the op {op}")
        return self.add(code, to, *[one if one.buffer == NUMBER else one.broadcast(shape) for one in operands])

    def _multiply(self, node: Node, to: View) -> View:
        left, right = (self.view(ref) for ref in node.inputs)
        if NUMBER in (left.buffer, right.buffer):
            raise NotFollowed(
                "an operand of a MatMul in the loop is a constant number, and WhaleLoop multiplies only tensors"
            )
        if node.attrs.get("transpose_a"):
            left = _transposed(left)
        if node.attrs.get("transpose_b"):
            right = _transposed(right)
        if left.shape[0] > MOST_ROWS and left.shape[0] * prod(right.shape) > MOST_PRODUCTS:
            raise NotFollowed("the loop has a matrix product so large that WhaleLoop would save no time")
        return self.add("MatMul", to, left, right, summed=left.shape[1])

    def _join(self, node: Node, to: View) -> View:
        if node.op == "Pack":
            axis = int(node.attrs.get("axis", 0)) % len(to.shape)
            parts = [_expand(self.view(ref), axis) for ref in node.inputs]
        else:
            found = self.body.const(node.inputs[-1])
            if found is None:
                raise NotFollowed("the axis of a ConcatV2 in the loop is not constant")
            axis = int(found) % len(to.shape)
            parts = [self.view(ref) for ref in node.inputs[:-1]]
        at = 0
        for part in parts:
            if part.buffer == NUMBER:
                raise NotFollowed(
                    f"an operand of {node.op} in the loop is a constant number, and WhaleLoop joins only tensors"
                )
            sizes = tuple([n if i != axis else part.shape[axis] for i, n in enumerate(to.shape)])
            self.add("Copy", replace(to, shape=sizes, first=to.first + at * to.strides[axis]), part)
            at += part.shape[axis]
        return to

    def _fill_around(self, node: Node, to: View) -> View:
        """Adds instructions that write zeros to ``to`` and an operand to a part of it (Pad, gradient of a strided
        slice).
        """
        if node.op == "Pad":
            before = [int(one) for one, _ in self._constant(node, 1)]
            given = self.view(node.inputs[0])
            part = replace(to, shape=given.shape, first=sum(n * s for n, s in zip(before, to.strides)))
        else:
            given = self.view(node.inputs[4])
            part = self._strided(node, to, given.shape)
        if part.strides and part.strides[-1] not in (0, 1):
            raise NotFollowed(
                f"{node.op} would write the last dimension of its operand to a result that is not contiguous there"
            )
        self.add("Copy", to, make_number(0.0))
        self.add("Copy", part, given)
        return to

    def _sum(self, node: Node, to: View) -> View:
        given = self.view(node.inputs[0])
        rank = len(given.shape)
        if node.op == "BiasAddGrad":
            if node.attrs.get("data_format", "NHWC") != "NHWC":
                raise NotFollowed("WhaleLoop does not support a BiasAddGrad with channels first (NCHW)")
            axes = list(range(rank - 1))
        else:
            found = self.body.const(node.inputs[1])
            if found is None:
                raise NotFollowed(f"the axes of {node.op} in the loop are not constant")
            axes = sorted({int(axis) % rank for axis in found.reshape(-1)}) if rank else []
        wide = [i for i in axes if given.shape[i] != 1]
        rest = [i for i in range(rank) if given.shape[i] != 1 and i not in wide]
        count = prod(given.shape[i] for i in wide)
        if not wide:
            return self.add("Copy", to, replace(given, shape=to.shape, strides=_strides_of(given, rest, to.shape)))
        if max(rest, default=-1) < min(wide):  # over the last dimensions
            rows, columns = prod(given.shape[i] for i in rest), count
            flat = self._flat(given)
            op, target = "SumColumns", replace(to, shape=(rows, 1), strides=(1, 0))
        elif max(wide) < min(rest):
            rows, columns = count, prod(given.shape[i] for i in rest)
            flat = self._flat(given)
            op, target = "SumRows", replace(to, shape=(1, columns), strides=(columns, 1))
        else:
            raise NotFollowed(f"WhaleLoop cannot compute {node.op} over dimensions {axes} of the shape {given.shape}")
        matrix = replace(flat, shape=(rows, columns), strides=(columns, 1))
        self.add(op, target, matrix, shape=(rows, columns))
        return self.add("Mul", to, to, make_number(1.0 / count)) if node.op == "Mean" else to

    def _flat(self, view: View) -> View:
        """Returns the view itself if its elements are contiguous; else adds an instruction that copies it to a new
        temporary, and returns that.
        """
        if view.buffer == NUMBER:
            raise NotFollowed(
                "an operand of a sum or reshape in the loop is a constant number, and WhaleLoop needs a tensor there"
            )
        return view if view.is_dense else self.add("Copy", self.new(view.shape), view)

    def _views_of(self, node: Node) -> list[View]:
        """Returns the results of a node that only rearranges its operand (reshape, slice, transpose, ..) as views of
        the operand.
        """
        op = node.op
        given = self.view(node.inputs[1 if op == "Split" else 0])
        shapes = [require_sizes(t) for t in node.outputs]
        if given.buffer == NUMBER and op not in IDENTITIES and op != "Cast":
            return [replace(given, shape=shape, strides=(0,) * len(shape)) for shape in shapes]
        if op in IDENTITIES or op == "Cast":
            return [given]
        if op in ("Reshape", "ExpandDims", "Squeeze"):
            if [n for n in given.shape if n != 1] == [n for n in shapes[0] if n != 1]:
                kept = iter([s for n, s in zip(given.shape, given.strides) if n != 1])
                return [
                    replace(given, shape=shapes[0], strides=tuple([0 if n == 1 else next(kept) for n in shapes[0]]))
                ]
            return [replace(self._flat(given), shape=shapes[0], strides=find_strides(shapes[0]))]
        if op in ("Tile", "BroadcastTo"):
            return [given.broadcast(shapes[0])]
        if op == "Transpose":
            order = [int(i) % len(given.shape) for i in self._constant(node, 1)]
            return [replace(given, shape=shapes[0], strides=tuple([given.strides[i] for i in order]))]
        if op in ("Split", "SplitV"):
            axis = int(self._constant(node, 0 if op == "Split" else 2).reshape(())) % len(given.shape)
            found, at = [], given.first
            for shape in shapes:
                found.append(replace(given, shape=shape, first=at))
                at += shape[axis] * given.strides[axis]
            return found
        if op == "Unpack":
            axis = int(node.attrs.get("axis", 0)) % len(given.shape)
            strides = given.strides[:axis] + given.strides[axis + 1 :]
            return [
                replace(given, shape=shape, strides=strides, first=given.first + i * given.strides[axis])
                for i, shape in enumerate(shapes)
            ]
        if op == "Slice":
            begin = [int(i) for i in self._constant(node, 1)]
            first = given.first + sum(i * s for i, s in zip(begin, given.strides))
            return [replace(given, shape=shapes[0], first=first)]
        return [self._strided(node, given, shapes[0])]

    def _strided(self, node: Node, given: View, shape: tuple[int, ...]) -> View:
        begin, _, step = (self._constant(node, i) for i in (1, 2, 3))
        attrs = node.attrs
        if attrs.get("ellipsis_mask") or attrs.get("new_axis_mask") or any(int(i) < 1 for i in step):
            raise NotFollowed(
                "WhaleLoop does not support a StridedSlice with an ellipsis, a new axis or a step below 1"
            )
        first, strides = given.first, []
        for i, (size, stride) in enumerate(zip(given.shape, given.strides)):
            if i >= len(begin):
                strides.append(stride)
                continue
            at = 0 if attrs.get("begin_mask", 0) >> i & 1 else int(begin[i])
            at = at + size if at < 0 else min(at, size)
            first += at * stride
            if not attrs.get("shrink_axis_mask", 0) >> i & 1:
                strides.append(stride * int(step[i]))
        return replace(given, shape=shape, strides=tuple(strides), first=first)

    def _constant(self, node: Node, operand: int) -> np.ndarray:
        found = self.body.const(node.inputs[operand])
        if found is None:
            raise NotFollowed(f"the bounds or axes of {node.op} in the loop are not constant")
        return np.asarray(found)

    def finish(self) -> tuple[tuple[str, ...], int, int]:
        """Returns (lines of the text, FLOPs of one iteration, elements of all temporaries)."""
        steps, elements = _share_temporaries(self.steps)
        lines: list[str] = []
        for block in _find_blocks(steps):
            if len(block) > 1:
                lines.append(f"block {len(block)}")
            lines += [_write(step) for step in block]
        return tuple(lines), sum(step.flops for step in steps), elements


def find_tensors(node: Node) -> tuple[Ref, ...]:
    """Returns the operands of a node whose elements are computed with; the others are sizes, axes and the like."""
    if node.op in ("Fill", "ZerosLike"):
        return ()
    if node.op == "Split":
        return node.inputs[1:]
    if node.op == "StridedSliceGrad":
        return node.inputs[4:]
    if node.op == "ConcatV2":
        return node.inputs[:-1]
    return node.inputs[:1] if node.op in _VIEWS or node.op in ("Sum", "Mean", "Pad") else node.inputs


def make_number(value: float) -> View:
    """Returns an operand that is a number in the text."""
    return View(NUMBER, 0, (), (), 0, value)


def _transposed(view: View) -> View:
    return replace(view, shape=view.shape[::-1], strides=view.strides[::-1])


def _expand(view: View, axis: int) -> View:
    if view.buffer == NUMBER:
        return view
    shape, strides = list(view.shape), list(view.strides)
    shape.insert(axis, 1)
    strides.insert(axis, 0)
    return replace(view, shape=tuple(shape), strides=tuple(strides))


def _strides_of(view: View, dims: Sequence[int], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a view that was reshaped to ``shape`` by only adding, removing or permuting dimensions.

    Args:
      view: the view before the reshape.
      dims: the dimensions of ``view`` larger than 1, in their order in ``shape``.
      shape: the new shape; dimensions of size 1 get the stride 0.
    """
    kept = iter([view.strides[i] for i in dims])
    return tuple([0 if n == 1 else next(kept) for n in shape])


def _write(step: _Step) -> str:
    rows, columns = step.sides
    sizes = (rows, columns, step.summed) if step.op == "MatMul" else (rows, columns)
    to = step.to
    row, column = to.as_matrix()
    if columns == 1 or (step.op != "SumColumns" and column == 0):
        column = 1  # with a single column the distance does not matter
    target = f"{to.buffer}{to.number}+{to.first}:{row}:{column}"
    words = (step.op, target, *[one.write() for one in step.operands], *sizes)
    if step.op != "SumColumns" and column != 1:
        raise NotFollowed("the elements of a row of a result are not contiguous")
    return " ".join(map(str, words))


def _share_temporaries(steps: Sequence[_Step]) -> tuple[list[_Step], int]:
    """Lets temporaries with equal rows and columns that are not alive at the same time share memory; returns the
    renamed steps and the elements of all temporaries.
    """
    last: dict[int, int] = {}
    sizes: dict[int, tuple[int, int]] = {}
    for i, step in enumerate(steps):
        for view in (step.to, *step.operands):
            if view.buffer == TEMPORARY:
                last[view.number] = i
    places: dict[int, int] = {}
    unused: dict[tuple[int, int], list[int]] = {}
    elements: list[int] = []
    found: list[_Step] = []
    for i, step in enumerate(steps):
        for view in (step.to, *step.operands):
            if view.buffer == TEMPORARY and view.number not in places:
                # The first step with a temporary writes it: all of it, or a part of a concatenation with as long rows.
                own = step.sides[0], view.as_matrix()[0] or step.sides[1]
                sizes[view.number] = own
                if unused.get(own):
                    places[view.number] = unused[own].pop()
                else:
                    places[view.number] = len(elements)
                    elements.append(_reach(view))
                at = places[view.number]
                elements[at] = max(elements[at], _reach(view))

        def rename(view: View) -> View:
            return replace(view, number=places[view.number]) if view.buffer == TEMPORARY else view

        found.append(replace(step, to=rename(step.to), operands=tuple(map(rename, step.operands))))
        for number in {v.number for v in (step.to, *step.operands) if v.buffer == TEMPORARY}:
            if last[number] == i:
                unused.setdefault(sizes[number], []).append(places[number])
    return found, sum(elements)


def _reach(view: View) -> int:
    return view.first + sum((n - 1) * s for n, s in zip(view.shape, view.strides)) + 1


def _find_blocks(steps: Sequence[_Step]) -> list[list[_Step]]:
    """Groups consecutive steps that the kernel may run row by row together: what one of them writes, the others touch
    in the same row only.
    """
    blocks: list[list[_Step]] = []
    for step in steps:
        if blocks and _fits(blocks[-1], step):
            blocks[-1].append(step)
        else:
            blocks.append([step])
    return blocks


def _fits(block: Sequence[_Step], step: _Step) -> bool:
    if not step.is_elementwise or not block[0].is_elementwise or step.sides[0] != block[0].sides[0]:
        return False
    if step.sides[0] == 1:
        return True
    together = [*block, step]
    written = {(one.to.buffer, one.to.number) for one in together}
    rows: dict[tuple[str, int], int] = {}
    for one in together:
        columns = one.sides[1]
        for view in (one.to, *one.operands):
            key = view.buffer, view.number
            if view.buffer == NUMBER or key not in written:
                continue
            row, column = view.as_matrix()
            # A row of the view must be within one row of the buffer, with the same row length for all views of it.
            if not row or view.first % row + (columns - 1) * column >= row or view.first >= row:
                return False
            if rows.setdefault(key, row) != row:
                return False
    return True
