"""Describes training software: which kernels are fused, which communication is hidden, the host's cost of a launch.

Data: hardware/stacks.yaml, each entry with its sources.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Annotated

import msgspec
from msgspec import Meta

from cost_model.hardware import catalogue
from cost_model.kernels.compute import SIZE_BYTES
from whale.errors import ClusterError

NotNegative = Annotated[float, Meta(ge=0)]


class Stack(catalogue.Entry, frozen=True):
    """One software stack.

    Attributes:
        dtype: of activations and matrix products.
        weights_dtype: of the products with layers' weights, where it is another one; quantise_bytes: memory traffic per
            operand element to convert to it, scales and transposes included.
        fused_attention: attention never writes its scores.
        dropout: whether the model is trained with dropout.
        softmax_bytes: memory traffic of scale, mask and softmax, per score.
        norm_bytes: memory traffic of a normalisation's forward pass, per element.
        separate_bias: the bias of the first attention product is a kernel of its own.
        pointwise_passes, pointwise_kernels: traffic (of one fused kernel = 1) and kernels of bias, dropout, sum.
        hides_tensor_parallel: collectives of the tensor-parallel backward pass run behind matrix products.
        scatter_gather: tensor-parallel ranks each send a part to the next stage, which gathers it.
        hides_point_to_point: stages do not wait for their sends.
        accumulate_bytes: memory traffic per parameter to add one micro-batch's gradient.
        gradient_bytes: of one gradient element in the data-parallel reduction.
        gradient_copy_bytes: memory traffic per parameter around that reduction.
        hides_data_parallel: the reduction starts during the last backward pass; what ZeRO 2 and 3 gather and reduce
            runs beside kernels. Else kernels wait for it.
        shards_tensors: ZeRO 2 and 3 move each tensor by a collective of its own, whose pieces are copied one by one
            (else a layer's at once, in place), and gather weights once more for what is computed again.
        optimizer_bytes: memory traffic per parameter of unscaling, clipping, update and casts.
        loss_forward_bytes, loss_backward_bytes: memory traffic per logit.
        logit_bytes: held per logit at the peak, when the backward pass begins.
        host_us: what the host spends per kernel launch of the forward pass, framework included.
        backward_host_us: the same in the backward pass, which the framework runs without the script.
        collective_host_us: the same per collective.
        pass_host_us: once per forward or backward pass of a chunk: its batch, synchronising with neighbours.
        update_kernels: launches per parameter tensor after the last backward pass.
        step_ms: once per step: data, loss to the host, logging.
    """

    dtype: str
    fused_attention: bool
    dropout: bool
    softmax_bytes: NotNegative
    norm_bytes: NotNegative
    separate_bias: bool
    pointwise_passes: NotNegative
    pointwise_kernels: Annotated[int, Meta(ge=1)]
    hides_tensor_parallel: bool
    scatter_gather: bool
    hides_point_to_point: bool
    accumulate_bytes: NotNegative
    gradient_bytes: NotNegative
    gradient_copy_bytes: NotNegative
    hides_data_parallel: bool
    shards_tensors: bool
    optimizer_bytes: NotNegative
    loss_forward_bytes: NotNegative
    loss_backward_bytes: NotNegative
    logit_bytes: NotNegative
    host_us: NotNegative
    backward_host_us: NotNegative
    collective_host_us: NotNegative
    pass_host_us: NotNegative
    update_kernels: NotNegative
    step_ms: NotNegative
    weights_dtype: str | None = None
    quantise_bytes: NotNegative = 0.0

    @property
    def element_bytes(self) -> int:
        """Returns the bytes of an element of activations, weights and gradients."""
        return math.ceil(SIZE_BYTES[self.dtype])


@cache
def stacks() -> Mapping[str, Stack]:
    """Returns all stacks by name."""
    return catalogue.make_table(msgspec.convert(catalogue.read("stacks.yaml"), list[Stack]))


def stack(name: str) -> Stack:
    """Returns the stack of a name; raises ClusterError, with the most similar known name, if there is none."""
    found = stacks().get(name)
    if found is None:
        raise ClusterError("there is no such software stack", given=name, **catalogue.suggest_nearest(name, stacks()))
    return found
