"""Describes a decoder-only transformer by its hyper-parameters, and one rank's share of a layer."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from whale.errors import PlanError
from whale.ir.strategy import Count, Recompute

Amount = Annotated[int, Meta(ge=0)]
Switch = Annotated[int, Meta(ge=0, le=1)]
# Of Adam per parameter: a float32 copy of it and two moments (Rajbhandari et al., "ZeRO", SC 2020, section 3).
OPTIMIZER_BYTES = 12
COPY_BYTES = 4  # of them, the copy in float32


VOCABULARY_STEP = 128  # Megatron-LM pads the vocabulary to a multiple of it, so that products divide into tiles


class Transformer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The hyper-parameters. `vocabulary` is the padded one; output logits use the embedding's weights unless `untied`.

    `kv_heads`: heads of keys and values, which groups of queries' heads share (0: each has its own; 1: multi-query).
    `gated`: 1 where a feed-forward network has a second first product that gates the first (SwiGLU, GeGLU).
    `shared_experts`: experts that every token goes through besides `top` of `experts`.
    `experts`: feed-forward networks of each layer, of which a token goes through `top` (0: one that is no expert).
    `predicted_tokens`: of a sequence, whose logits are computed (0: all; in BERT's training, the masked words).
    `state_bytes`: of the optimizer per parameter, a float32 copy included (Adam 12; 4 without moments, as Adafactor).
    """

    layers: Count
    hidden: Count
    heads: Count
    sequence: Count
    vocabulary: Count
    feed_forward: Amount = 0  # 0: 4 x hidden
    experts: Amount = 0
    top: Count = 1
    state_bytes: Amount = OPTIMIZER_BYTES
    predicted_tokens: Amount = 0
    kv_heads: Amount = 0
    gated: Switch = 0
    untied: Switch = 0
    shared_experts: Amount = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "vocabulary", "top"):
            if getattr(self, name) < 1:
                raise PlanError(f"a transformer's {name} must be positive", given=getattr(self, name))
        if self.top > max(1, self.experts):
            raise PlanError(
                "a token goes through more experts than there are",
                given=f"top={self.top}, experts={self.experts}",
                expected=f"top of at most {max(1, self.experts)}",
            )
        if self.hidden % self.heads:
            raise PlanError("hidden is not a multiple of heads", given=f"{self.hidden} and {self.heads}")
        if self.kv_heads and self.heads % self.kv_heads:
            raise PlanError("heads are not a multiple of kv_heads", given=f"{self.heads} and {self.kv_heads}")
        if self.shared_experts and not self.experts:
            raise PlanError("shared_experts are for models with experts", given=self.shared_experts)

    @property
    def inner(self) -> int:
        """Returns the width of a feed-forward network."""
        return self.feed_forward or 4 * self.hidden

    @property
    def key_width(self) -> int:
        """Returns the width of all keys, or of all values, of a token."""
        return self.hidden * (self.kv_heads or self.heads) // self.heads

    @property
    def products_per_network(self) -> int:
        """Returns the matrices of a feed-forward network."""
        return 3 if self.gated else 2

    @property
    def attention_elements(self) -> int:
        """Counts the elements of the matrices of one layer's attention: queries, keys, values, projection."""
        return 2 * self.hidden * (self.hidden + self.key_width)

    @property
    def network_elements(self) -> int:
        """Counts the elements of the matrices of one feed-forward network, or of one expert."""
        return self.products_per_network * self.hidden * self.inner

    @property
    def predicted(self) -> int:
        """Returns the tokens of a sequence whose logits are computed."""
        return self.predicted_tokens or self.sequence

    def state_bytes_of(self, element_bytes: int) -> int:
        """Returns the optimizer's bytes per parameter; float32 parameters need no float32 copy, which is subtracted."""
        return self.state_bytes - (min(COPY_BYTES, self.state_bytes) if element_bytes >= COPY_BYTES else 0)

    @property
    def layer_parameters(self) -> int:
        """Counts the weights and biases of one layer: matrices and vectors; with experts, of all of them."""
        return self.dense_parameters + self.expert_parameters

    @property
    def dense_parameters(self) -> int:
        """Counts the parameters of one layer that every token goes through; the choice of experts included."""
        h = self.hidden
        attention = self.attention_elements + 6 * h + 2 * self.key_width  # biases, and two normalisations' vectors
        if self.experts:
            return attention + h * self.experts + self.shared_experts * self._network_parameters
        return attention + self._network_parameters

    @property
    def _network_parameters(self) -> int:
        return self.network_elements + self.hidden + (self.products_per_network - 1) * self.inner

    @property
    def expert_parameters(self) -> int:
        """Counts the parameters of all experts of one layer."""
        return self.experts * self._network_parameters

    @property
    def embedding_parameters(self) -> int:
        """Counts the parameters of the table of tokens; the logits use its weights, or as many of their own."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Counts all parameters, positions and the last normalisation included."""
        return (
            self.layers * self.layer_parameters
            + self.embedding_parameters * (2 if self.untied else 1)
            + self.sequence * self.hidden
            + 2 * self.hidden
        )

    def step_flops(self, batch: int, recompute: str = "none") -> float:
        """Counts the FLOPs of a step as Narayanan et al. (SC 2021), with the feed-forward networks' own width.

        3 or, with full recompute, 4 B s l (8 h^2 + 4 h f + 4 s h) + 6 B s h V: their 72 or 96 B s l h^2 (1 + s/6h) for
        f = 4 h; for other layers, two for each element of their matrices. Experts count as tokens go through them.
        """
        b, s, layers, h, v = batch, self.sequence, self.layers, self.hidden, self.vocabulary
        networks = self.top + self.shared_experts if self.experts else 1
        each = 2 * (self.attention_elements + networks * self.network_elements + h * self.experts) + 4 * s * h
        return (4 if recompute == "full" else 3) * float(b * s * layers * each) + 6 * b * self.predicted * h * v


class LayerShare(msgspec.Struct, frozen=True):
    """The share of a layer that one rank has: a part of its tensors, rows, and of its experts.

    Attributes:
        tensor: ranks that divide tensors; rows: of a micro-batch; experts: ranks that divide a layer's experts.
    """

    tensor: int = 1
    rows: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    experts: int = 1


def padded_vocabulary(words: int, tensor: int = 1) -> int:
    """Returns the padded vocabulary, of which each tensor-parallel rank has a multiple of `VOCABULARY_STEP`."""
    each = VOCABULARY_STEP * tensor
    return -(-words // each) * each
