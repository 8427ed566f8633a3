"""Lists the kernels and collectives that one rank runs for a layer of a decoder-only transformer, and outside its
layers.

Shapes follow Megatron-LM (Shoeybi et al., 2019; Narayanan et al., SC 2021): T = micro-batch x sequence tokens, h
hidden, t tensor-parallel ranks. The bytes of pointwise kernels are those of Korthikanti et al., "Reducing activation
recomputation in large transformer models", 2022, section 4, plus the bytes that each kernel writes: `2 e` for an
element that is read and written, `3 e` for two that are read and one that is written, 1 for a dropout mask, where e is
the bytes of an element. The last number of a `Streaming` is how many kernels eager frameworks launch for it.

Kernels are structs, which are made several times faster than frozen dataclasses: a search makes hundreds of thousands.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from cost_model.analytic.stacks import Stack
from cost_model.analytic.transformer import LayerShare, Transformer


class Matmul(msgspec.Struct, frozen=True):
    """Represents `batch` matrix products [m, k] x [k, n].

    Attributes:
        name: by which a `Collective` refers to the product that hides it.
        weights: whether an operand or the result is a layer's weights or their gradient; only such products run in FP8.
        cast_before: whether its operands were already cast to the weights' dtype for an earlier product.
    """

    name: str
    m: int
    n: int
    k: int
    batch: int = 1
    weights: bool = False
    cast_before: bool = False


class Streaming(msgspec.Struct, frozen=True):
    """Represents kernels that are bound by memory: `kernels` launches that together read and write `moved_bytes`."""

    name: str
    moved_bytes: float
    kernels: int = 1


class Attention(msgspec.Struct, frozen=True):
    """Represents a fused attention kernel.

    Attributes:
        flops: FLOPs that are executed; a causal mask skips half of them.
        sequence: tokens of the sequence that the kernel works on, on which its efficiency depends.
    """

    name: str
    flops: float
    sequence: int


class Collective(msgspec.Struct, frozen=True):
    """Represents a collective of the tensor-parallel or context-parallel group.

    Attributes:
        kind: a key of `collectives.COLLECTIVES`, e.g. `all_reduce`.
        tensor_bytes: bytes of the whole tensor.
        over: names of the products or attention kernels that the collective overlaps.
        exposed: fraction of the collective that does not overlap them.
        along: the group that communicates.
    """

    name: str
    kind: str
    tensor_bytes: float
    over: tuple[str, ...] = ()
    exposed: float = 0.0
    along: Literal["tensor", "context"] = "tensor"


class Idle(msgspec.Struct, frozen=True):
    """Represents seconds in which the device waits for the host, which waits for a result of the device."""

    name: str
    seconds: float


Op = Matmul | Streaming | Attention | Collective | Idle
LAST_PRODUCT = "feed forward 2"  # of a layer's forward pass
FLOAT_BYTES = 4  # of single precision, in which the loss is computed
# Products of the fused attention's backward pass for each of its forward pass: five instead of two, since the scores
# are computed again (Dao et al., "FlashAttention", 2022, algorithm 4).
ATTENTION_BACKWARD = 2.5
# Seconds of fused attention with dropout for those without: each score draws a random number in both passes, which
# nothing hides. Ma et al., "Reducing the cost of dropout in Flash-Attention by hiding RNG with GEMM", 2024: a fifth of
# a block of Llama 3 on GH100 in float8, 1.3 ps a score; without dropout both passes take 3.6 ps at flash-3's rate
# (heads of 128).
ATTENTION_DROPOUT = 1.7
# Bytes of keys and values, and of their gradients, that go round in context parallelism's backward pass, for those of
# the forward pass.
ROUND_BACKWARD = 2.0
# Kernels by which a layer chooses experts, counts tokens, and copies them there and back: those of Megatron-Core's
# core/transformer/moe (router.py, token_dispatcher.py) with fused permutation. TopK and scores 4, balance 6, counts 8,
# row maps and permutations 4 x 2. Gradients go the same ways by known maps, and through scores and balance.
ROUTING_KERNELS, ROUTING_KERNELS_BACK = 26, 10
# Memory traffic of a normalisation's backward pass for that of its forward pass, which reads and writes x once: x and
# dy are read twice, dx is written.
NORM_BACKWARD = 2.5


def _pair_flops(t: Transformer, p: LayerShare, stack: Stack) -> float:
    """Returns the FLOPs of fused attention for one rank's heads: two products over all token pairs that the mask
    leaves.

    With dropout, multiplied by `ATTENTION_DROPOUT` for the time of its random numbers.
    """
    heads = max(1, t.heads // p.tensor)
    flops = 2.0 * p.rows * heads * t.attended * (t.key_head + t.value_head) / p.context
    return flops * (ATTENTION_DROPOUT if stack.dropout else 1.0)


def _block(t: Transformer, p: LayerShare) -> int:
    """Returns the number of tokens of a sequence that one fused attention kernel works on (`Attention.sequence`)."""
    return max(1, min(t.window or t.sequence, t.sequence) // p.context)


def _round(t: Transformer, p: LayerShare, stack: Stack, times: float, over: tuple[str, ...]) -> list[Op]:
    """Lists the ring exchange of keys and values under context parallelism, which overlaps attention; [] without it.

    Each rank passes on the blocks of all others (Liu et al., "Ring attention", 2023, section 3). In the backward pass,
    gradients go round as well, so `times` as many bytes are sent.
    """
    if p.context == 1:
        return []
    width = max(t.keys_width // p.tensor, t.key_head + t.value_head)
    sent = times * stack.element_bytes * float(p.rows) * t.sequence * width
    return [Collective("keys and values round", "all_gather", sent, over, along="context")]


def _core_forward(t: Transformer, p: LayerShare, stack: Stack) -> list[Op]:
    """Lists the kernels of attention between its input and output products: scores, softmax, dropout and context.

    Selective recompute of the module `core` repeats these. With fused attention it is one kernel.
    """
    e = stack.element_bytes
    b, s, own, k, v = p.rows, t.sequence, -(-t.sequence // p.context), t.key_head, t.value_head
    heads = max(1, t.heads // p.tensor)
    if stack.fused_attention:
        round_ = _round(t, p, stack, 1.0, ("attention",))
        return [Attention("attention", _pair_flops(t, p, stack), _block(t, p)), *round_]
    scores = float(b * heads * own * s)
    ops: list[Op] = [Matmul("scores", own, s, k, b * heads), Streaming("softmax", stack.softmax_bytes * scores)]
    if stack.dropout:
        ops.append(Streaming("attention dropout", (2 * e + 1) * scores))
    return [*ops, Matmul("context", own, v, s, b * heads), *_round(t, p, stack, 1.0, ("scores", "context"))]


def _core_backward(t: Transformer, p: LayerShare, stack: Stack) -> list[Op]:
    e = stack.element_bytes
    b, s, own, k, v = p.rows, t.sequence, -(-t.sequence // p.context), t.key_head, t.value_head
    heads = max(1, t.heads // p.tensor)
    if stack.fused_attention:
        back = Attention("attention gradient", ATTENTION_BACKWARD * _pair_flops(t, p, stack), _block(t, p))
        return [back, *_round(t, p, stack, ROUND_BACKWARD, ("attention gradient",))]
    scores = float(b * heads * own * s)
    ops: list[Op] = [Matmul("context: left", own, s, v, b * heads), Matmul("context: right", s, v, own, b * heads)]
    if stack.dropout:
        ops.append(Streaming("attention dropout gradient", (2 * e + 1) * scores))
    ops.append(Streaming("softmax gradient", (stack.softmax_bytes + e) * scores))
    ops += [Matmul("scores: left", own, k, s, b * heads), Matmul("scores: right", s, k, own, b * heads)]
    return [*ops, *_round(t, p, stack, ROUND_BACKWARD, ("context: left", "scores: left"))]


def _widths(t: Transformer, p: LayerShare) -> list[tuple[str, int, int]]:
    """Returns (name, width of a rank's result, width of its operand) of the products that compute queries, keys and
    values.

    If there are fewer key-value heads than tensor-parallel ranks, several ranks compute the same head. Latent
    attention's projections to the latent widths are computed by every rank.
    """
    w = p.tensor
    if not t.latent:
        return [("qkv", t.query_width // w + max(t.keys_width // w, t.key_head + t.value_head), t.hidden)]
    keys = t.heads * (t.key_head - t.rope_width + t.value_head)
    return [
        ("latents", t.query_latent + t.latent + t.rope_width, t.hidden),
        ("queries", t.query_width // w, t.query_latent or t.hidden),
        ("keys and values", keys // w, t.latent),
    ]


def _rotate(t: Transformer, p: LayerShare, stack: Stack) -> list[Op]:
    """Lists the kernel of rotary position embeddings (RoPE), forward or backward, which reads and writes queries and
    keys.

    Multi-head latent attention rotates a part of each head's queries, and one key for all heads.
    """
    if not t.rotary:
        return []
    if t.latent:
        width = (t.heads // p.tensor + 1) * t.rope_width
    else:
        heads = t.heads // p.tensor + max(1, (t.kv_heads or t.heads) // p.tensor)
        width = heads * t.key_head
    return _pointwise("rotation", 2.0 * stack.element_bytes * p.tokens(t) * width, stack)


def layer_forward(t: Transformer, p: LayerShare, stack: Stack) -> list[Op]:
    """Lists the kernels of one layer's forward pass on one rank, in order."""
    e = stack.element_bytes
    T, h, f, w = p.tokens(t), t.hidden, t.inner, p.tensor
    whole = float(T * h)
    own = whole / w if p.sequence_parallel else whole  # what normalisations, dropouts and residual sums work on
    drop = (3 * e + (1 if stack.dropout else 0)) * own
    rows, own_experts = expert_rows(t, p)
    first, heads = t.products_per_network - 1, t.output_width // w
    products = _widths(t, p)
    return [
        Streaming("norm 1", stack.norm_bytes * own),
        *_enter(p, whole, stack, products[0][0]),
        *[Matmul(name, T, wide, deep, weights=True) for name, wide, deep in products],
        *_bias(stack, float(T) * sum(wide for _, wide, _ in products)),
        *_rotate(t, p, stack),
        *_core_forward(t, p, stack),
        Streaming("heads together", 2.0 * e * T * heads),
        Matmul("projection", T, h, heads, weights=True),
        *_leave(p, whole, stack, "projection"),
        *_pointwise("dropout 1", drop, stack),
        Streaming("norm 2", stack.norm_bytes * own),
        *_enter(p, whole, stack, "feed forward 1"),
        *_list_router(t, p),
        *_list_routing(t, p, stack, ROUTING_KERNELS),
        *_list_waits(t, stack),
        *_list_shared_forward(t, p, stack),
        Matmul("feed forward 1", rows, first * f // w, h, own_experts, weights=True),
        *_pointwise("activation", (1 + first) * e * rows * own_experts * float(f) / w, stack),
        Matmul(LAST_PRODUCT, rows, h, f // w, own_experts, weights=True),
        *_leave(p, whole, stack, LAST_PRODUCT),
        *_pointwise("dropout 2", drop, stack),
    ]


def layer_backward(t: Transformer, p: LayerShare, stack: Stack) -> list[Op]:
    """Lists the kernels of one layer's backward pass on one rank, in order, beginning with those that recompute
    activations.
    """
    e = stack.element_bytes
    T, h, f, w = p.tokens(t), t.hidden, t.inner, p.tensor
    whole = float(T * h)
    own = whole / w if p.sequence_parallel else whole
    # Gradients of dropout and of the bias before it. Without dropout there is no kernel: the residual sum passes its
    # gradient on as it is.
    drop_1 = _pointwise("dropout 1 gradient", (3 * e + 1) * own, stack) if stack.dropout else []
    drop_2 = _pointwise("dropout 2 gradient", (3 * e + 1) * own, stack) if stack.dropout else []
    norm = (NORM_BACKWARD * stack.norm_bytes + 3 * e) * own  # and the sum with the residual's gradient
    gradients = stack.accumulate_bytes
    rows, own_experts = expert_rows(t, p)
    first, heads = t.products_per_network - 1, t.output_width // w
    products = _widths(t, p)
    again: list[Op] = []
    if p.recompute == "full":
        again = layer_forward(t, p, stack)
        if stack.drops_unneeded:
            again = again[: next(at for at, op in enumerate(again) if op.name == LAST_PRODUCT)]
    elif p.recompute == "selective":
        again = _list_repeated(t, p, stack)
    return [
        *again,
        *drop_2,
        *_regather(p, whole, stack, "feed forward 2: input"),
        Matmul("feed forward 2: input", rows, f // w, h, own_experts, weights=True),
        Matmul("feed forward 2: weight", f // w, h, rows, own_experts, weights=True, cast_before=True),
        *_accumulate(gradients, float(f) * h / w * own_experts),
        # Reads the gradient, and writes one, for each first product; reads what went into the activation and came out.
        *_pointwise("activation gradient", (2 + 2 * first) * e * rows * own_experts * float(f) / w, stack),
        *_regather(p, whole, stack, "feed forward 1: input"),
        Matmul("feed forward 1: input", rows, h, first * f // w, own_experts, weights=True),
        Matmul("feed forward 1: weight", first * f // w, h, rows, own_experts, weights=True, cast_before=True),
        *_back(p, whole, stack, "feed forward 1: weight"),
        *_accumulate(gradients, float(first * f) * h / w * own_experts),
        *_list_shared_backward(t, p, stack),
        *_list_routing(t, p, stack, ROUTING_KERNELS_BACK),
        *_list_router(t, p),
        *_list_router(t, p),
        Streaming("norm 2 gradient", norm, 3),
        *drop_1,
        *_regather(p, whole, stack, "projection: input"),
        Matmul("projection: input", T, heads, h, weights=True),
        Matmul("projection: weight", heads, h, T, weights=True, cast_before=True),
        *_accumulate(gradients, float(h) * heads),
        Streaming("heads apart", 2.0 * e * T * heads),
        *_core_backward(t, p, stack),
        *_rotate(t, p, stack),
        Streaming("qkv together", 3.0 * e * T * sum(wide for _, wide, _ in products), 2),
        *_regather(p, whole, stack, f"{products[0][0]}: input"),
        *_products_backward(t, p, products, gradients),
        *_back(p, whole, stack, f"{products[0][0]}: weight"),
        Streaming("norm 1 gradient", norm, 3),
    ]


def _products_backward(
    t: Transformer, p: LayerShare, products: list[tuple[str, int, int]], accumulate_bytes: float
) -> list[Op]:
    """Lists the gradients of the products in `products` (queries, keys and values), of both operands, the last product
    first.
    """
    ops: list[Op] = []
    for name, wide, deep in reversed(products):
        ops += [
            Matmul(f"{name}: input", p.tokens(t), deep, wide, weights=True),
            Matmul(f"{name}: weight", wide, deep, p.tokens(t), weights=True, cast_before=True),
            *_accumulate(accumulate_bytes, float(wide) * deep),
        ]
    return ops


def count_shared_rows(t: Transformer, p: LayerShare) -> int:
    """Counts the rows of a rank's tokens in its shared experts: each token counts once per shared expert."""
    return p.tokens(t) * t.shared_experts


def _list_shared_forward(t: Transformer, p: LayerShare, stack: Stack) -> list[Op]:
    """Lists the products of shared experts, which all tokens go through, as those of one wide network; [] without
    any.
    """
    if not t.shared_experts:
        return []
    T, h, f, first = p.tokens(t), t.hidden, t.shared_experts * t.inner // p.tensor, t.products_per_network - 1
    return [
        Matmul("shared 1", T, first * f, h, weights=True),
        *_pointwise("shared activation", (1.0 + first) * stack.element_bytes * T * f, stack),
        Matmul("shared 2", T, h, f, weights=True),
    ]


def _list_shared_backward(t: Transformer, p: LayerShare, stack: Stack) -> list[Op]:
    if not t.shared_experts:
        return []
    T, h, f, first = p.tokens(t), t.hidden, t.shared_experts * t.inner // p.tensor, t.products_per_network - 1
    return [
        Matmul("shared 2: input", T, f, h, weights=True),
        Matmul("shared 2: weight", f, h, T, weights=True, cast_before=True),
        *_pointwise("shared activation gradient", (2.0 + 2 * first) * stack.element_bytes * T * f, stack),
        Matmul("shared 1: input", T, h, first * f, weights=True),
        Matmul("shared 1: weight", first * f, h, T, weights=True, cast_before=True),
        *_accumulate(stack.accumulate_bytes, (1.0 + first) * f * h),
    ]


# The forward kernels of each module that selective recomputation may repeat (`Stack.selective`). The module `core`,
# scores and softmax, is not listed: see `_core_forward`.
MODULES: dict[str, tuple[str, ...]] = {
    "norms": ("norm 1", "norm 2"),
    "activation": ("activation", "shared activation"),
    "queries": ("qkv", "bias", "rotation", "latents", "queries", "keys and values"),
    "network": (
        "router",
        "dispatch, combine",
        "tokens counted",
        "feed forward 1",
        "activation",
        "shared 1",
        "shared activation",
    ),
}


def _list_repeated(t: Transformer, p: LayerShare, stack: Stack) -> list[Op]:
    """Lists the forward kernels that selective recomputation repeats.

    These are the kernels of the stack's modules (`Stack.selective`), and the fraction `Stack.selective_part` of all
    others but softmax and attention dropout.
    """
    core = [] if stack.fused_attention or "core" not in stack.selective else _core_forward(t, p, stack)
    names = {name for module in stack.selective for name in MODULES.get(module, ())}
    if not names and not stack.selective_part:
        return core
    again: list[Op] = []
    for op in layer_forward(t, p, stack):
        if op.name in names:
            again.append(op)
        elif isinstance(op, Matmul) and op.weights and stack.selective_part:  # fewer rows stand for fewer products
            again.append(msgspec.structs.replace(op, m=max(1, round(op.m * stack.selective_part))))
        elif isinstance(op, Streaming) and op.name not in ("softmax", "attention dropout") and stack.selective_part:
            again.append(msgspec.structs.replace(op, moved_bytes=op.moved_bytes * stack.selective_part))
    return [*again, *core]


def expert_rows(t: Transformer, p: LayerShare) -> tuple[int, int]:
    """Returns (tokens per expert, experts per rank), assuming that the router balances tokens; (all tokens, 1) without
    experts.
    """
    tokens = p.tokens(t)
    if not t.experts:
        return tokens, 1
    return -(-tokens * t.top * p.experts // t.experts), max(1, t.experts // p.experts)


def _list_routing(t: Transformer, p: LayerShare, stack: Stack, kernels: int) -> list[Op]:
    """Lists the kernels that route tokens to experts and copy them to and from the all-to-all's buffers; [] without
    experts.
    """
    if not t.experts:
        return []
    tokens = p.tokens(t)
    # Each token is read once and written for each of its experts, and the other way round when they come back.
    passes = 2.0 * (1 + 1 / t.top)
    # Tokens of several experts come from each rank, and go back to it, in an order of their own.
    if p.experts > 1 and t.experts > p.experts and not stack.dispatches_once:
        passes += 2.0 * 2
    copied = passes * stack.element_bytes * tokens * t.top * t.hidden
    return [Streaming("dispatch, combine", copied, kernels)]


def _list_waits(t: Transformer, stack: Stack) -> list[Op]:
    """Lists the time for which the device waits until the host knows how many tokens its experts get; [] without
    experts, or where the host need not know.
    """
    return [Idle("tokens counted", 1e-6 * stack.expert_wait_us)] if t.experts and stack.expert_wait_us else []


def _list_router(t: Transformer, p: LayerShare) -> list[Op]:
    """Lists the router's product, whose result chooses each token's experts; [] without experts."""
    return [Matmul("router", p.tokens(t), t.experts, t.hidden)] if t.experts else []


def _enter(p: LayerShare, elements: float, stack: Stack, product: str) -> list[Op]:
    """Lists the all-gather before a column-parallel product under sequence parallelism; [] without it.

    Args:
        elements: elements of the gathered tensor.
        product: name of the product; "" for the logits, whose operand is gathered in the activations' dtype. Operands
            of products with weights are gathered in the dtype they are multiplied in.
    """
    if not p.sequence_parallel or p.tensor == 1:
        return []
    each = stack.operand_bytes if product else stack.element_bytes
    return [Collective("gather", "all_gather", each * elements, *_in_pieces(stack, product))]


def _leave(p: LayerShare, elements: float, stack: Stack, product: str) -> list[Op]:
    """Lists the collective after a row-parallel product: all-reduce, or reduce-scatter under sequence parallelism."""
    e = stack.element_bytes
    if p.tensor == 1:
        return []
    if not p.sequence_parallel:
        return [Collective("sum", "all_reduce", e * elements)]
    return [Collective("sum", "reduce_scatter", e * elements, *_in_pieces(stack, product))]


def _in_pieces(stack: Stack, product: str) -> tuple[tuple[str, ...], float]:
    """Returns which product hides a sequence-parallel collective, and how much of the collective stays exposed.

    Args:
        product: name of the product that the collective feeds or follows; "": there is none.

    Returns:
        (values for `Collective.over` and `Collective.exposed`): ((product,), 1 - `hides_sequence_parallel`), or ((),
        0.0) if the stack hides nothing.
    """
    hidden = stack.hides_sequence_parallel
    return ((product,), 1.0 - hidden) if hidden and product else ((), 0.0)


def _back(p: LayerShare, elements: float, stack: Stack, weight: str) -> list[Op]:
    """Lists the reduction of a column-parallel product's input gradients over the tensor-parallel group.

    Some stacks overlap it with the product of the weight's gradient, named `weight`.
    """
    e = stack.element_bytes
    if p.tensor == 1:
        return []
    kind = "reduce_scatter" if p.sequence_parallel else "all_reduce"
    return [Collective("sum of gradients", kind, e * elements, (weight,) if stack.hides_tensor_parallel else ())]


def _regather(p: LayerShare, elements: float, stack: Stack, product: str) -> list[Op]:
    """Lists the all-gather of a product's operand or output gradient in a sequence-parallel backward pass; [] without
    it.

    Row-parallel products need the gathered output gradient for both of their gradients. Column-parallel ones gather the
    input, which only the weight's gradient needs, so the collective can overlap the input's gradient.
    """
    each = stack.operand_bytes
    if not p.sequence_parallel or p.tensor == 1:
        return []
    column = product.startswith(("feed forward 1", "qkv", "latents"))
    if not column:
        return [Collective("gather again", "all_gather", each * elements, *_in_pieces(stack, product))]
    over = (product,) if stack.hides_tensor_parallel else ()
    return [Collective("gather again", "all_gather", each * elements, over)]


def _bias(stack: Stack, elements: float) -> list[Op]:
    e = stack.element_bytes
    return [Streaming("bias", 2 * e * elements)] if stack.separate_bias else []


def _pointwise(name: str, moved_bytes: float, stack: Stack) -> list[Op]:
    """Lists a pointwise kernel: fused into one, or as the several kernels that the stack launches instead."""
    return [Streaming(name, moved_bytes * stack.pointwise_passes, stack.pointwise_kernels)]


def _accumulate(bytes_per_parameter: float, parameters: float) -> list[Op]:
    """Lists the kernel that adds a weight's gradient to the sum over earlier micro-batches; [] if the stack has
    none.
    """
    return [Streaming("accumulate", bytes_per_parameter * parameters)] if bytes_per_parameter else []


def embedding_forward(t: Transformer, p: LayerShare, stack: Stack) -> list[Op]:
    """Lists the embedding's kernels: lookup in the vocabulary-parallel table, sum over ranks, positions, dropout."""
    e = stack.element_bytes
    elements = float(p.tokens(t) * t.hidden)
    added = 0 if t.rotary else 3 * e
    dropped = 2 * e + 1 if stack.dropout else 0
    return [
        Streaming("rows", 2 * e * elements, 4),
        *_leave(p, elements, stack, ""),
        *([Streaming("positions and dropout", (added + dropped) * elements, 3)] if added or dropped else []),
    ]


def embedding_backward(t: Transformer, p: LayerShare, stack: Stack) -> list[Op]:
    """Lists the kernels that zero the table's dense gradient and add the gradients of looked-up rows to it."""
    e = stack.element_bytes
    elements = float(p.tokens(t) * t.hidden)
    table = float(t.vocabulary) * t.hidden / p.tensor
    return [
        *([Collective("gather", "all_gather", e * elements)] if p.sequence_parallel and p.tensor > 1 else []),
        Streaming("rows gradient", 6 * e * elements + (e + stack.accumulate_bytes) * table, 5),
    ]


def head_forward(t: Transformer, p: LayerShare, stack: Stack) -> list[Op]:
    """Lists the head's kernels: last normalisation, vocabulary-parallel logits, cross-entropy in float32."""
    T, v = p.predicted(t), t.vocabulary // p.tensor
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
    """Lists the kernels of the head's backward pass: gradients of the loss, of both operands of the logits, of the last
    norm.
    """
    T, v = p.predicted(t), t.vocabulary // p.tensor
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
    """Lists the kernels of a chunk's forward pass outside its layers.

    Args:
        first, last: whether the chunk is the first one, which has the embedding, and the last one, which has the head.
    """
    return [*(embedding_forward(t, p, stack) if first else []), *(head_forward(t, p, stack) if last else [])]


def edges_backward(t: Transformer, p: LayerShare, stack: Stack, first: bool, last: bool) -> list[Op]:
    """Lists the kernels of a chunk's backward pass outside its layers (see `edges_forward`)."""
    return [*(head_backward(t, p, stack) if last else []), *(embedding_backward(t, p, stack) if first else [])]
