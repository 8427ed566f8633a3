"""Lists the kernels and collectives of one rank, for each layer of a decoder-only transformer and outside its layers.

Shapes follow Megatron-LM (Shoeybi et al., 2019; Narayanan et al., SC 2021): T = micro-batch x sequence tokens, h
hidden, t tensor-parallel ranks. The bytes of pointwise kernels are those of Korthikanti et al., "Reducing activation
recomputation in large transformer models", 2022, section 4, plus the bytes that each kernel writes: `2 e` for an
element that is read and written, `3 e` for two that are read and one that is written, 1 for a dropout's mask. The last
number of a `Streaming` counts the kernels that eager frameworks launch for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cost_model.analytic.stacks import Stack
from cost_model.analytic.transformer import LayerShare, Transformer


@dataclass(frozen=True, slots=True)
class Matmul:
    """`batch` products [m, k] x [k, n]; `weights`: of a layer's weights or for them (float8 serves only these)."""

    name: str
    m: int
    n: int
    k: int
    batch: int = 1
    weights: bool = False


@dataclass(frozen=True, slots=True)
class Streaming:
    """One or more kernels that move so many bytes of memory."""

    name: str
    moved_bytes: float
    kernels: int = 1


@dataclass(frozen=True, slots=True)
class Attention:
    """Fused attention: FLOPs that are really done (a causal mask skips half)."""

    name: str
    flops: float
    sequence: int


@dataclass(frozen=True, slots=True)
class Collective:
    """Communication inside the tensor-parallel group; `over`: the products that hide all but a part `exposed` of it."""

    name: str
    kind: str
    tensor_bytes: float
    over: tuple[str, ...] = ()
    exposed: float = 0.0


Op = Matmul | Streaming | Attention | Collective
LAST_PRODUCT = "feed forward 2"  # of a layer's forward pass
FLOAT_BYTES = 4  # of single precision, in which the loss is computed
# Products of the fused attention's backward pass for each of its forward pass: five instead of two, since the scores
# are computed again (Dao et al., "FlashAttention", 2022, algorithm 4).
ATTENTION_BACKWARD = 2.5
# Memory traffic of a normalisation's backward pass for that of its forward pass, which reads and writes x once: x and
# dy are read twice, dx is written.
NORM_BACKWARD = 2.5


def _attention_flops(t: Transformer, p: LayerShare) -> float:
    """Returns the FLOPs of one rank's heads: two products of 2 s s d each, of which a causal mask skips half."""
    heads = max(1, t.heads // p.tensor)
    return 2 * 2.0 * p.rows * heads * t.sequence * t.sequence * (t.hidden // t.heads) / 2


def _core_forward(t: Transformer, p: LayerShare, stack: Stack) -> list[Op]:
    """Lists the kernels of scores, softmax, dropout and context, which selective recompute repeats."""
    e = stack.element_bytes
    b, s, d = p.rows, t.sequence, t.hidden // t.heads
    heads = max(1, t.heads // p.tensor)
    if stack.fused_attention:
        return [Attention("attention", _attention_flops(t, p), s)]
    scores = float(b * heads * s * s)
    ops: list[Op] = [Matmul("scores", s, s, d, b * heads), Streaming("softmax", stack.softmax_bytes * scores)]
    if stack.dropout:
        ops.append(Streaming("attention dropout", (2 * e + 1) * scores))
    return [*ops, Matmul("context", s, d, s, b * heads)]


def _core_backward(t: Transformer, p: LayerShare, stack: Stack) -> list[Op]:
    e = stack.element_bytes
    b, s, d = p.rows, t.sequence, t.hidden // t.heads
    heads = max(1, t.heads // p.tensor)
    if stack.fused_attention:
        return [Attention("attention gradient", ATTENTION_BACKWARD * _attention_flops(t, p), s)]
    scores = float(b * heads * s * s)
    ops: list[Op] = [Matmul("context: left", s, s, d, b * heads), Matmul("context: right", s, d, s, b * heads)]
    if stack.dropout:
        ops.append(Streaming("attention dropout gradient", (2 * e + 1) * scores))
    ops.append(Streaming("softmax gradient", (stack.softmax_bytes + e) * scores))
    return [*ops, Matmul("scores: left", s, d, s, b * heads), Matmul("scores: right", s, d, s, b * heads)]


def layer_forward(t: Transformer, p: LayerShare, stack: Stack) -> list[Op]:
    """Lists the kernels of one layer's forward pass on one rank, in order."""
    e = stack.element_bytes
    T, h, f, w = p.rows * t.sequence, t.hidden, t.inner, p.tensor
    whole = float(T * h)
    own = whole / w if p.sequence_parallel else whole  # what normalisations, dropouts and residual sums work on
    drop = (3 * e + (1 if stack.dropout else 0)) * own
    rows, own_experts = expert_rows(t, p)
    qkv, first = qkv_width(t, p), t.products_per_network - 1
    return [
        Streaming("norm 1", stack.norm_bytes * own),
        *_enter(p, whole, stack, "qkv"),
        Matmul("qkv", T, qkv, h, weights=True),
        *_bias(stack, float(T) * qkv),
        *_core_forward(t, p, stack),
        Streaming("heads together", 2 * e * whole / w),
        Matmul("projection", T, h, h // w, weights=True),
        *_leave(p, whole, stack, "projection"),
        *_pointwise("dropout 1", drop, stack),
        Streaming("norm 2", stack.norm_bytes * own),
        *_enter(p, whole, stack, "feed forward 1"),
        *_routing(t, p, stack),
        *_shared_forward(t, p, stack),
        Matmul("feed forward 1", rows, first * f // w, h, own_experts, weights=True),
        *_pointwise("activation", (1 + first) * e * rows * own_experts * float(f) / w, stack),
        Matmul(LAST_PRODUCT, rows, h, f // w, own_experts, weights=True),
        *_leave(p, whole, stack, LAST_PRODUCT),
        *_pointwise("dropout 2", drop, stack),
    ]


def layer_backward(t: Transformer, p: LayerShare, stack: Stack) -> list[Op]:
    """Lists the kernels of one layer's backward pass on one rank, including recomputed ones, in order."""
    e = stack.element_bytes
    T, h, f, w = p.rows * t.sequence, t.hidden, t.inner, p.tensor
    whole = float(T * h)
    own = whole / w if p.sequence_parallel else whole
    # Gradient of the dropout, and of the bias before it. Without dropout nothing is left of it: the sum copies nothing.
    drop_1 = _pointwise("dropout 1 gradient", (3 * e + 1) * own, stack) if stack.dropout else []
    drop_2 = _pointwise("dropout 2 gradient", (3 * e + 1) * own, stack) if stack.dropout else []
    norm = (NORM_BACKWARD * stack.norm_bytes + 3 * e) * own  # and the sum with the residual's gradient
    gradients = stack.accumulate_bytes
    rows, own_experts = expert_rows(t, p)
    qkv, first = qkv_width(t, p), t.products_per_network - 1
    again: list[Op] = []
    if p.recompute == "full":
        again = layer_forward(t, p, stack)
        if stack.drops_unneeded:
            again = again[: next(at for at, op in enumerate(again) if op.name == LAST_PRODUCT)]
    elif p.recompute == "selective":
        again = _repeated(t, p, stack)
    return [
        *again,
        *drop_2,
        *_regather(p, whole, stack, "feed forward 2: input"),
        Matmul("feed forward 2: input", rows, f // w, h, own_experts, weights=True),
        Matmul("feed forward 2: weight", f // w, h, rows, own_experts, weights=True),
        *_accumulate(gradients, float(f) * h / w * own_experts),
        # Reads the gradient, and writes one, for each first product; reads what went into the activation and came out.
        *_pointwise("activation gradient", (2 + 2 * first) * e * rows * own_experts * float(f) / w, stack),
        *_regather(p, whole, stack, "feed forward 1: input"),
        Matmul("feed forward 1: input", rows, h, first * f // w, own_experts, weights=True),
        Matmul("feed forward 1: weight", first * f // w, h, rows, own_experts, weights=True),
        *_back(p, whole, stack, "feed forward 1: weight"),
        *_accumulate(gradients, float(first * f) * h / w * own_experts),
        *_shared_backward(t, p, stack),
        *_routing(t, p, stack),
        *_routing(t, p, stack),
        Streaming("norm 2 gradient", norm, 3),
        *drop_1,
        *_regather(p, whole, stack, "projection: input"),
        Matmul("projection: input", T, h // w, h, weights=True),
        Matmul("projection: weight", h // w, h, T, weights=True),
        *_accumulate(gradients, float(h) * h / w),
        Streaming("heads apart", 2 * e * whole / w),
        *_core_backward(t, p, stack),
        Streaming("qkv together", 3.0 * e * T * qkv, 2),
        *_regather(p, whole, stack, "qkv: input"),
        Matmul("qkv: input", T, h, qkv, weights=True),
        Matmul("qkv: weight", qkv, h, T, weights=True),
        *_back(p, whole, stack, "qkv: weight"),
        *_accumulate(gradients, float(qkv) * h),
        Streaming("norm 1 gradient", norm, 3),
    ]


def qkv_width(t: Transformer, p: LayerShare) -> int:
    """Returns a rank's width of queries, keys and values; heads of keys that are fewer than ranks lie on several."""
    keys = max(t.key_width // p.tensor, t.hidden // t.heads)
    return t.hidden // p.tensor + 2 * keys


def shared_rows(t: Transformer, p: LayerShare) -> int:
    """Returns the rows that the experts of all tokens get together."""
    return p.rows * t.sequence * t.shared_experts


def _shared_forward(t: Transformer, p: LayerShare, stack: Stack) -> list[Op]:
    """Lists the products of experts that all tokens go through, as one wide network; none without them."""
    if not t.shared_experts:
        return []
    T, h, f, first = p.rows * t.sequence, t.hidden, t.shared_experts * t.inner // p.tensor, t.products_per_network - 1
    return [
        Matmul("shared 1", T, first * f, h, weights=True),
        *_pointwise("shared activation", (1.0 + first) * stack.element_bytes * T * f, stack),
        Matmul("shared 2", T, h, f, weights=True),
    ]


def _shared_backward(t: Transformer, p: LayerShare, stack: Stack) -> list[Op]:
    if not t.shared_experts:
        return []
    T, h, f, first = p.rows * t.sequence, t.hidden, t.shared_experts * t.inner // p.tensor, t.products_per_network - 1
    return [
        Matmul("shared 2: input", T, f, h, weights=True),
        Matmul("shared 2: weight", f, h, T, weights=True),
        *_pointwise("shared activation gradient", (2.0 + 2 * first) * stack.element_bytes * T * f, stack),
        Matmul("shared 1: input", T, h, first * f, weights=True),
        Matmul("shared 1: weight", first * f, h, T, weights=True),
        *_accumulate(stack.accumulate_bytes, (1.0 + first) * f * h),
    ]


def _repeated(t: Transformer, p: LayerShare, stack: Stack) -> list[Op]:
    """Lists what selective recomputation repeats: the scores and softmax, and the stack's part of the other kernels."""
    core = [] if stack.fused_attention else _core_forward(t, p, stack)
    if not stack.selective_part:
        return core
    again: list[Op] = []
    for op in layer_forward(t, p, stack):
        if isinstance(op, Matmul) and op.weights:  # of so many rows: a part of the products
            again.append(replace(op, m=max(1, round(op.m * stack.selective_part))))
        elif isinstance(op, Streaming) and op.name not in ("softmax", "attention dropout"):
            again.append(replace(op, moved_bytes=op.moved_bytes * stack.selective_part))
    return [*again, *core]


def expert_rows(t: Transformer, p: LayerShare) -> tuple[int, int]:
    """Returns (tokens of one expert, experts of a rank) if tokens are balanced; without experts (all tokens, 1)."""
    tokens = p.rows * t.sequence
    if not t.experts:
        return tokens, 1
    return -(-tokens * t.top * p.experts // t.experts), max(1, t.experts // p.experts)


def _routing(t: Transformer, p: LayerShare, stack: Stack) -> list[Op]:
    """Lists the kernels of the router, and those that copy (read, write) tokens to and from the buffers of the
    all-to-all.
    """
    e = stack.element_bytes
    if not t.experts:
        return []
    tokens = p.rows * t.sequence
    copied = 2.0 * 2 * e * tokens * t.top * t.hidden
    return [Matmul("router", tokens, t.experts, t.hidden, weights=True), Streaming("dispatch, combine", copied, 2)]


def _enter(p: LayerShare, elements: float, stack: Stack, product: str) -> list[Op]:
    """Lists what comes before a column-parallel product: nothing, or the gather of the sequence."""
    if not p.sequence_parallel or p.tensor == 1:
        return []
    return [Collective("gather", "all_gather", stack.element_bytes * elements, *_in_pieces(stack, product))]


def _leave(p: LayerShare, elements: float, stack: Stack, product: str) -> list[Op]:
    """Lists what comes after a row-parallel product: the sum, whole or scattered over the sequence."""
    e = stack.element_bytes
    if p.tensor == 1:
        return []
    if not p.sequence_parallel:
        return [Collective("sum", "all_reduce", e * elements)]
    return [Collective("sum", "reduce_scatter", e * elements, *_in_pieces(stack, product))]


def _in_pieces(stack: Stack, product: str) -> tuple[tuple[str, ...], float]:
    """Returns what hides a sequence-parallel collective, and the part of it that nothing hides."""
    hidden = stack.hides_sequence_parallel
    return ((product,), 1.0 - hidden) if hidden and product else ((), 0.0)


def _back(p: LayerShare, elements: float, stack: Stack, weight: str) -> list[Op]:
    """Lists the all-reduce of a column-parallel product's input gradients, which some stacks overlap with the weight's
    gradient.
    """
    e = stack.element_bytes
    if p.tensor == 1:
        return []
    kind = "reduce_scatter" if p.sequence_parallel else "all_reduce"
    return [Collective("sum of gradients", kind, e * elements, (weight,) if stack.hides_tensor_parallel else ())]


def _regather(p: LayerShare, elements: float, stack: Stack, product: str) -> list[Op]:
    """Lists the gathers of a product's operand (or output's gradient) in a sequence-parallel backward pass.

    Row-parallel products gather the output's gradient before both products; column-parallel ones gather the input,
    which only the weight's gradient needs, behind the input's gradient.
    """
    e = stack.element_bytes
    if not p.sequence_parallel or p.tensor == 1:
        return []
    column = product.startswith(("feed forward 1", "qkv"))
    if not column:
        return [Collective("gather again", "all_gather", e * elements, *_in_pieces(stack, product))]
    over = (product,) if stack.hides_tensor_parallel else ()
    return [Collective("gather again", "all_gather", e * elements, over)]


def _bias(stack: Stack, elements: float) -> list[Op]:
    e = stack.element_bytes
    return [Streaming("bias", 2 * e * elements)] if stack.separate_bias else []


def _pointwise(name: str, moved_bytes: float, stack: Stack) -> list[Op]:
    """Lists one fused pointwise kernel, or the separate kernels that the stack runs instead."""
    return [Streaming(name, moved_bytes * stack.pointwise_passes, stack.pointwise_kernels)]


def _accumulate(bytes_per_parameter: float, parameters: float) -> list[Op]:
    """Lists the kernel that adds the weight's gradient to that of earlier micro-batches."""
    return [Streaming("accumulate", bytes_per_parameter * parameters)] if bytes_per_parameter else []


def embedding_forward(t: Transformer, p: LayerShare, stack: Stack) -> list[Op]:
    """Lists the kernels of the embedding: rows of the (split) table, their sum over ranks, positions, dropout."""
    e = stack.element_bytes
    elements = float(p.rows * t.sequence * t.hidden)
    return [
        Streaming("rows", 2 * e * elements, 4),
        *_leave(p, elements, stack, ""),
        Streaming("positions and dropout", (5 * e + 1) * elements, 3),
    ]


def embedding_backward(t: Transformer, p: LayerShare, stack: Stack) -> list[Op]:
    """Lists the kernels that add gradients of rows into a dense gradient of the table, which is zeroed first."""
    e = stack.element_bytes
    elements = float(p.rows * t.sequence * t.hidden)
    table = float(t.vocabulary) * t.hidden / p.tensor
    return [
        *([Collective("gather", "all_gather", e * elements)] if p.sequence_parallel and p.tensor > 1 else []),
        Streaming("rows gradient", 6 * e * elements + (e + stack.accumulate_bytes) * table, 5),
    ]


def head_forward(t: Transformer, p: LayerShare, stack: Stack) -> list[Op]:
    """Lists the head's kernels: last normalisation, logits over the (split) vocabulary, cross-entropy in float32."""
    T, v = p.rows * t.predicted, t.vocabulary // p.tensor
    whole = float(T * t.hidden)
    ops: list[Op] = [
        Streaming("last norm", stack.norm_bytes * (whole / p.tensor if p.sequence_parallel else whole)),
        *_enter(p, whole, stack, ""),
        Matmul("logits", T, v, t.hidden),
        Streaming("loss", stack.loss_forward_bytes * T * v, 8),
    ]
    if p.tensor > 1:
        ops += [
            Collective(name, "all_reduce", float(FLOAT_BYTES) * T)
            for name in ("largest", "sum of exponentials", "label's logit")
        ]
    return ops


def head_backward(t: Transformer, p: LayerShare, stack: Stack) -> list[Op]:
    """Lists the kernels of the gradients of the loss, of both operands of the logits, and of the last normalisation."""
    T, v = p.rows * t.predicted, t.vocabulary // p.tensor
    whole = float(T * t.hidden)
    return [
        Streaming("loss gradient", stack.loss_backward_bytes * T * v, 4),
        Matmul("logits: input", T, t.hidden, v),
        Matmul("logits: weight", v, t.hidden, T),
        *_back(p, whole, stack, "logits: weight"),
        *_accumulate(stack.accumulate_bytes, float(v) * t.hidden),
        Streaming("last norm gradient", NORM_BACKWARD * stack.norm_bytes * whole, 2),
    ]


def edges_forward(t: Transformer, p: LayerShare, stack: Stack, first: bool, last: bool) -> list[Op]:
    """Lists the kernels of a chunk's forward pass outside its layers: the embedding of the first, the head of the last
    chunk.
    """
    return [*(embedding_forward(t, p, stack) if first else []), *(head_forward(t, p, stack) if last else [])]


def edges_backward(t: Transformer, p: LayerShare, stack: Stack, first: bool, last: bool) -> list[Op]:
    """Lists the kernels of a chunk's backward pass outside its layers."""
    return [*(head_backward(t, p, stack) if last else []), *(embedding_backward(t, p, stack) if first else [])]
