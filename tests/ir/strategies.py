"""Hypothesis strategies for values, nodes, programs, placements and plans."""

from __future__ import annotations

import string
from typing import Any

import numpy as np
from hypothesis import strategies as st

from whale.ir.layout import FIRST, REDUCTIONS, B, Partial, Placement, Strategy, shard
from whale.ir.marks import NO_MARKS, Marks
from whale.ir.plan import BatchInput, Plan, Reshard, TaskGraph
from whale.ir.prediction import Prediction, RankPrediction
from whale.ir.program import Node, Program, Ref, Variable
from whale.ir.values import DType, Func, Shape, Tensor, TensorType

DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "uint8", "uint64", "bool", "complex64",
          "string", "resource", "variant")  # fmt: skip
NUMERIC = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8", "uint64", "bool", "complex64")

# Names as TensorFlow writes them, the words of the text form itself, and names that have to be quoted.
names = st.one_of(
    st.text(string.ascii_letters + string.digits + "_./>-", min_size=1, max_size=12),
    st.sampled_from(["input", "input x", "variable", "return", "return_value", "effects", "effects/1", "program",
                     "function",
                     "True", "False1", "^a", "a:0", "a = b", 'quo"te', "back\\slash", "!", "@", "", "line\u2028break",
                     "new\nline", "umlaut ä"]),
)  # fmt: skip
keys = st.text(string.ascii_letters + string.digits + "_", min_size=1, max_size=8)
dims = st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=4).map(tuple))
types = st.builds(TensorType, st.sampled_from(DTYPES), dims)
floats = st.floats(allow_nan=False)


@st.composite
def tensors(draw: Any) -> Tensor:
    """Constants of every kind of dtype: empty ones, large ones, NaN, infinities, negative zero, strings."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    count = int(np.prod(shape, dtype=np.int64))
    dtype = draw(st.sampled_from((*NUMERIC, "string")))
    if dtype == "string":
        return Tensor("string", shape, tuple(draw(st.lists(st.binary(max_size=6), min_size=count, max_size=count))))
    if dtype == "bool":
        items = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    elif dtype.startswith(("int", "uint")):
        info = np.iinfo(dtype)
        items = draw(st.lists(st.integers(int(info.min), int(info.max)), min_size=count, max_size=count))
    else:
        width = {"float16": 16, "float32": 32}.get(dtype, 64)
        items = draw(st.lists(st.floats(width=32 if dtype == "complex64" else width), min_size=count, max_size=count))
    return Tensor(dtype, shape, np.array(items, dtype).tobytes())


plain = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), floats, st.text(max_size=8), st.binary(max_size=8),
    st.sampled_from(DTYPES).map(DType), dims.map(Shape), tensors(),
)  # fmt: skip
values = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple), st.builds(Func, names, st.dictionaries(keys, inner, max_size=2))
    ),
    max_leaves=4,
)
attributes = st.dictionaries(keys, values, max_size=3)
refs = st.builds(Ref, names, st.integers(0, 3))
marks = st.one_of(
    st.just(NO_MARKS),
    st.builds(
        Marks, backward=st.booleans(), blocks=st.integers(0, 3), axis=st.lists(names, max_size=2).map(tuple),
        micro_batch_rows=st.sampled_from(["", "S(0)[4,4]"]), edge=st.sampled_from([None, (0, 1)]),
        ring_dim=st.sampled_from([None, 0]), runs=st.sampled_from([(), (1, 4)]), expected_bytes=st.integers(0, 9),
    ),
)  # fmt: skip
nodes = st.builds(
    Node, names, st.sampled_from(["MatMul", "My>Op", "Const", "return"]), st.lists(refs, max_size=3).map(tuple),
    st.lists(names, max_size=2).map(tuple), attributes, st.lists(types, max_size=2).map(tuple),
    st.sampled_from(["", "replica_0/stage_1", 'a "scope"']), st.booleans(), marks,
)  # fmt: skip


def graphs(functions: Any) -> Any:
    """Programs, not necessarily sensible: the text form has to carry whatever there is."""
    return st.builds(
        Program, names, st.lists(nodes, max_size=4).map(tuple), st.lists(names, max_size=2).map(tuple),
        st.lists(st.builds(Variable, names, names, types, st.sampled_from(["", "stage_0"])), max_size=2).map(tuple),
        st.lists(refs, max_size=2).map(tuple), st.lists(names, max_size=2).map(tuple), functions,
    )  # fmt: skip


programs = graphs(st.dictionaries(names, graphs(st.just({})), max_size=2))

sizes = st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple)
placements: st.SearchStrategy[Placement] = st.one_of(
    st.just(B),
    st.just(FIRST),
    st.sampled_from(REDUCTIONS).map(Partial),
    st.builds(shard, st.integers(0, 4), sizes, st.integers(1, 3)),
    st.builds(shard, st.integers(0, 4), sizes, st.just(1), st.tuples(st.integers(0, 3), st.integers(0, 3))),
)
strategies = st.builds(Strategy, st.lists(placements, max_size=3).map(tuple),
                       st.lists(placements, max_size=2).map(tuple),
                       st.text(max_size=8), st.booleans())  # fmt: skip
plans = st.builds(
    Plan, names, st.text(max_size=6), st.integers(1, 4), st.lists(names, max_size=3).map(tuple),
    st.lists(st.builds(TaskGraph, names, names, st.lists(st.integers(0, 3), max_size=3).map(tuple), st.integers(0, 9)),
             max_size=2).map(tuple),
    st.lists(st.builds(BatchInput, names, placements, names, st.booleans()), max_size=2, unique_by=lambda b: b.name)
    .map(tuple),
    st.dictionaries(names, st.dictionaries(names, strategies, max_size=3), max_size=2),
    st.dictionaries(names, st.lists(placements, max_size=2).map(tuple), max_size=2),
    st.lists(st.builds(Reshard, names, refs, placements, placements, names, st.integers(0, 2**60),
                       st.integers(-1, 3), names),
             max_size=3).map(tuple),
    st.dictionaries(names, st.integers(0, 2**40), max_size=2), st.integers(0, 2**60), st.integers(0, 2**60),
    predicted=st.none() | st.just(Prediction("some", 0.1, (RankPrediction(0.1, 0.07, 1 / 3, 2**40, 5),))),
)  # fmt: skip
