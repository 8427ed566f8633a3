"""Computes the memory of one rank that trains a transformer, in bytes.

Activations: Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022, table 2.
Optimizer and gradients: Rajbhandari et al., "ZeRO", SC 2020, section 3 (2 + 2 + 12 bytes per parameter with
mixed-precision Adam).
"""

from __future__ import annotations

import msgspec

from cost_model.analytic.layer_costs import LayerCosts
from cost_model.analytic.stacks import Stack
from cost_model.analytic.transformer import LayerShare, Transformer
from cost_model.analytic.transformer_kernels import count_shared_rows, expert_rows
from cost_model.kernels.compute import CHANNELS
from whale.ir.strategy import DeviceGroup, Offload

# A caching allocator rounds sizes and splits blocks; the same study finds a few per cent.
FRAGMENTATION = 0.03
WORKSPACE_BYTES = 32e6  # of matrix products (cuBLAS documentation, recommended workspace on Hopper)
# Layers whose unsharded parameters are in memory at a time, if they are gathered or fetched for each pass: the one in
# progress and the next (Zhao et al., "PyTorch FSDP", 2023, section 3.4, rate limiter).
LAYERS_AHEAD = 2
# Chunks whose unsharded gradients are in memory at a time, if a chunk's are reduced while the next one's are computed.
CHUNKS_SUMMED = 2
COMMUNICATOR_BYTES = 4e6 * CHANNELS  # NCCL's buffers: NCCL_BUFFSIZE (4 MiB) for each channel of a communicator


class Footprint(msgspec.Struct, frozen=True):
    """Holds the bytes of memory that one rank needs, by use; activations are those at the peak of the schedule.

    Attributes:
        workspace_bytes: scratch memory of matrix products.
        communication_bytes: buffers of communicators, and layers' parameters while they are gathered or fetched.
        base_bytes: memory of the framework itself.
    """

    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    workspace_bytes: float
    communication_bytes: float
    base_bytes: float

    @property
    def total_bytes(self) -> float:
        """Returns the sum of all bytes; all but the framework's own grow by the allocator's fragmentation."""
        held = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes
        held += self.activations_bytes + self.workspace_bytes + self.communication_bytes
        return held * (1 + FRAGMENTATION) + self.base_bytes


def held_tensors(t: Transformer, p: LayerShare, stack: Stack) -> dict[str, float]:
    """Returns the bytes that one layer keeps of one micro-batch for its backward pass, without recompute, by module.

    Keys are the modules that recompute can repeat (`Stack.selective`), besides others that only full recompute repeats.

    Together s b h (10 + (8 + 4 f/h)/t + 5 a s / (h t)) in half precision with dropout: 4 f/h for two tensors of a
    feed-forward network's inner width f (16 where f = 4 h; three tensors with a gate); all of it over t with sequence
    parallelism; no term in s with fused attention. With experts, f is the inner width times the tokens of a rank's
    experts. Operands of products with weights that are kept in a smaller dtype count in that dtype
    (`Stack.kept_operand_bytes`), as does the input of the activation function (`Stack.kept_inner_bytes`).
    """
    e, w, tokens = stack.element_bytes, p.tensor, float(p.tokens(t))
    operand = e if stack.kept_operand_bytes is None else stack.kept_operand_bytes
    along = w if p.sequence_parallel else 1  # ranks that divide the tensors between products
    rows, own = expert_rows(t, p)
    routed = float(rows * own + count_shared_rows(t, p))
    into = t.products_per_network - 1 - (1 if t.relu else 0)  # tensors that go into the activation and are kept
    inner = (e if stack.kept_inner_bytes is None else stack.kept_inner_bytes) * into * routed * t.inner / w
    heads = tokens * t.output_width / w
    masks = (2 / along if stack.dropout else 0.0) * tokens * t.hidden  # of one byte
    # Tokens as they came to the experts, operands of the first product, and went back, which the router's weights need.
    sent = (operand + (0 if stack.weighs_experts_inside else e)) * rows * own * t.hidden if t.experts else 0.0
    return {
        "input": e * tokens * t.hidden / along,
        "norms": 2 * operand * tokens * t.hidden / along,
        "queries": e * tokens * ((t.query_width + t.keys_width) / w + _latent_width(t)),
        # The result of attention, which its backward pass reads, and the product after it, in its own dtype.
        "attention": (e if operand == e else e + operand) * heads,
        "residual": e * tokens * t.hidden / along + masks,
        "network": inner + sent,
        "activation": operand * routed * t.inner / w,
        "core": _score_bytes(t, p, stack),
    }


def _latent_width(t: Transformer) -> int:
    """Returns the width of the compressed queries, keys and values of latent attention, which every tensor-parallel
    rank holds.
    """
    return t.query_latent + t.latent + t.rope_width if t.latent else 0


def kept_and_repeated(t: Transformer, p: LayerShare, stack: Stack) -> tuple[float, float]:
    """Returns (bytes kept, bytes recomputed) of a layer's activations of one micro-batch, for the chosen recompute.

    Full recompute keeps the layer's input only. Selective recompute drops the tensors of the stack's modules
    (`Stack.selective`), and the fraction `Stack.selective_part` of all others but the layer's input.
    """
    held = held_tensors(t, p, stack)
    whole = sum(held.values())
    if p.recompute == "full":
        return held["input"], whole - held["input"]
    if p.recompute != "selective":
        return whole, 0.0
    modules = {*stack.selective, *(("activation",) if "network" in stack.selective else ())}
    named = sum(size for name, size in held.items() if name in modules)
    others = sum(size for name, size in held.items() if name not in modules and name not in ("input", "core"))
    dropped = named + stack.selective_part * others
    return whole - dropped, dropped


def layer_activation_bytes(t: Transformer, p: LayerShare, stack: Stack) -> float:
    """Returns the bytes that one layer keeps of one micro-batch for its backward pass."""
    return kept_and_repeated(t, p, stack)[0]


def _score_bytes(t: Transformer, p: LayerShare, stack: Stack) -> float:
    """Returns the bytes of attention scores that a layer keeps: after the softmax and, with dropout, its mask and
    result.
    """
    if stack.fused_attention:
        return 0.0
    each = 2 * stack.element_bytes + 1 if stack.dropout else stack.element_bytes
    return each * float(p.tokens(t) * t.sequence) * t.heads / p.tensor


def working_bytes(t: Transformer, p: LayerShare, stack: Stack) -> float:
    """Returns the bytes that the layer in progress needs during its backward pass: recomputed activations, and
    gradients.

    All activations that were dropped are there again while the layer is recomputed. Kept activations are not counted.
    """
    return kept_and_repeated(t, p, stack)[1] + gradient_bytes(t, p, stack)


def gradient_bytes(t: Transformer, p: LayerShare, stack: Stack) -> float:
    """Returns the bytes of the gradients of a layer's output and input, which its backward pass holds at the same
    time.
    """
    return 2.0 * stack.element_bytes * p.tokens(t) * t.hidden


def head_bytes(t: Transformer, p: LayerShare, stack: Stack) -> float:
    """Returns the bytes of the logits and of the tensors that the loss derives from them."""
    return stack.logit_bytes * p.predicted(t) * t.vocabulary / p.tensor


def state_bytes(
    parameters: float, zero: int, copies: int, optimizer_bytes: float, element_bytes: int, gradient_bytes: float
) -> tuple[float, float, float]:
    """Returns the bytes of (parameters, gradients, optimizer state) of a rank under a ZeRO level.

    Args:
        parameters: number of parameters of the rank's layers, before ZeRO shards them.
        zero: level 0 to 3.
        copies: number of ranks with the same parameters, over which ZeRO shards them.
        optimizer_bytes: optimizer state per parameter.
        element_bytes: bytes of a parameter.
        gradient_bytes: bytes of a parameter's gradient.
    """
    split = float(copies)
    return (
        element_bytes * parameters / (split if zero >= 3 else 1),
        gradient_bytes * parameters / (split if zero >= 2 else 1),
        optimizer_bytes * parameters / (split if zero >= 1 else 1),
    )


def states(
    layers: LayerCosts, ranges: tuple[tuple[int, int], ...], replicas: int, zero: int
) -> tuple[float, float, float]:
    """Returns the bytes of (parameters, gradients, optimizer state) of a rank with the layers of these [low, high)
    ranges.

    They are counted the same whether they are on the device or offloaded to the host.

    Args:
        replicas: number of replicas over which ZeRO shards all but experts.
        zero: ZeRO level 0 to 3.
    """
    each = layers.state_bytes, layers.element_bytes, layers.gradient_bytes
    dense = state_bytes(layers.parameters_of(ranges), zero, replicas, *each)
    if not layers.experts:
        return dense
    own, copies = layers.experts_of(ranges), layers.expert_copies
    experts = state_bytes(own, zero, copies, *each)
    return dense[0] + experts[0], dense[1] + experts[1], dense[2] + experts[2]


def count_offloaded_bytes(
    layers: LayerCosts, ranges: tuple[tuple[int, int], ...], replicas: int, zero: int, offload: Offload
) -> float:
    """Returns the bytes of one rank's states in its host's memory, under an offload setting.

    With `offload="optimizer"` gradients count too: they are copied to the host for the update.
    """
    held, gradients, optimizer = states(layers, ranges, replicas, zero)
    return {"none": 0.0, "optimizer": gradients + optimizer, "parameters": held + gradients + optimizer}[offload]


def part_memory(
    layers: LayerCosts,
    ranges: tuple[tuple[int, int], ...],
    part: DeviceGroup,
    replicas: int,
    live: int,
    zero: int,
    stages: int,
    offload: Offload = "none",
    forward_first: bool = False,
) -> Footprint:
    """Returns the memory footprint of one rank of a stage's device group.

    Args:
        layers: costs of the model's layers on this group's ranks.
        ranges: the stage's layers, [low, high) for each chunk.
        part: the device group.
        replicas: replicas of the whole stage over which ZeRO shards states.
        live: number of micro-batch chunks whose activations are held at the schedule's peak.
        zero: ZeRO level 0 to 3.
        stages: number of stages of the strategy.
        forward_first: whether all forward passes of the stage come before its first backward pass.
    """
    once = zero >= 2 and stages > 1 and layers.shards_stages != "pass"
    if once:  # between passes, parameters and gradients are unsharded, as under ZeRO 1
        zero = 1
    held, gradients, optimizer = states(layers, ranges, replicas, zero)
    if once and forward_first and layers.shards_stages == "chunk":  # of the chunk in progress, and of the one before
        gradients *= min(1.0, CHUNKS_SUMMED / len(ranges))
    whole = 0.0  # bytes of layers that are in memory unsharded while they are used
    if zero >= 3 and replicas > 1:  # parameters and gradients of the layer in progress and of those gathered ahead
        own = layers.layer_parameters_of(ranges)
        if layers.experts and layers.expert_copies > 1:
            own += layers.experts_of(ranges) / max(1, sum(high - low for low, high in ranges))
        whole = LAYERS_AHEAD * (layers.element_bytes + layers.gradient_bytes) * own
    if offload != "none":
        optimizer = 0.0
    if offload == "parameters":  # two layers' parameters, fetched, and their gradients, on the way back
        count = max(1, sum(high - low for low, high in ranges))
        whole = max(whole, LAYERS_AHEAD * (held + gradients) / count)
        held = gradients = 0.0
    each = sum([layers.held_bytes[high] - layers.held_bytes[low] for low, high in ranges]) / len(ranges)
    activations = live * each + layers.working_bytes
    if ranges[-1][1] == layers.count:
        activations += layers.last_bytes
    groups = (part.tensor > 1) + (replicas > 1) + (stages > 1)
    buffers = groups * COMMUNICATOR_BYTES + whole
    return Footprint(held, gradients, optimizer, activations, WORKSPACE_BYTES, buffers, layers.base_bytes)
