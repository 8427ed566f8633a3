"""Replaces batches of products of small matrices by a kernel of Whale's own, in one rank's program.

An attention multiplies a pair of matrices for each head of each row of the batch. TensorFlow's Einsum transposes
tensors until these are batches of contiguous matrices, as programs without Einsum do themselves; and its batched
products use no instructions newer than AVX unless oneDNN is on. Whale's kernel multiplies each pair in place, without
transposing.

Decision: 0128.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from whale.ir.ops import MATMULS
from whale.ir.program import Node, Program, Ref, remove_unread
from whale.ir.values import DType, TensorType, require_static_shape
from whale.kernels.choices import ALL, Choices
from whale.kernels.matmuls import may_multiply
from whale.kernels.xla import change_other_graphs
from whale.sharding_rules.math.einsum import find_product_letters

EINSUM = "WhaleEinsum"

# The longest side of matrices that are replaced, so that a thread's matrices stay in its cache; and the longest side
# where nothing has to be transposed: there oneDNN's kernels are as fast from some 64 on, and use more cores if there
# are few products.
MOST, MOST_OF_BATCHES = 512, 128

# With fewer rows or columns packing is not worth it: that is almost a product with a vector.
LEAST = 4


@dataclass(frozen=True, slots=True)
class Equation:
    """Represents a batched product of two tensors.

    Attributes:
      left, right: the operands.
      terms: letters of the dimensions of left, right and result, as in an einsum.
      rows: the letter that only left and result share.
      columns: the letter that only right and result share.
      summed: the letter that only left and right share.
    """

    left: Ref
    right: Ref
    terms: tuple[str, str, str]
    rows: str
    columns: str
    summed: str

    def reorder(self, order: Sequence[int]) -> Equation:
        """Returns the equation with the result's dimensions permuted by ``order``."""
        left, right, out = self.terms
        return replace(self, terms=(left, right, "".join(out[i] for i in order)))

    @property
    def is_written(self) -> bool:
        """Returns True if the kernel can write the result: its last dimension is rows or columns, so that elements are
        contiguous.
        """
        return self.terms[2][-1] in self.rows + self.columns

    @property
    def is_batch(self) -> bool:
        """Returns True if all matrices are contiguous, one after the other, as in a BatchMatMul."""
        left, right, out = (term[:-2] for term in self.terms)
        return left == right == out

    def make_node(self, of: Node) -> Node:
        """Returns the WhaleEinsum node that replaces ``of``."""
        left, right, out = self.terms
        turned = out[-1] == self.rows
        attrs = {
            "equation": f"{right},{left}->{out}" if turned else f"{left},{right}->{out}",
            "T": DType(of.outputs[0].dtype),
        }
        operands = (self.right, self.left) if turned else (self.left, self.right)
        return replace(of, op=EINSUM, inputs=operands, attrs=attrs)


def replace_einsums(program: Program, choices: Choices = ALL) -> Program:
    """Replaces batches of products of small matrices, in one rank's program and its functions, by Whale's kernel.

    Transposes of operands or results that only such a product needed are removed.

    Args:
      choices: substitutions that measured slower are left out.
    """
    return change_other_graphs(program, lambda graph: _replace_in_graph(graph, choices))


def _replace_in_graph(program: Program, choices: Choices) -> Program:
    found = {
        node.name: equation
        for node in program.nodes
        if (equation := _find_equation(program, node)) is not None and choices.takes("einsums", program, node)
    }
    if not found:
        return program
    into = dict(_find_transpositions(program, found))
    gone = {program.by_name[name].inputs[0].node for name in into}
    nodes: list[Node] = []
    for node in program.nodes:
        if node.name in gone:
            continue
        if node.name in into:
            product = program.by_name[node.inputs[0].node]
            controls = tuple(dict.fromkeys((*product.controls, *node.controls)))
            node = into[node.name].make_node(
                replace(node, controls=controls, attrs={}, marks=node.marks.replace_marks(**product.marks.list_given()))
            )
        elif node.name in found and found[node.name].is_written:
            node = found[node.name].make_node(node)
        nodes.append(node)
    made = program.replace_nodes(tuple(nodes))
    return remove_unread(made, {node.name for node in program.nodes if node.op == "Transpose"} - into.keys())


def _find_transpositions(program: Program, found: Mapping[str, Equation]) -> Iterator[tuple[str, Equation]]:
    """Finds transposes that are the only reader of a product, where the kernel can write the result transposed.

    Yields:
      (name of the transpose, the equation that computes its result).
    """
    needed = {*program.effects, *[ref.node for ref in program.outputs]}
    needed.update(name for node in program.nodes for name in node.controls)
    needed.update(ref.node for one in found.values() for ref in (one.left, one.right))
    for node in program.nodes:
        order = _find_order(program, node)
        if order is None or len(program.consumers[node.inputs[0]]) > 1:
            continue
        product = node.inputs[0].node
        if product in found and product not in needed and (turned := found[product].reorder(order)).is_written:
            yield node.name, turned


def _find_order(program: Program, node: Node) -> tuple[int, ...] | None:
    """Returns the permutation of a Transpose node; None for other nodes, or if it is not constant."""
    if node.op != "Transpose" or (order := program.const(node.inputs[1])) is None:
        return None
    return tuple(int(i) % len(order) for i in order)


def _find_equation(program: Program, node: Node) -> Equation | None:
    """Returns the equation that Whale's kernel would compute for the node; None if it cannot, or would be slower than
    TensorFlow's.
    """
    if len(node.inputs) != 2 or not (node.op == "Einsum" or node.op in MATMULS):
        return None
    types = [*map(program.find_type, node.inputs), node.outputs[0]]
    if not may_multiply(node, types) or len({t.dtype for t in types}) > 1:
        return None
    terms = find_product_letters(node, len(require_static_shape(types[2])))
    kinds = _classify_letters(terms) if len(terms) == 3 else None
    sizes = _find_letter_sizes(terms, types) if kinds is not None else None
    if kinds is None or sizes is None:
        return None
    batch, rows, columns, summed = kinds
    if prod(sizes[letter] for letter in batch) == 1 or min(sizes[rows], sizes[columns]) < LEAST:
        return None
    left, right = (_follow_transposition(program, ref, term, batch) for ref, term in zip(node.inputs, terms))
    found = Equation(left[0], right[0], (left[1], right[1], terms[2]), rows, columns, summed)
    most = MOST_OF_BATCHES if found.is_batch else MOST
    return found if max(sizes[rows], sizes[columns], sizes[summed]) <= most else None


def _classify_letters(terms: Sequence[str]) -> tuple[frozenset[str], str, str, str] | None:
    """Classifies the letters of a product.

    Returns:
      The letters in all three terms (the batch), and the one letter that only left and result, right and result, left
        and right share; None if there are others.
    """
    left, right, out = (frozenset(term) for term in terms)
    if sum(map(len, terms)) > len(left) + len(right) + len(out) or "." in left | right | out:
        return None
    pairs = (left & out) - right, (right & out) - left, (left & right) - out
    batch = left & right & out
    if not batch or [len(pair) for pair in pairs] != [1, 1, 1] or len(left | right | out) != len(batch) + 3:
        return None
    rows, columns, summed = (next(iter(pair)) for pair in pairs)
    return batch, rows, columns, summed


def _find_letter_sizes(terms: Sequence[str], types: Sequence[TensorType]) -> Mapping[str, int] | None:
    """Returns the size of each letter's dimension; None if a dimension broadcasts."""
    found: dict[str, int] = {}
    for term, t in zip(terms, types):
        shape = require_static_shape(t)
        if len(shape) != len(term) or any(found.setdefault(letter, size) != size for letter, size in zip(term, shape)):
            return None
    return found


def _follow_transposition(program: Program, ref: Ref, term: str, batch: Collection[str]) -> tuple[Ref, str]:
    """Looks through transposes of an operand; returns the tensor before them, and the letters of its dimensions.
    Returns the operand itself if it is no transpose.

    A transpose is kept if without it contiguous elements would belong to different products.

    Args:
      term: letters of the operand's dimensions.
      batch: letters of the dimensions that number the products.
    """
    node = program.by_name[ref.node]
    order = None if node.controls else _find_order(program, node)
    if order is None:
        return ref, term
    before = "".join(term[order.index(i)] for i in range(len(order)))
    return (ref, term) if before[-1] in batch else _follow_transposition(program, node.inputs[0], before, batch)
