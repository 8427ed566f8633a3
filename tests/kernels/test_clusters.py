"""Clusters for XLA: which nodes are compiled together, and that no exchange waits for more than it needs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.interpreter import run
from tests.programs import Builder
from whale.ir.program import COMPILED, Program, Ref, find_waited_for
from whale.ir.values import DType, TensorType
from whale.ir.verify import verify
from whale.kernels.clusters import form_clusters
from whale.kernels.xla import XlaKernels
from whale.passes.normalize.inline import inline

_FLOATS = frozenset({"float32", "float64"})
_TYPED = ({"T": _FLOATS},)
XLA = XlaKernels(
    {
        **dict.fromkeys("MatMul Tanh Mul AddV2 Neg Identity Sum BiasAdd Reshape".split(), _TYPED),
        **dict.fromkeys("TensorListFromTensor TensorListStack TensorListReserve".split(), ({},)),
    },
    on_gpu=True,
)
SIZE = 96  # so that each matrix has more bytes than what a call takes


def exchange(b: Builder, comm: Ref, *tensors: Ref, key: str) -> Ref:
    types = [b.types[ref] for ref in tensors]
    attrs = {"key": key, "reduction": "sum", "T": DType("float64"), "ranks": (), "N": len(tensors)}
    return b.node("WhaleAllReduce", (comm, *tensors), types, key, stateful=True, **attrs)


def communicator(b: Builder) -> Ref:
    return b.node("WhaleCommunicator", (), (TensorType("resource", ()),), "comm", stateful=True, rank=0)


def asked(b: Builder, *outputs: Ref, effects: Sequence[str] = (), without: Sequence[str] = ()) -> Program:
    """A program in which all but some nodes ask for XLA."""
    program = b.build(outputs, tuple(effects))
    marked = [node if node.name in without else node.with_marks(compiled=True) for node in program.nodes]
    return replace(program, nodes=tuple(marked))


def clusters_of(program: Program, xla: XlaKernels = XLA) -> dict[str, set[str]]:
    """The nodes of each cluster, by the name of its call."""
    formed = form_clusters(program, xla)
    verify(formed)
    calls = [node for node in formed.nodes if node.attrs.get(COMPILED)]
    names = {node.name for node in program.nodes if node.op not in ("Const", "Placeholder")}
    return {c.name: names & formed.functions[c.attrs["f"].name].by_name.keys() for c in calls}


def training_step() -> Builder:
    """Three layers, forward and backward, whose gradients are summed over ranks one by one, and the updates."""
    b = Builder()
    comm, h = communicator(b), b.input("x", (SIZE, SIZE))
    weights = [b.input(f"w{i}", (SIZE, SIZE)) for i in range(3)]
    inputs = []
    for i, w in enumerate(weights):
        inputs.append(h)
        h = b.op("Tanh", b.matmul(h, w, name=f"product{i}"), name=f"h{i}", T=DType("float64"))
    slope = b.op("Neg", h, name="slope", T=DType("float64"))
    for i in (2, 1, 0):
        slope = b.op("Mul", slope, inputs[i], name=f"back{i}", T=DType("float64"))
        gradient = b.matmul(inputs[i], slope, a=True, name=f"gradient{i}")
        total = exchange(b, comm, gradient, key=f"sum{i}")
        scaled = b.op("Mul", total, weights[i], name=f"scaled{i}", T=DType("float64"))
        more = b.op("AddV2", scaled, weights[i], name=f"more{i}", T=DType("float64"))
        b.op("Tanh", more, name=f"new{i}", T=DType("float64"))
        slope = b.matmul(slope, weights[i], b=True, name=f"slope{i}")
    return b


def test_each_exchange_starts_as_soon_as_what_it_needs_is_there() -> None:
    program = asked(training_step(), *[Ref(f"new{i}") for i in range(3)], without=["comm"])
    found = clusters_of(program)
    forward = {f"{what}{i}" for what in ("product", "h") for i in range(3)}
    backward = [
        {*forward, "slope", "back2", "gradient2"},
        {"slope2", "back1", "gradient1"},
        {"slope1", "back0", "gradient0"},
    ]
    assert [one for one in found.values() if one in backward] == backward
    updates = [{f"scaled{i}", f"more{i}", f"new{i}"} for i in range(3)]
    assert all(one in found.values() for one in updates) and len(found) == 6
    formed = form_clusters(program, XLA)
    for done, i in enumerate((2, 1, 0), start=1):
        waits = find_waited_for(formed, [f"sum{i}"])
        assert [found[name] for name in found if name in waits] == backward[:done]
        assert not any(name.startswith("sum") for name in waits - {f"sum{i}"})


def test_short_sums_that_nothing_waits_for_cut_nothing() -> None:
    """A loss that is fetched may be summed with the first gradients."""
    b = training_step()
    loss = b.reduce("Sum", Ref("h2"), 0, 1, name="loss")
    exchange(b, Ref("comm"), loss, key="all_losses")
    program = asked(b, Ref("all_losses"), *[Ref(f"new{i}") for i in range(3)], without=["comm"])
    first = clusters_of(program)["whale_cluster/0"]
    assert {"loss", "h0", "gradient2"} <= first and "gradient1" not in first


def test_exchanges_in_the_middle_cut_in_front_and_behind() -> None:
    b = Builder()
    comm, x = communicator(b), b.input("x", (SIZE, SIZE))
    w = b.input("w", (SIZE, SIZE))
    h, expected = x, []
    for i in range(3):
        names = [f"{what}{i}" for what in ("product", "tanh", "negative")]
        h = b.matmul(h, w, name=names[0])
        h = b.op("Tanh", h, name=names[1], T=DType("float64"))
        h = exchange(b, comm, b.op("Neg", h, name=names[2], T=DType("float64")), key=f"sum{i}")
        expected.append(set(names))
    assert list(clusters_of(asked(b, h)).values()) == expected


@pytest.mark.parametrize("kind", ["random", "own", "unasked", "string", "unknown size", "other type", "check", "few"])
def test_what_is_not_compiled_divides_only_what_waits_for_it(kind: str) -> None:
    b = Builder()
    x = b.input("x", (SIZE, SIZE))
    square = (b.types[x],)
    a = b.op("Tanh", b.matmul(x, x, name="a0"), name="a1", T=DType("float64"))
    a = b.op("Neg", a, name="a2", T=DType("float64"))
    f64 = DType("float64")
    if kind == "random":
        m = b.node("RandomUniform", (b.ints(SIZE, SIZE),), square, "m", stateful=True, dtype=f64, T=DType("int32"))
    elif kind in ("own", "unasked", "check"):
        m = b.node({"own": "WhaleElementwise", "check": "CheckNumerics"}.get(kind, "Neg"), (a,), square, "m", T=f64)
    elif kind == "string":
        s = b.node("AsString", (a,), (TensorType("string", (SIZE, SIZE)),), "s", T=f64)
        m = b.node("StringToNumber", (s,), square, "m", out_type=f64)
    elif kind == "unknown size":
        m = b.node("Neg", (b.input("y", (None, SIZE)),), (TensorType("float64", (None, SIZE)),), "m", T=f64)
        m = b.node("EnsureShape", (m,), square, "known", T=f64)
    elif kind == "other type":
        c = b.node("Cast", (a,), (TensorType("float16", (SIZE, SIZE)),), "c", SrcT=f64, DstT=DType("float16"))
        c = b.node("Neg", (c,), (TensorType("float16", (SIZE, SIZE)),), "half", T=DType("float16"))
        m = b.node("Cast", (c,), square, "m", SrcT=DType("float16"), DstT=f64)
    else:
        n = b.input("n", (2,), "int32")
        n = b.node("Neg", (n,), (TensorType("int32", (2,)),), "few", T=DType("int32"))
        m = b.node("Fill", (n, b.const(1.0)), square, "m", T=f64)
    b.op("Mul", b.op("AddV2", a, m, name="b0", T=f64), a, name="b1", T=f64)
    b.op("Neg", Ref("b1"), name="b2", T=f64)
    side = [b.op("Tanh", x, name="side0", T=f64)]
    side.append(b.op("Neg", side[0], name="side1", T=f64))
    program = asked(b, Ref("b2"), side[1], without=["m"] if kind == "unasked" else [])
    found = list(clusters_of(program).values())
    if kind in ("random", "unknown size", "few"):  # they wait for nothing that is compiled
        assert found == [{"a0", "a1", "a2", "b0", "b1", "b2", "side0", "side1"}]
    elif kind == "unasked":  # what passes have put between what asks is compiled with it
        assert found == [{"a0", "a1", "a2", "m", "b0", "b1", "b2", "side0", "side1"}]
    else:
        assert found == [{"a0", "a1", "a2", "side0", "side1"}, {"b0", "b1", "b2"}]


def test_lists_stay_inside_of_a_cluster_or_are_not_compiled() -> None:
    def program(handed_on: bool) -> Program:
        b = Builder()
        f64 = DType("float64")
        x = b.input("x", (SIZE, SIZE))
        shape = b.ints(SIZE)
        made = b.op("Neg", b.op("Tanh", b.matmul(x, x, name="p"), name="t", T=f64), name="made", T=f64)
        kind = TensorType("variant", ())
        rows = b.node("TensorListFromTensor", (made, shape), (kind,), "list", element_dtype=f64)
        if handed_on:
            rows = b.node("Print", (rows,), (kind,), "handed_on", stateful=True)
        b.node("TensorListStack", (rows, shape), (b.types[x],), "stacked", element_dtype=f64, num_elements=SIZE)
        return asked(b, b.op("Tanh", Ref("stacked"), name="out", T=f64))

    assert list(clusters_of(program(False)).values()) == [{"p", "t", "made", "list", "stacked", "out"}]
    assert list(clusters_of(program(True)).values()) == [{"p", "t", "made"}]


def test_on_processors_products_and_sums_over_rows_are_left_to_faster_kernels() -> None:
    b = Builder()
    f64 = DType("float64")
    x, bias = b.input("x", (SIZE, SIZE)), b.input("bias", (SIZE,))
    biased = b.op("BiasAdd", b.matmul(x, x, name="product"), bias, name="biased", T=f64)
    h = b.op("Mul", b.op("Tanh", biased, name="t", T=f64), x, name="m", T=f64)
    total = b.reduce("Sum", b.op("Neg", h, name="n", T=f64), 0, name="over_rows")
    inner = b.op("Reshape", h, b.ints(SIZE * SIZE), name="inner", T=f64)
    outer = b.op("Reshape", b.op("Tanh", inner, name="flat", T=f64), b.ints(SIZE, SIZE), name="outer", T=f64)
    found = clusters_of(asked(b, total, outer), replace(XLA, on_gpu=False))
    assert list(found.values()) == [{"t", "m", "n", "inner", "flat"}]  # of `outer` XLA would make a copy


def test_on_processors_arithmetic_alone_is_left_to_our_kernels() -> None:
    b = Builder()
    h = x = b.input("x", (SIZE, SIZE))
    for i in range(6):
        h = b.op("Mul", b.op("AddV2", h, x, name=f"a{i}", T=DType("float64")), x, name=f"m{i}", T=DType("float64"))
    program = asked(b, h)
    assert form_clusters(program, replace(XLA, on_gpu=False)) is program
    assert form_clusters(program, XLA) is not program


def test_short_programs_are_left_to_kernels() -> None:
    b = Builder()
    x = b.input("x", (4, 4))
    h = x
    for i in range(5):
        h = b.op("Tanh", h, name=f"h{i}", T=DType("float64"))
    program = asked(b, h)
    assert form_clusters(program, XLA) is program


def test_what_all_ranks_have_alike_is_compiled_by_itself() -> None:
    """Else ranks with other rows would compile other functions, and round otherwise."""
    b = Builder()
    f64 = DType("float64")
    ends = []
    for name, first in (("rows", b.input("x", (SIZE, SIZE))), ("weights", b.read(b.variable("w", (SIZE, SIZE))))):
        one = b.op("Tanh", b.op("Mul", first, first, name=f"{name}0", T=f64), name=f"{name}1", T=f64)
        ends.append(b.op("Neg", one, name=f"{name}2", T=f64))
    ends.append(b.op("Mul", b.op("AddV2", *ends, name="both0", T=f64), ends[0], name="both1", T=f64))
    found = list(clusters_of(asked(b, *ends)).values())
    assert found == [{f"weights{i}" for i in range(3)}, {"rows0", "rows1", "rows2", "both0", "both1"}]


def test_recomputed_activations_are_not_compiled_with_what_they_repeat() -> None:
    b = Builder()
    f64 = DType("float64")
    x = b.input("x", (SIZE, SIZE))
    h = b.op("Neg", b.op("Tanh", b.matmul(x, x, name="f0"), name="f1", T=f64), name="f2", T=f64)
    r = b.matmul(x, x, name="r0")
    r = b.op("Tanh", r, name="r1", T=f64)
    out = b.op("Mul", b.op("Neg", r, name="g0", T=f64), h, name="g1", T=f64)
    program = asked(b, out)
    nodes = [
        replace(n.with_marks(recomputed=True), controls=("f2",) if n.name == "r0" else ()) if n.name[0] == "r" else n
        for n in program.nodes
    ]
    found = list(clusters_of(replace(program, nodes=tuple(nodes))).values())
    assert found == [{"f0", "f1", "f2"}, {"r0", "r1", "g0", "g1"}]


def random_program(draw: random.Random) -> Program:
    b = Builder()
    f64 = DType("float64")
    comm = communicator(b)
    known = [b.input("x", (SIZE, SIZE)), *(b.const(np.full((SIZE, SIZE), c), "float64") for c in (0.5, 2.0))]
    for i in range(draw.randrange(10, 40)):
        one, other, name = draw.choice(known[-8:]), draw.choice(known), f"n{i}"
        if draw.random() < 0.2:  # equal on all ranks
            one, other = known[1:3]
        kind = draw.randrange(12)
        controls = (draw.choice(known[3:]).node,) if len(known) > 4 and draw.random() < 0.2 else ()
        if kind < 3:
            made = b.op("Tanh", one, name=name, controls=controls, T=f64)
        elif kind < 6:
            made = b.op("Mul", one, other, name=name, controls=controls, T=f64)
        elif kind < 8:
            made = b.op("AddV2", one, other, name=name, controls=controls, T=f64)
        elif kind < 10:
            made = b.op("Square", one, name=name, controls=controls, T=f64)  # XLA's list here has no such kernel
        else:
            made = exchange(b, comm, one, key=name)
        known.append(made)
    return asked(b, *known[-3:], effects=[n.name for n in b.nodes if n.op == "WhaleAllReduce"])


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_programs_compute_the_same_and_no_exchange_waits_for_another_one(first: int) -> None:
    compiled = 0
    for seed in range(first, first + 20):
        draw = random.Random(seed)
        program = random_program(draw)
        formed = form_clusters(program, XLA)
        verify(formed)
        exchanges = [node.name for node in program.nodes if node.op == "WhaleAllReduce"]
        for name in exchanges:
            before = {n for n in find_waited_for(program, [name]) if n in exchanges}
            assert {n for n in find_waited_for(formed, [name]) if n in exchanges} == before, seed
        compiled += sum(bool(node.attrs.get(COMPILED)) for node in formed.nodes)
        arguments = {n: np.random.default_rng(seed).normal(size=(SIZE, SIZE)) for n in program.inputs}
        expected, found = (run([one], arguments, {}).outputs[0] for one in (program, inline(formed)))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    assert compiled > 20
