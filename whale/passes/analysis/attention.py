"""Finds attention in a program: a product of queries and keys, elementwise ops, softmax, a product with values.

It is recognised by what the ops compute, forward and backward, not by names. Matrix products are read as contractions,
and all elementwise ops between scores and softmax (scales, masks, caps) belong to the attention. ``attentions`` is the
entry point.

Decision: 0089.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from whale.ir.ops import IDENTITIES
from whale.ir.program import Node, Program, Ref
from whale.ir.values import Dims
from whale.passes.analysis.uses import is_pointwise
from whale.sharding_rules.math.einsum import find_product_letters


@dataclass(frozen=True, slots=True)
class Backward:
    """Holds the names of the nodes that compute the gradient of an attention.

    With result = softmax(scores) x values, the gradient goes from the result through the softmax to the product of
    queries and keys; the attributes follow this order.

    Attributes:
      slope: the product (result's gradient x values) that computes the gradient of softmax(scores), the attention
        weights.
      of_result: index, 0 or 1, of the operand of ``slope`` that is the result's gradient.
      within: the nodes of the softmax's gradient between ``slope`` and ``scores``, in order.
      scores: the node that computes the gradient of the softmax's operand.
      path: the elementwise nodes from ``scores`` to the gradient of the product, with their operands, in order.
      query, key, value: the products that compute the gradients of queries, keys and values.
      sides: tensors from outside of the attention that the elementwise nodes read, forward and backward.
    """

    slope: str
    of_result: int
    within: tuple[str, ...]
    scores: str
    path: tuple[str, ...]
    query: str
    key: str
    value: str
    sides: tuple[Ref, ...]


@dataclass(frozen=True, slots=True)
class Attention:
    """Describes an attention by its nodes, or the gradient of one whose forward part is elsewhere in the program.

    Attributes:
      product: name of the product of queries and keys.
      softmax: name of the softmax.
      mixed: name of the product of the softmax and the values; "" if there is none.
      path: names of the elementwise nodes between product and softmax, with their operands, in order.
      sides: tensors from outside of the attention that these nodes read, such as a mask.
      query, key, value: the tensors of queries, keys and values.
      dims: the sequence dimension in queries, keys, values and result.
      turn: the permutation after which a tensor [.., queries, 1], one number for each query, broadcasts over the
        result.
      backward: the gradient's nodes; None if it is not in the program.
    """

    product: str
    softmax: str
    mixed: str
    path: tuple[str, ...]
    sides: tuple[Ref, ...]
    query: Ref
    key: Ref
    value: Ref
    dims: tuple[int, int, int, int]
    turn: tuple[int, ...]
    backward: Backward | None

    @property
    def name(self) -> str:
        """Returns the name of the node by which plans and ``in_rings`` refer to this attention; "" if it has neither
        ``mixed`` nor ``backward``.
        """
        return self.mixed or (self.backward.scores if self.backward is not None else "")


def letters(program: Program, node: Node) -> tuple[str, str, str] | None:
    """Returns a matrix product of two operands in einsum letters: ("bqd", "bkd", "bqk") for both operands and the
    result; None if ``node`` is no such product, or broadcasts.
    """
    if len(node.inputs) != 2 or len(node.outputs) != 1:
        return None
    shapes = [program.find_type(r).shape for r in node.inputs] + [node.outputs[0].shape]
    if any(s is None or None in s for s in shapes):
        return None
    words = find_product_letters(node, len(shapes[2] or ()))
    if len(words) != 3 or "." in "".join(words) or any(len(set(w)) < len(w) for w in words):
        return None
    sizes: dict[str, int | None] = {}
    for word, shape in zip(words, shapes):
        if len(word) != len(shape or ()) or any(sizes.setdefault(c, n) != n for c, n in zip(word, shape or ())):
            return None  # the product broadcasts
    return words[0], words[1], words[2]


def attentions(program: Program) -> list[Attention]:
    """Finds all attentions of a program that have as many keys as queries, and whose intermediate tensors nothing else
    reads.
    """
    found = [one for node in program.nodes if node.op == "Softmax" and (one := _Reader(program, node).read())]
    whole = [one for one in found if one.mixed]
    kept = []
    for one in found:
        # A softmax that is recomputed for the backward pass has no product with values; its attention is known.
        if one.mixed or any(_same(one, other) for other in whole):
            kept.append(one)
    return kept


def _same(again: Attention, first: Attention) -> bool:
    return (again.query, again.key, again.value) == (first.query, first.key, first.value)


class _Reader:
    """Recognises the attention around one softmax node."""

    def __init__(self, program: Program, softmax: Node):
        self.program, self.softmax = program, softmax
        self.shape: Dims = softmax.outputs[0].shape or ()
        self.path: dict[str, None] = {}
        self.sides: dict[Ref, None] = {}
        self.product = ""

    def read(self) -> Attention | None:
        """Returns the attention; None if the nodes around the softmax compute something else, or other nodes read an
        intermediate tensor.
        """
        program, shape = self.program, self.shape
        if len(shape) < 2 or None in shape or shape[-1] != shape[-2] or self.softmax.inputs[0].node in program.inputs:
            return None
        products: dict[str, None] = {}
        self._back(self.softmax.inputs[0], self.path, products)
        if len(products) != 1:
            return None
        sides = tuple(self.sides)
        product = program.by_name[next(iter(products))]
        self.product = product.name
        words = letters(program, product)
        assert words is not None
        at = _operand_with(words, words[2][-1], without=words[2][-2])
        other = _operand_with(words, words[2][-2], without=words[2][-1])
        if at is None or other is None:
            return None
        found = list(self._uses(Ref(self.softmax.name)))
        uses = [use for use in found if use is not None]
        mixed = [(n, i) for n, i in uses if (w := letters(program, n)) and _sums(w, i, -1, -2)]
        rest = [(n, i) for n, i in uses if not any(n is m for m, _ in mixed)]
        if len(uses) < len(found) or len(mixed) > 1:
            return None
        backward = self._backward(rest, product, at) if rest else None
        if rest and backward is None:
            return None
        result = None
        if mixed:
            result = self._values(*mixed[0], 2)
        elif backward is not None:
            result = self._values(program.by_name[backward.slope], 2, backward.of_result)
        if result is None:
            return None
        value, value_dim, result_dim, turn = result
        dims = (words[other].index(words[2][-2]), words[at].index(words[2][-1]), value_dim, result_dim)
        return Attention(
            product.name, self.softmax.name, mixed[0][0].name if mixed else "", tuple(self.path), sides,
            product.inputs[other], product.inputs[at], value, dims, turn, backward,
        )  # fmt: skip

    def _uses(self, ref: Ref) -> Iterator[tuple[Node, int] | None]:
        """Yields the readers of a tensor as (node, operand number), looking through identities; None if the program
        returns the tensor.
        """
        if ref in self.program.outputs:
            yield None
        for node, i in self.program.consumers.get(ref, ()):
            if node.op in IDENTITIES:
                yield from self._uses(Ref(node.name))
            else:
                yield node, i

    def _is_scores(self, shape: Dims | None) -> bool:
        """Returns True if the last two dimensions of ``shape`` are queries and keys."""
        return shape is not None and len(shape) >= 2 and shape[-2:] == self.shape[-2:]

    def _back(self, ref: Ref, path: dict[str, None], products: dict[str, None]) -> None:
        """Walks back from a tensor [.., queries, keys] through elementwise nodes, to products and to tensors from
        outside.

        Args:
          path: the elementwise nodes are added here.
          products: the products that the walk ends at are added here.
        """
        node = self.program.by_name[ref.node]
        if node.name in self.path or node.name in path or node.name in products or ref in self.sides:
            return
        t = self.program.find_type(ref)
        if t.shape == self.shape and letters(self.program, node) is not None:
            products[node.name] = None
        elif self._is_scores(t.shape) and node.inputs and not node.stateful and is_pointwise(node):
            for r in node.inputs:
                self._back(r, path, products)
            path[node.name] = None
        else:
            self.sides[ref] = None

    def _values(self, node: Node, shares: int, result: int) -> tuple[Ref, int, int, tuple[int, ...]] | None:
        """Finds the values in a product of attention weights and values, or in the product that computes the gradient
        of the attention weights.

        Args:
          node: the product. Its tensors are numbered 0 and 1 (operands) and 2 (result).
          shares: number of the tensor that has the shape of the attention weights.
          result: number of the tensor that has the shape of the attention's result.

        Returns:
          (the values, their sequence dimension, that of the result, the permutation ``Attention.turn``); None if the
          result's features are not one dimension.
        """
        words = letters(self.program, node)
        assert words is not None
        turn = _find_permutation(words[shares], words[result])
        if turn is None:
            return None
        (values,) = {0, 1, 2} - {shares, result}
        return (
            node.inputs[values], words[values].index(words[shares][-1]), words[result].index(words[shares][-2]), turn
        )  # fmt: skip

    def _backward(self, uses: list[tuple[Node, int]], product: Node, at: int) -> Backward | None:
        """Returns the gradient of the attention, found from the readers of the softmax; None if it has another form.

        Args:
          uses: the readers of the softmax, without the product with values.
          product: the product of queries and keys.
          at: number of its operand that is the keys.
        """
        program = self.program
        values = [(n, i) for n, i in uses if (w := letters(program, n)) and _sums(w, i, -2, -1)]
        others = [n for n, _ in uses if n not in [v[0] for v in values]]
        if len(values) != 1 or len(others) != 2 or any(n.op != "Mul" for n in others):
            return None
        for weighted, scores in (others, others[::-1]):
            found_slope = self._slope(weighted, scores)
            if found_slope is not None:
                break
        else:
            return None
        slope, within = found_slope
        words = letters(program, slope)
        if words is None or slope.outputs[0].shape != self.shape:
            return None
        of_result = _operand_with(words, words[2][-2], without=words[2][-1])
        of_value, i = values[0]
        result = of_value.inputs[1 - i]
        if of_result is None or self._plain(slope.inputs[of_result]) != self._plain(result):
            return None
        path: dict[str, None] = {}
        ends = self._ahead(Ref(scores.name), path)
        if ends is None:
            return None
        key, query = product.inputs[at], product.inputs[1 - at]
        found: dict[str, str] = {}
        for node, i in ends:
            ends_words = letters(program, node)
            assert ends_words is not None
            other = self._plain(node.inputs[1 - i])
            if _sums(ends_words, i, -1, -2) and other == self._plain(key):
                found["query"] = node.name
            elif _sums(ends_words, i, -2, -1) and other == self._plain(query):
                found["key"] = node.name
        if len(ends) != 2 or len(found) != 2:
            return None
        order = {node.name: n for n, node in enumerate(program.nodes)}
        ordered = tuple(sorted(path, key=order.__getitem__))
        return Backward(
            slope.name, of_result, within, scores.name, ordered, found["query"], found["key"], of_value.name,
            tuple(self.sides),
        )  # fmt: skip

    def _slope(self, weighted: Node, scores: Node) -> tuple[Node, tuple[str, ...]] | None:
        """Returns the product that computes g in the gradient of a softmax, (g - sum(g x softmax)) x softmax, and the
        names of the nodes between the two.

        Args:
          weighted: the node that computes g x softmax.
          scores: the node that computes the whole.
        """
        of_weighted = [r for r in weighted.inputs if self._plain(r).node != self.softmax.name]
        of_scores = [r for r in scores.inputs if self._plain(r).node != self.softmax.name]
        if len(of_weighted) != 1 or len(of_scores) != 1:
            return None
        less, slope = self.program.by_name[of_scores[0].node], self.program.by_name[of_weighted[0].node]
        if less.op != "Sub" or less.inputs[0] != of_weighted[0]:
            return None
        total = self.program.by_name[less.inputs[1].node]
        if total.op != "Sum" or total.inputs[0].node != weighted.name or not total.attrs.get("keep_dims"):
            return None
        axes = self.program.const(total.inputs[1])
        if axes is None or self.program.by_name[total.inputs[1].node].op != "Const":
            return None
        if [int(a) % len(self.shape) for a in axes.reshape(-1)] != [len(self.shape) - 1]:
            return None
        read = {use[0].name for use in self._uses(of_weighted[0]) if use}
        alone = [use for name in (less.name, total.name, weighted.name) for use in self._uses(Ref(name))]
        if read != {weighted.name, less.name} or len(alone) != 3:
            return None
        return slope, (weighted.name, total.inputs[1].node, total.name, less.name)

    def _ahead(self, ref: Ref, path: dict[str, None]) -> list[tuple[Node, int]] | None:
        """Returns the products that a gradient reaches through elementwise ops, as (node, operand number); None if any
        other node reads it.
        """
        found: list[tuple[Node, int]] = []
        known = {self.softmax.name: None, self.product: None}
        for use in self._uses(ref):
            if use is None:
                return None
            node, i = use
            if letters(self.program, node) is not None:
                found.append((node, i))
                continue
            if node.outputs[0].shape != self.shape or node.stateful or not is_pointwise(node):
                return None
            for k, r in enumerate(node.inputs):
                if k != i:
                    self._back(r, path, known)
            if len(known) > 2:
                return None  # another product
            path[node.name] = None
            more = self._ahead(Ref(node.name), path)
            if more is None:
                return None
            found += more
        return found

    def _plain(self, ref: Ref) -> Ref:
        node = self.program.by_name[ref.node]
        while node.op in IDENTITIES and node.inputs:
            ref = node.inputs[0]
            node = self.program.by_name[ref.node]
        return ref


def _operand_with(words: tuple[str, str, str], letter: str, without: str) -> int | None:
    found = [i for i in (0, 1) if letter in words[i] and without not in words[i]]
    return found[0] if len(found) == 1 else None


def _sums(words: tuple[str, str, str], i: int, gone: int, stays: int) -> bool:
    """Returns True if a product sums over one of the last two dimensions of operand ``i`` and keeps the other one in
    its result.

    Args:
      words: the product in einsum letters, as of ``letters``.
      gone: the dimension that is summed over, -1 or -2.
      stays: the other one of the two.
    """
    mine, other, out = words[i], words[1 - i], words[2]
    if len(mine) < 2:
        return False
    return mine[gone] in other and mine[gone] not in out and mine[stays] in out and mine[stays] not in other


def _find_permutation(shares: str, result: str) -> tuple[int, ...] | None:
    """Returns the permutation after which [.., queries, 1] broadcasts over the attention's result; None if the result's
    features are not exactly one dimension.

    Args:
      shares, result: attention weights and result in einsum letters.
    """
    last = len(shares) - 1
    turn = tuple(shares.index(c) if c in shares[:-1] else last for c in result)
    return turn if sorted(turn) == list(range(len(shares))) else None
