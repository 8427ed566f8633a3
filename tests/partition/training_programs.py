"""Random training steps: 20 forward ops or more over a batch and weights, the gradients of their loss, and updates.

Everything follows from a seed, so that a failing program is named by a number. ``_Tape`` differentiates in reverse, as
TensorFlow does: gradients of the ops, added up where a tensor is read twice.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np

from tests.programs import Builder
from whale.ir.program import Program, Ref

ROWS = 12
_WIDTHS = (2, 3, 4, 5, 6, 8)
Pull = Callable[[Ref], Sequence[tuple[Ref, Ref]]]  # gradient of a result -> (operand, its gradient)


class _Tape:
    """Emits ops and remembers how each gradient goes back."""

    def __init__(self, b: Builder):
        self.b = b
        self.pulls: list[tuple[Ref, str, Pull]] = []

    def note(self, result: Ref, pull: Pull) -> Ref:
        self.pulls.append((result, self.b.scope, pull))
        return result

    def shape(self, ref: Ref) -> tuple[int, ...]:
        return self.b.types[ref].shape  # type: ignore[return-value]

    # -- ops

    def matmul(self, x: Ref, w: Ref) -> Ref:
        b = self.b
        return self.note(b.matmul(x, w), lambda d: ((x, b.matmul(d, w, b=True)), (w, b.matmul(x, d, a=True))))

    def matmul_transposed(self, x: Ref, w: Ref) -> Ref:
        b = self.b
        return self.note(b.matmul(x, w, b=True), lambda d: ((x, b.matmul(d, w)), (w, b.matmul(d, x, a=True))))

    def batch_matmul(self, x: Ref, y: Ref) -> Ref:
        """``x`` times ``y`` transposed, in their last two dimensions."""
        op = self.b.op
        return self.note(
            op("BatchMatMulV2", x, y, adj_y=True),
            lambda d: ((x, op("BatchMatMulV2", d, y)), (y, op("BatchMatMulV2", d, x, adj_x=True))),
        )

    def bias(self, x: Ref, v: Ref) -> Ref:
        b = self.b
        return self.note(b.op("BiasAdd", x, v), lambda d: ((x, d), (v, b.op("BiasAddGrad", d))))

    def add(self, x: Ref, y: Ref) -> Ref:
        return self.note(self.b.op("AddV2", x, y), lambda d: ((x, self._like(d, x)), (y, self._like(d, y))))

    def sub(self, x: Ref, y: Ref) -> Ref:
        b = self.b
        return self.note(b.op("Sub", x, y), lambda d: ((x, self._like(d, x)), (y, self._like(b.op("Neg", d), y))))

    def mul(self, x: Ref, y: Ref) -> Ref:
        op = self.b.op
        return self.note(
            op("Mul", x, y), lambda d: ((x, self._like(op("Mul", d, y), x)), (y, self._like(op("Mul", d, x), y)))
        )

    def scale(self, x: Ref, factor: float) -> Ref:
        op, number = self.b.op, self.b.const(factor)
        return self.note(op("Mul", x, number), lambda d: ((x, op("Mul", d, number)),))

    def tanh(self, x: Ref) -> Ref:
        y = self.b.op("Tanh", x)
        return self.note(y, lambda d: ((x, self.b.op("TanhGrad", y, d)),))

    def relu(self, x: Ref) -> Ref:
        moved = self.b.op("AddV2", x, self.b.const(0.37))  # not near its bend where sums cancel
        return self.note(self.b.op("Relu", moved), lambda d: ((x, self.b.op("ReluGrad", d, moved)),))

    def square(self, x: Ref) -> Ref:
        op, two = self.b.op, self.b.const(2.0)
        return self.note(op("Square", x), lambda d: ((x, op("Mul", d, op("Mul", two, x))),))

    def softmax(self, x: Ref) -> Ref:
        b, y = self.b, self.b.op("Softmax", x)
        last = len(self.shape(x)) - 1

        def pull(d: Ref) -> Sequence[tuple[Ref, Ref]]:
            mean = b.reduce("Sum", b.op("Mul", d, y), last, keep=True)
            return ((x, b.op("Mul", b.op("Sub", d, mean), y)),)

        return self.note(y, pull)

    def reduce(self, op: str, x: Ref, axes: Sequence[int], keep: bool) -> Ref:
        b, shape = self.b, self.shape(x)
        kept = [1 if d in axes else n for d, n in enumerate(shape)]
        count = math.prod(shape[d] for d in axes)

        def pull(d: Ref) -> Sequence[tuple[Ref, Ref]]:
            wide = b.op("BroadcastTo", b.reshape(d, *kept), b.ints(*shape))
            return ((x, wide if op == "Sum" else b.op("RealDiv", wide, b.const(float(count)))),)

        return self.note(b.reduce(op, x, *axes, keep=keep), pull)

    def reshape(self, x: Ref, *shape: int) -> Ref:
        b, before = self.b, self.shape(x)
        return self.note(b.reshape(x, *shape), lambda d: ((x, b.reshape(d, *before)),))

    def transpose(self, x: Ref, *order: int) -> Ref:
        b, back = self.b, [order.index(d) for d in range(len(order))]
        return self.note(b.transpose(x, *order), lambda d: ((x, b.transpose(d, *back)),))

    def concat(self, axis: int, x: Ref, y: Ref) -> Ref:
        b = self.b

        def pull(d: Ref) -> Sequence[tuple[Ref, Ref]]:
            begin = [0] * len(self.shape(x))
            first = b.op("Slice", d, b.ints(*begin), b.ints(*self.shape(x)))
            begin[axis] = self.shape(x)[axis]
            return ((x, first), (y, b.op("Slice", d, b.ints(*begin), b.ints(*self.shape(y)))))

        return self.note(b.concat(axis, x, y), pull)

    def slice(self, x: Ref, begin: Sequence[int], size: Sequence[int]) -> Ref:
        b, shape = self.b, self.shape(x)
        margins = [[at, n - at - m] for at, m, n in zip(begin, size, shape)]
        return self.note(
            b.op("Slice", x, b.ints(*begin), b.ints(*size)),
            lambda d: ((x, b.op("PadV2", d, b.const(margins, "int32"), b.const(0.0))),),
        )

    def lookup(self, table: Ref, ids: Ref) -> Ref:
        b, zero = self.b, self.b.const(0, "int32")
        count = b.const(self.shape(table)[0], "int32")
        return self.note(
            b.op("GatherV2", table, ids, zero), lambda d: ((table, b.op("UnsortedSegmentSum", d, ids, count)),)
        )

    def cross_entropy(self, logits: Ref, labels: Ref) -> Ref:
        b = self.b
        loss = b.op("SparseSoftmaxCrossEntropyWithLogits", logits, labels)
        back = Ref(loss.node, 1)
        return self.note(loss, lambda d: ((logits, b.op("Mul", back, b.op("ExpandDims", d, b.const(1, "int32")))),))

    def _like(self, d: Ref, x: Ref) -> Ref:
        """A gradient summed over the dimensions along which ``x`` was broadcast."""
        have, want = self.shape(d), self.shape(x)
        if have == want:
            return d
        lead = len(have) - len(want)
        axes = [n for n in range(len(have)) if n < lead or want[n - lead] != have[n]]
        return self.b.reshape(self.b.reduce("Sum", d, *axes), *want)

    # -- backward

    def gradients(self, loss: Ref) -> dict[Ref, Ref]:
        """The gradient of every tensor that ``loss`` depends on; each op's are in the scope of the op."""
        parts: dict[Ref, list[Ref]] = {loss: [self.b.const(1.0)]}
        found: dict[Ref, Ref] = {}
        for result, scope, pull in reversed(self.pulls):
            if result in parts:
                self.b.scope = scope
                found[result] = self._sum(parts[result])
                for operand, d in pull(found[result]):
                    parts.setdefault(operand, []).append(d)
        return {**{ref: self._sum(p) for ref, p in parts.items() if ref not in found}, **found}

    def _sum(self, parts: Sequence[Ref]) -> Ref:
        return parts[0] if len(parts) == 1 else self.b.op("AddN", *parts, N=len(parts))


class _Grower:
    """Grows a step layer by layer."""

    def __init__(self, seed: int, scoped: bool):
        self.draw, self.scoped = random.Random(seed), scoped
        self.b = Builder(f"step_{seed}")
        self.tape = _Tape(self.b)
        self.ops = 0
        self.weights: dict[Ref, Ref] = {}  # what was read -> its handle
        self.pool: list[Ref] = []

    def weight(self, *shape: int) -> Ref:
        handle = self.b.variable(f"w{len(self.weights)}", shape)
        read = self.b.read(handle, name=f"{handle.node}/read")
        self.weights[read] = handle
        return read

    def pick(self) -> Ref:
        return self.draw.choice(self.pool[-4:])

    def layer(self) -> None:
        if self.scoped:
            self.b.scope = self.draw.choice(["", "split_0", "split_0", "replica_0/split_1"])
        made = self.draw.choice(
            [self.dense, self.dense, self.dense, self.residual, self.gated, self.attention, self.norm, self.joined,
             self.moved, self.turned, self.halves, self.pooled, self.table, self.again]
        )(self.pick())  # fmt: skip
        self.pool.append(made)

    # Each takes rows [batch, width], or [n, width], and gives such rows.

    def dense(self, x: Ref) -> Ref:
        t, (_, inner) = self.tape, self.tape.shape(x)
        width = self.draw.choice(_WIDTHS)
        y = t.matmul(x, self.weight(inner, width)) if self.draw.random() < 0.7 else t.matmul_transposed(
            x, self.weight(width, inner)
        )  # fmt: skip
        y = t.bias(t.scale(y, inner**-0.5), self.weight(width))
        return self.draw.choice([t.tanh, t.relu, t.softmax, lambda z: z])(y)

    def residual(self, x: Ref) -> Ref:
        t, (_, width) = self.tape, self.tape.shape(x)
        inner = self.draw.choice(_WIDTHS)
        h = t.tanh(t.matmul(x, self.weight(width, inner)))
        return t.add(x, t.scale(t.matmul(h, self.weight(inner, width)), 0.3))

    def gated(self, x: Ref) -> Ref:
        t, (_, width) = self.tape, self.tape.shape(x)
        return t.mul(x, t.softmax(t.matmul(x, self.weight(width, width))))

    def attention(self, x: Ref) -> Ref:
        """Heads over the rows' own elements: [n, heads * size] -> [n, heads, size], and scores between heads."""
        t, (n, width) = self.tape, self.tape.shape(x)
        heads, size = self.draw.choice([2, 3, 4]), self.draw.choice([2, 3])
        parts = [t.reshape(t.matmul(x, self.weight(width, heads * size)), n, heads, size) for _ in range(2)]
        scores = t.softmax(t.batch_matmul(*parts))
        mixed = t.batch_matmul(scores, t.transpose(parts[0], 0, 2, 1))
        return t.reshape(mixed, n, heads * size)

    def norm(self, x: Ref) -> Ref:
        t, (_, width) = self.tape, self.tape.shape(x)
        axis = self.draw.choice([0, 1, 1])
        centred = t.sub(x, t.reduce("Mean", x, [axis], True))
        return t.add(t.mul(centred, self.weight(width)), self.weight(width))

    def joined(self, x: Ref) -> Ref:
        t = self.tape
        y = next((r for r in reversed(self.pool) if t.shape(r)[0] == t.shape(x)[0]), x)
        both = t.concat(1, x, y)
        return self.dense(both) if t.shape(both)[1] > 16 else both

    def moved(self, x: Ref) -> Ref:
        t, (n, width) = self.tape, self.tape.shape(x)
        w = self.weight(width, n)
        return t.add(x, t.scale(t.transpose(w, 1, 0), 0.1))

    def turned(self, x: Ref) -> Ref:
        t, (n, width) = self.tape, self.tape.shape(x)
        a, b = self.draw.choice([2, 3, 4]), self.draw.choice([2, 3])
        y = t.transpose(t.reshape(t.matmul(x, self.weight(width, a * b)), n, a, b), 1, 2, 0)
        return t.reshape(t.transpose(t.mul(t.tanh(y), self.weight(b, 1)), 2, 0, 1), n, a * b)

    def halves(self, x: Ref) -> Ref:
        t, (n, width) = self.tape, self.tape.shape(x)
        if width < 3:
            return t.square(x)
        at = self.draw.randint(1, width - 1)
        return t.slice(x, (0, at), (n, width - at)) if self.draw.random() < 0.5 else t.slice(x, (0, 0), (n, at))

    def pooled(self, x: Ref) -> Ref:
        t = self.tape
        return t.mul(x, t.reduce(self.draw.choice(["Sum", "Mean"]), t.tanh(x), [self.draw.randint(0, 1)], True))

    def table(self, x: Ref) -> Ref:
        t, (n, width) = self.tape, self.tape.shape(x)
        words = self.draw.choice([4, 6, 9])
        ids = self.b.const([self.draw.randrange(words) for _ in range(n)], "int32")
        return t.add(x, t.lookup(self.weight(words, width), ids))

    def again(self, x: Ref) -> Ref:
        """A weight that is used twice."""
        t, (_, width) = self.tape, self.tape.shape(x)
        w = self.weight(width, width)
        return t.matmul(t.tanh(t.matmul(x, w)), w)

    def loss(self) -> Ref:
        t, x = self.tape, self.pool[-1]
        if self.scoped:
            self.b.scope = self.draw.choice(["", "split_0"])
        n, width = t.shape(x)
        if self.draw.random() < 0.5 and width > 1:
            labels = self.b.const([self.draw.randrange(width) for _ in range(n)], "int32")
            return t.reduce("Mean", t.cross_entropy(x, labels), [0], False)
        return t.reduce("Mean", t.square(x), [0, 1], False)

    def build(self, least: int) -> Program:
        b = self.b
        inputs = [b.input(f"in{i}", (ROWS, self.draw.choice(_WIDTHS))) for i in range(self.draw.randint(1, 2))]
        self.pool = list(inputs)
        while len(self.tape.pulls) < least:
            self.layer()
        loss = self.loss()
        gradients = self.tape.gradients(loss)
        updates = []
        for read, handle in self.weights.items():
            b.scope = next(v.scope for v in b.variables if v.node == handle.node)
            if read in gradients:
                rate = b.const(0.1)
                updates.append(
                    b.update("ResourceApplyGradientDescent", handle, rate, gradients[read], controls=[read.node])
                )
        fetched = [loss, *(gradients[r] for r in inputs if r in gradients)]
        return b.build(fetched, updates)


def training_step(seed: int, scoped: bool = False, least: int = 20) -> Program:
    """A step of ``least`` differentiable forward ops or more.

    Args:
      scoped: layers stand under split scopes, or not, at random.
    """
    with np.errstate(all="ignore"):
        return _Grower(seed, scoped).build(least)
