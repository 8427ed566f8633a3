"""Bytes that one rank holds while it trains a transformer.

Activations: Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022, table 2.
Optimizer and gradients: Rajbhandari et al., "ZeRO", SC 2020, section 3 (2 + 2 + 12 bytes per parameter with
mixed-precision Adam).
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_model.described.describe import Parallel, Transformer, expert_rows
from cost_model.described.stacks import Stack

# The framework's own: CUDA context, library handles and workspaces (Gao et al., "Estimating GPU memory consumption of
# deep learning models", FSE 2020, give 0.5 to 1 GB on V100; newer contexts are larger).
BASE_BYTES = 1.0e9
# A caching allocator rounds sizes and splits blocks; the same study finds a few per cent.
FRAGMENTATION = 0.03
WORKSPACE_BYTES = 32e6  # of matrix products (cuBLAS documentation, recommended workspace on Hopper)
CHANNEL_BYTES = 4e6 * 16  # NCCL's buffers: NCCL_BUFFSIZE (4 MiB) for each of about 16 channels and communicator


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one rank; `activations` at the peak of the schedule."""

    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    workspace_bytes: float
    communication_bytes: float
    base_bytes: float

    @property
    def total_bytes(self) -> float:
        held = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes
        held += self.activations_bytes + self.workspace_bytes + self.communication_bytes
        return held * (1 + FRAGMENTATION) + self.base_bytes


def layer_activation_bytes(t: Transformer, p: Parallel, stack: Stack) -> float:
    """What one layer keeps of one micro-batch for its backward pass (bytes, half precision).

    s b h (10 + 24/t + 5 a s / (h t)) without recompute, 34/t with sequence parallelism; without the term in s with
    selective recompute or fused attention; 2 s b h with full recompute.
    """
    sbh = float(t.sequence * p.micro_batch * t.hidden)
    w = p.tensor
    if p.recompute == "full":
        return 2 * sbh / (w if p.sequence_parallel else 1)
    routed = 0.0
    if t.experts:  # tokens as they were sent and came back, two tensors of the inner width in place of those of 4 h
        rows, own = expert_rows(t, p)
        routed = rows * own * (4.0 * t.hidden + 4.0 * t.inner / w) - 16 * sbh / w
    linear = 34 / w if p.sequence_parallel else 10 + 24 / w
    scores = 5 * t.heads * t.sequence / t.hidden / w
    if p.recompute == "selective" or stack.fused_attention:
        scores = 0.0
    if not stack.dropout:  # masks of one byte: two on s b h, one on the scores
        linear -= 2 / w if p.sequence_parallel else 2
        scores *= 4 / 5
    return sbh * (linear + scores) + max(0.0, routed)


def working_bytes(t: Transformer, p: Parallel, stack: Stack) -> float:
    """What the layer in progress needs besides: all its activations when they are computed again, or its gradients."""
    if p.recompute != "full":
        return 4.0 * t.sequence * p.micro_batch * t.hidden
    plain = Parallel(
        tensor=p.tensor, micro_batch=p.micro_batch, global_batch=p.micro_batch, sequence_parallel=p.sequence_parallel
    )
    return layer_activation_bytes(t, plain, stack)


def head_bytes(t: Transformer, p: Parallel, stack: Stack) -> float:
    """Logits, and what the loss keeps or makes of them."""
    return stack.logit_bytes * t.sequence * p.micro_batch * t.vocabulary / p.tensor


def state_bytes(parameters: float, zero: int, data: int, element_bytes: int = 2) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer state (float32 copy, two moments) of a rank, under ZeRO 0 to 3."""
    split = float(data)
    return (
        element_bytes * parameters / (split if zero >= 3 else 1),
        element_bytes * parameters / (split if zero >= 2 else 1),
        12.0 * parameters / (split if zero >= 1 else 1),
    )


def footprint(
    t: Transformer, p: Parallel, stack: Stack, parameters: float, live_bytes: float, last: bool, units: int = 1
) -> Footprint:
    """The bytes of one rank.

    Args:
        parameters: that the rank's stage and tensor-parallel part hold, whole data-parallel group.
        live_bytes: activations that layers hold at the schedule's peak.
        last: the stage computes logits.
        units: layers whose whole parameters and gradients are gathered at once under ZeRO-3.
    """
    held, gradients, optimizer = state_bytes(parameters, p.zero, p.data)
    activations = live_bytes + working_bytes(t, p, stack)
    if last:
        activations += head_bytes(t, p, stack)
    gathered = 2 * 2.0 * t.layer_parameters / p.tensor * units if p.zero >= 3 and p.data > 1 else 0.0
    groups = (p.tensor > 1) + (p.data > 1) + (p.pipeline > 1)
    return Footprint(
        held, gradients, optimizer, activations, WORKSPACE_BYTES, groups * CHANNEL_BYTES + gathered, BASE_BYTES
    )
