"""Defines sharding rules of matrix products and einsum: sharding a contracted dimension makes the result a partial
sum.
"""

from __future__ import annotations

from whale.ir.ops import MATMULS
from whale.ir.program import Node
from whale.ir.values import TensorType
from whale.sharding_rules.base import OpView, write_term
from whale.sharding_rules.notation import REPLICATED
from whale.sharding_rules.registry import rule


def find_product_letters(node: Node, rank: int) -> tuple[str, ...]:
    """Returns the einsum equation of a matrix product or Einsum as words: one word for each operand, then the result's.

    The result is () for other ops. A MatMul without transposes gives ("mk", "kn", "mn").

    Args:
      rank: number of dimensions of both operands of a matrix product; batch dimensions must not broadcast.
    """
    if node.op == "Einsum":
        return _split_equation(node)
    if node.op not in MATMULS:
        return ()
    first, second = ("transpose_a", "transpose_b") if node.op == "MatMul" else ("adj_x", "adj_y")
    batch = "abcdefgh"[: rank - 2]
    left, right = "km" if node.attrs.get(first) else "mk", "nk" if node.attrs.get(second) else "kn"
    return batch + left, batch + right, batch + "mn"


def matmul(op: OpView) -> str:
    """Writes the sharding rule of MatMul, from ``transpose_a`` and ``transpose_b``."""
    a = "k+ m" if op.attr("transpose_a", False) else "m k+"
    b = "n k+" if op.attr("transpose_b", False) else "k+ n"
    return f"{a}, {b} -> m n"


def batch_matmul(op: OpView) -> str:
    """Writes the sharding rule of BatchMatMul, from ``adj_x`` and ``adj_y``."""
    a = "k+ m" if op.attr("adj_x", False) else "m k+"
    b = "n k+" if op.attr("adj_y", False) else "k+ n"
    return f"* {a}, * {b} -> * m n"


def einsum(op: OpView) -> str:
    """Writes the sharding rule of Einsum, from its equation; '...' broadcasts."""
    *operands, right = _split_equation(op.node)
    if any(t.shape is None for t in op.inputs):
        return REPLICATED
    repeated = {c for word in (*operands, right) for c in word if c != "." and word.count(c) > 1}
    flags: dict[str, str] = {}
    for word in operands:
        for c in word.replace("...", ""):
            flags[c] = "^" if c in repeated else "" if c in right else "+"
    # A label of size 1 in one operand and of a larger size in another broadcasts, as '...' does; it cannot be sharded.
    sizes: dict[str, set[int | None]] = {}
    for word, kind in zip(operands, op.inputs):
        for c, size in zip(_expand_ellipsis(word, len(kind.shape or ())), kind.shape or ()):
            sizes.setdefault(c, set()).add(size)
    uneven = {c for c, s in sizes.items() if len(s - {None}) > 1}
    names = {c: (f"u{c.lower()}" if c.isupper() else f"l{c}") for c in flags}

    def write(word: str, kind: TensorType, flagged: bool) -> str:
        items = []
        for k, piece in enumerate(word.split("...")):
            items += ["*"] if k else []
            for c in piece:
                mixed = c in uneven
                at = _expand_ellipsis(word, len(kind.shape or ())).index(c) if mixed and kind.shape else 0
                one = mixed and kind.shape is not None and kind.shape[at] == 1
                flag = "^" if mixed else flags[c] if flagged or flags[c] == "^" else ""
                items.append("1" if one else names[c] + flag)
        return write_term(items)

    inputs = ", ".join(write(w, t, True) for w, t in zip(operands, op.inputs))
    return f"{inputs} -> {write(right, op.outputs[0], False)}"


def _split_equation(node: Node) -> tuple[str, ...]:
    """Splits an einsum equation into words: one for each operand, then that of the result."""
    left, _, right = str(node.attrs.get("equation", "")).replace(" ", "").partition("->")
    return (*left.split(","), right)


def _expand_ellipsis(word: str, rank: int) -> str:
    """Returns the word with '...' replaced by one '.' per dimension that it stands for."""
    head, dots, tail = word.partition("...")
    return head + "." * (rank - len(head) - len(tail)) + tail if dots else word


def _list_single_operands(op: OpView) -> str | None:
    """Returns ``lin`` of Einsum: the numbers of all operands, joined by "|", as any one of them may be a partial
    sum.
    """
    return "|".join(str(i) for i in range(len(op.inputs)))


def bias_add(op: OpView) -> str:
    """Writes the sharding rule of BiasAdd, from ``data_format``."""
    return "b c *, c -> b c *" if str(op.attr("data_format", "NHWC")).startswith("NC") else "* c, c -> * c"


def bias_add_grad(op: OpView) -> str:
    """Writes the sharding rule of BiasAddGrad, from ``data_format``."""
    return "b+ c p*+ -> c" if str(op.attr("data_format", "NHWC")).startswith("NC") else "p*+ c -> c"


def sparse_matmul(op: OpView) -> str:
    """Writes the sharding rule of SparseTensorDenseMatMul, from ``adjoint_b``.

    The entries of the sparse operand can be sharded, which makes the result a partial sum.
    """
    return "z+ t^, z+, ., " + ("n k^ -> m^ n" if op.attr("adjoint_b", False) else "k^ n -> m^ n")


RULES = (
    rule("MatMul SparseMatMul", matmul, lin="0|1"),
    rule("BatchMatMul BatchMatMulV2 BatchMatMulV3", batch_matmul, lin="0|1"),
    rule("Einsum", einsum, lin=_list_single_operands),
    rule("BiasAdd", bias_add, lin="0&1", mono="0|1"),
    rule("BiasAddV1", "* c, c -> * c", lin="0&1", mono="0|1"),
    rule("BiasAddGrad", bias_add_grad, lin="0"),
    rule("SparseTensorDenseMatMul", sparse_matmul, lin="1|3"),
    rule("Cross", "* c^, * c^ -> * c^", lin="0|1"),
)
