"""Random programs over small matrices, random placements of their inputs, and a planner that chooses at random.

The planner of the product takes the cheapest legal strategy, so it visits few of them; the random one takes any whose
operands can be had, which exercises rules, reshards and empty shares that a cost would avoid.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.programs import Builder
from whale.ir.layout import FIRST, P_MAX, P_SUM, B, Placement, shard
from whale.ir.program import Node, Program, Ref
from whale.ir.values import UNMOVABLE, TensorType
from whale.passes.analysis.rank_groups import RankGroups
from whale.passes.propagation.graph_layout import GraphLayout
from whale.passes.propagation.graph_state import Axis, GraphState
from whale.passes.propagation.local_statistics import Semantics
from whale.passes.propagation.node_choice import NodeChoice
from whale.passes.propagation.propagate import Propagation
from whale.passes.propagation.propagate import Strategy as Choice

Draw = Callable[[Any], Any]
_SIZES = (1, 2, 3, 4, 4, 6, 6)


class _Maker:
    """Grows one program, operand by operand."""

    def __init__(self, draw: Draw):
        self.draw, self.b, self.pool = draw, Builder("random"), []
        self.effects: list[str] = []

    def shape(self, ref: Ref) -> tuple[int, ...]:
        return self.b.types[ref].shape  # type: ignore[return-value]

    def pick(self, wanted: Callable[[tuple[int, ...]], bool] = lambda s: True) -> Ref | None:
        fitting = [r for r in reversed(self.pool) if wanted(self.shape(r))]  # the newest first: chains, not bushes
        return fitting[min(self.draw(st.integers(0, 5)), len(fitting) - 1)] if fitting else None

    def pair(self) -> tuple[Ref, Ref]:
        """Two tensors that broadcast."""
        x = self.pick()
        assert x is not None
        y = self.pick(lambda s: _broadcasts(s, self.shape(x)))
        return x, y if y is not None else x

    def unary(self) -> Ref | None:
        op = self.draw(st.sampled_from(["Relu", "Neg", "Tanh", "Identity", "ZerosLike", "Abs"]))
        return self.b.op(op, self.pick())

    def binary(self) -> Ref | None:
        op = self.draw(st.sampled_from(["AddV2", "Sub", "Mul", "Maximum", "Minimum", "AddN", "ReluGrad"]))
        x, y = self.pair()
        if op == "AddN" or op == "ReluGrad":
            y = self.pick(lambda s: s == self.shape(x)) or x
        return self.b.op(op, x, y)

    def scaled(self) -> Ref | None:
        op = self.draw(st.sampled_from(["Mul", "RealDiv", "AddV2"]))
        return self.b.op(op, self.pick(), self.b.const(self.draw(st.sampled_from([-2.0, 0.5, 3.0]))))

    def matmul(self) -> Ref | None:
        x = self.pick(lambda s: len(s) == 2)
        if x is None:
            return None
        a, b = self.draw(st.booleans()), self.draw(st.booleans())
        inner = self.shape(x)[0 if a else 1]
        y = self.pick(lambda s: len(s) == 2 and s[1 if b else 0] == inner)
        return None if y is None else self.b.matmul(x, y, a, b)

    def reduction(self) -> Ref | None:
        op = self.draw(st.sampled_from(["Sum", "Sum", "Mean", "Max", "Min"]))
        x = self.pick(lambda s: len(s) > 0)
        if x is None:
            return None
        axes = self.draw(st.lists(st.integers(0, len(self.shape(x)) - 1), unique=True, min_size=1))
        return self.b.reduce(op, x, *axes, keep=self.draw(st.booleans()))

    def reshape(self) -> Ref | None:
        x = self.pick(lambda s: 0 < len(s))
        if x is None:
            return None
        shape = self.shape(x)
        total = int(np.prod(shape))
        cuts = [(total,), *((n, total // n) for n in range(1, total + 1) if total % n == 0), (1, *shape), (*shape, 1)]
        if len(shape) == 2:
            cuts += [(shape[0], 2, shape[1] // 2)] if shape[1] % 2 == 0 else []
            cuts += [(2, shape[0] // 2, shape[1])] if shape[0] % 2 == 0 else []
        return self.b.reshape(x, *self.draw(st.sampled_from(cuts)))

    def transpose(self) -> Ref | None:
        x = self.pick(lambda s: len(s) >= 2)
        return None if x is None else self.b.transpose(x, *self.draw(st.permutations(range(len(self.shape(x))))))

    def concat(self) -> Ref | None:
        x = self.pick(lambda s: 0 < len(s))
        if x is None:
            return None
        shape, axis = self.shape(x), self.draw(st.integers(0, len(self.shape(x)) - 1))
        y = self.pick(
            lambda s: len(s) == len(shape) and all(m == n or d == axis for d, (m, n) in enumerate(zip(s, shape)))
        )
        return self.b.concat(axis, x, y if y is not None else x)

    def shaped(self) -> Ref | None:
        """Ops whose operands carry shapes, or that make a dimension."""
        op = self.draw(st.sampled_from(["Tile", "BroadcastTo", "Slice", "Pack", "ExpandDims", "Fill"]))
        x = self.pick(lambda s: 0 < len(s))
        if x is None:
            return None
        shape = self.shape(x)
        if op == "Tile":
            return self.b.op(
                op, x, self.b.ints(*self.draw(st.lists(st.integers(1, 2), min_size=len(shape), max_size=len(shape))))
            )
        if op == "BroadcastTo":
            grown = tuple(n if n > 1 else self.draw(st.sampled_from([1, 4])) for n in shape)
            return self.b.op(op, x, self.b.ints(*grown))
        if op == "Slice":
            begin = [self.draw(st.integers(0, n - 1)) for n in shape]
            size = [self.draw(st.sampled_from([-1, n - at])) if at else -1 for at, n in zip(begin, shape)]
            return self.b.op(op, x, self.b.ints(*begin), self.b.ints(*size))
        if op == "Pack":
            return self.b.op(op, x, x, axis=self.draw(st.integers(0, len(shape))), N=2)
        if op == "Fill":
            filled = self.b.op(op, self.b.ints(*shape), self.b.const(0.5))
            return self.b.op("Mul", filled, x)
        return self.b.op(op, x, self.b.const(self.draw(st.integers(0, len(shape))), "int32"))

    def odd(self) -> Ref | None:
        """An op without a rule, a random one that has to run once, one without a rule that is stateful, a print."""
        x = self.pick(lambda s: 0 < len(s) and 0 not in s)
        op = self.draw(st.sampled_from(["UnruledMix", "RandomUniform", "UnruledNoise", "PrintV2"]))
        if x is None:
            return None
        t = TensorType("float64", self.shape(x))
        if op == "UnruledMix":
            return self.b.op(op, x)
        if op == "UnruledNoise":
            return self.b.node(op, (x,), (t,), stateful=True)
        if op == "PrintV2":
            self.effects.append(self.b.node(op, (self.b.op("StringFormat", x),), (), stateful=True).node)
            return None
        noise = self.b.node(op, (self.b.ints(*self.shape(x)),), (t,), stateful=True)
        return self.b.op("AddV2", x, noise)


def _broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b)))


def _grow(draw: Draw, steps: int) -> Program:
    maker = _Maker(draw)
    for i in range(draw(st.integers(1, 3))):
        shape = (draw(st.sampled_from(_SIZES)), draw(st.sampled_from(_SIZES)))
        maker.pool.append(maker.b.input(f"in{i}", shape))
    handles = [
        maker.b.variable(f"w{i}", (draw(st.sampled_from(_SIZES)), draw(st.sampled_from(_SIZES)))) for i in range(2)
    ]
    maker.pool += [maker.b.read(h) for h in handles]
    kinds = [maker.unary, maker.binary, maker.scaled, maker.matmul, maker.matmul, maker.reduction, maker.reduction,
             maker.reshape, maker.transpose, maker.concat, maker.shaped, maker.odd]  # fmt: skip
    used: set[Ref] = set()
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=4, max_size=steps)):
        made = kind()
        if made is not None and maker.b.types[made].elements <= 256 and 0 not in maker.shape(made):
            maker.pool.append(made)
    for node in maker.b.nodes:
        used.update(node.inputs)
    leaves = [r for r in maker.pool if r not in used]
    updates = []
    for handle in handles:
        fitting = [r for r in maker.pool if maker.b.types[r] == maker.b.held(handle)]
        read = next(n.name for n in maker.b.nodes if n.op == "ReadVariableOp" and n.inputs == (handle,))
        updates.append(maker.b.update("AssignSubVariableOp", handle, fitting[-1], controls=[read]))
    return maker.b.build(leaves, updates + maker.effects)


@st.composite
def programs(draw: Draw, steps: int = 20) -> Program:
    """Programs that read variables, mix them with inputs, and update the variables."""
    return _grow(draw, steps)


@st.composite
def placements(draw: Draw, program: Program, parts: int) -> dict[str, Placement]:
    """Where the inputs are sliced: any dimension, any sizes, empty shares too; or nowhere."""
    placed: dict[str, Placement] = {}
    for name in program.inputs:
        shape = program.by_name[name].outputs[0].shape or ()
        dim = draw(st.integers(0, len(shape)))
        if dim == len(shape):
            continue
        marks = sorted(draw(st.lists(st.integers(0, shape[dim] or 0), min_size=parts - 1, max_size=parts - 1)))
        sizes = tuple(b - a for a, b in zip([0, *marks], [*marks, shape[dim] or 0]))
        placed[name] = shard(dim, sizes)
    return placed


class RandomChoice(NodeChoice):
    """Every strategy whose operands can be had costs a random amount."""

    def __init__(self, state: GraphState, seed: random.Random):
        super().__init__(state)
        self.seed = seed

    def replicate(self, node: Node) -> Choice:
        return self.choose(node, (B,) * len(node.inputs)) if node.inputs else super().replicate(node)

    def choose(self, node: Node, current: Sequence[Placement], like: Choice | None = None) -> Choice:
        """Operands are offered as if they lay elsewhere, so that their being moved is among the alternatives."""
        return super().choose(node, [self._elsewhere(r, p) for r, p in zip(node.inputs, current)], like)

    def _elsewhere(self, ref: Ref, placement: Placement) -> Placement:
        shape = self.state.program.find_type(ref).shape
        kind = self.seed.random()
        if placement == FIRST or self.state.program.find_type(ref).dtype != "float64" or kind < 0.5:
            return placement
        if kind < 0.6:
            return self.seed.choice([P_SUM, P_MAX])
        if not shape:
            return placement
        dim = self.seed.randrange(len(shape))
        blocks = 2 if (shape[dim] or 0) % 2 == 0 and self.seed.random() < 0.2 else 1
        run = (shape[dim] or 0) // blocks
        marks = sorted(self.seed.randint(0, run) for _ in range(self.state.parts - 1))
        return shard(dim, tuple(b - a for a, b in zip([0, *marks], [*marks, run])), blocks)

    def cost(self, node: Any, option: Choice, touched: int, flops: int) -> float:
        reachable = all(self.state.reshard_cost(r, p) < float("inf") for r, p in zip(node.inputs, option.inputs))
        return self.seed.random() if reachable else float("inf")


def random_layouts(program: Program, parts: int, placed: Mapping[str, Placement], seed: int) -> dict[str, GraphLayout]:
    """Layouts with a random legal strategy at every node."""
    main = GraphState(Axis(program, parts, Semantics(), {}, RankGroups(program, parts, {}), (), {}), "")
    layout = main.layout
    for name in program.inputs:
        layout.strategies[name] = Choice((), (B,), "input")
        layout.produced[Ref(name)] = B
        if name in placed:
            layout.preferred[Ref(name)] = placed[name]
    Propagation(main, RandomChoice(main, random.Random(seed))).run()
    layout.outputs = tuple(
        FIRST if layout.produced[r] == FIRST and program.find_type(r).dtype in UNMOVABLE else B for r in program.outputs
    )
    return {"": layout}
