"""Batches of products of small matrices by a kernel of ours, in what one rank runs.

An attention multiplies a matrix for each head of each row of the batch. TensorFlow's Einsum moves dimensions about
until these are batches of whole matrices, and its products of those take no instructions of newer processors than AVX
unless oneDNN is on. Ours multiplies each pair where it lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from whale.ir.ops import MATMULS
from whale.ir.program import Node, Program, marks
from whale.ir.values import DType, TensorType, static_shape
from whale.lowering.compiled import in_other_graphs
from whale.lowering.products.matrices import may_multiply
from whale.rules.math.einsum import product_letters

EINSUM = "WhaleEinsum"
# The longest side of matrices: what a thread multiplies stays in its cache. Where nothing has to be moved about,
# oneDNN's kernels are as fast from some 64 on, and have more cores than there may be products.
MOST_OF_EINSUMS, MOST_OF_BATCHES = 512, 128


class Kinds(NamedTuple):
    """What the letters of an equation of two operands are for: rows are of the left one, columns of the right one."""

    batch: str
    rows: str
    columns: str
    summed: str


def einsums_by_own_kernel(program: Program) -> Program:
    """``program`` of one rank, and its functions, with our kernel for batches of products of small matrices."""
    return in_other_graphs(program, lambda graph: graph.with_nodes(tuple([_own(graph, node) for node in graph.nodes])))


def kinds_of(terms: Sequence[str]) -> Kinds | None:
    """The letters of a left operand, a right one and a result; None where one is for something else."""
    left, right, out = (frozenset(term) for term in terms)
    if any(len(letters) < len(term) for letters, term in zip((left, right, out), terms)) or "." in left | right | out:
        return None
    if (left ^ right) - out or out - left - right:
        return None

    def among(letters: frozenset[str]) -> str:
        return "".join(sorted(letters))

    return Kinds(among(left & right & out), among(left - right), among(right - left), among((left & right) - out))


def _own(program: Program, node: Node) -> Node:
    """Our kernel for the node; itself, where it is none that ours has, or is faster at."""
    if len(node.inputs) != 2 or not (node.op == "Einsum" or node.op in MATMULS):
        return node
    types = [*map(program.type_of, node.inputs), node.outputs[0]]
    if not may_multiply(node, types):
        return node
    terms = product_letters(node, len(static_shape(types[2])))
    kinds = kinds_of(terms) if len(terms) == 3 else None
    if kinds is None or not kinds.batch or [len(one) for one in kinds[1:]] != [1, 1, 1]:
        return node
    sizes = _sizes(terms, types)
    most = MOST_OF_EINSUMS if node.op == "Einsum" else MOST_OF_BATCHES
    if sizes is None or prod(sizes[c] for c in kinds.batch) == 1 or max(sizes[c] for c in kinds[1:]) > most:
        return node
    left, right, out = terms
    turned = out[-1] == kinds.rows  # columns come last in what the kernel writes
    if not turned and out[-1] != kinds.columns:
        return node
    equation = f"{right},{left}->{out}" if turned else f"{left},{right}->{out}"
    attrs = {"equation": equation, "T": DType(types[0].dtype), **marks(node)}
    return replace(node, op=EINSUM, inputs=node.inputs[::-1] if turned else node.inputs, attrs=attrs)


def _sizes(terms: Sequence[str], types: Sequence[TensorType]) -> Mapping[str, int] | None:
    """Of each letter; None where sizes broadcast."""
    found: dict[str, int] = {}
    for term, t in zip(terms, types):
        shape = static_shape(t)
        if len(shape) != len(term) or any(found.setdefault(letter, size) != size for letter, size in zip(term, shape)):
            return None
    return found
