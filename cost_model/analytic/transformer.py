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
MOST_LAYERS = 4096  # each is looked at


VOCABULARY_STEP = 128  # Megatron-LM pads the vocabulary to a multiple of it, so that products divide into tiles


class Transformer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The hyper-parameters. `vocabulary` is the padded one; output logits use the embedding's weights unless `untied`.

    `kv_heads`: heads of keys and values, which groups of queries' heads share (0: each has its own; 1: multi-query).
    `head_width`: of a head's queries and keys (0: hidden / heads); `value_width`: of its values (0: as its queries).
    `latent`: width to which keys and values are projected, from which each head's are made (multi-head latent
    attention, DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1; 0: none). `query_latent`: the same of queries.
    `rope_width`: of a head's queries and of the one key of all heads that have positions, beside `head_width` (only
    with `latent`).
    `window`: tokens before its own that a token attends to (0: all); `window_period`: every so manyth layer attends to
    all tokens nevertheless (0: none does).
    `gated`: 1 where a feed-forward network has a second first product that gates the first (SwiGLU, GeGLU).
    `relu`: 1 where its activation is max(0, x), whose gradient needs no more than its result.
    `experts`: feed-forward networks of each layer, of which a token goes through `top` (0: one that is no expert).
    `expert_groups`: in which experts lie side by side; a token's are in `top_groups` of them (0: in any; DeepSeek-AI,
    "DeepSeek-V3", 2024, section 2.1.2, node-limited routing).
    `shared_experts`: experts that every token goes through besides `top` of `experts`.
    `dense_layers`: first layers that have one network of width `dense_feed_forward` instead of experts.
    `rotary`: 1 where positions are rotations of queries and keys (RoPE), and not a table of parameters.
    `dropout`: 1 where training drops activations under a stack whose models mostly do not (GPT-3 in Megatron-Core).
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
    head_width: Amount = 0
    value_width: Amount = 0
    latent: Amount = 0
    query_latent: Amount = 0
    rope_width: Amount = 0
    window: Amount = 0
    window_period: Amount = 0
    dense_layers: Amount = 0
    dense_feed_forward: Amount = 0
    relu: Switch = 0
    rotary: Switch = 0
    dropout: Switch = 0
    expert_groups: Amount = 0
    top_groups: Amount = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "vocabulary", "top"):
            if getattr(self, name) < 1:
                raise PlanError(f"a transformer's {name} must be positive", given=getattr(self, name))
        if self.layers > MOST_LAYERS:
            raise PlanError(
                "a model of that size cannot be planned",
                given=f"layers={self.layers}",
                expected=f"layers of at most {MOST_LAYERS:,}",
            )
        if self.top > max(1, self.experts):
            raise PlanError(
                "a token goes through more experts than there are",
                given=f"top={self.top}, experts={self.experts}",
                expected=f"top of at most {max(1, self.experts)}",
            )
        if self.hidden % self.heads and not self.head_width:
            raise PlanError(
                "hidden is not a multiple of heads",
                given=f"{self.hidden} and {self.heads}",
                action="give head_width, if heads have a width of their own",
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise PlanError("heads are not a multiple of kv_heads", given=f"{self.heads} and {self.kv_heads}")
        if self.latent and self.kv_heads:
            raise PlanError("latent attention has keys and values for every head", given=f"kv_heads={self.kv_heads}")
        if (self.query_latent or self.rope_width) and not self.latent:
            raise PlanError(
                "query_latent and rope_width are for multi-head latent attention, which latent turns on",
                given=f"query_latent={self.query_latent}, rope_width={self.rope_width}, latent=0",
                expected="latent above 0, or neither of the others",
                action="give latent (the width of the compressed keys and values), or leave out the others",
            )
        if bool(self.expert_groups) != bool(self.top_groups) or self.top_groups > self.expert_groups:
            raise PlanError(
                "a token's experts are in some of the groups",
                given=f"expert_groups={self.expert_groups}, top_groups={self.top_groups}",
                expected="top_groups of 1 to expert_groups, or neither",
            )
        for name in ("shared_experts", "dense_layers", "expert_groups"):
            if getattr(self, name) and not self.experts:
                raise PlanError(f"{name} are for models with experts", given=getattr(self, name))
        if self.dense_layers and not (self.dense_feed_forward and self.dense_layers < self.layers):
            raise PlanError(
                "dense_layers are some of the layers and have a width of their own",
                given=f"dense_layers={self.dense_layers}, dense_feed_forward={self.dense_feed_forward}",
                expected=f"fewer than {self.layers} layers, with dense_feed_forward",
            )
        if self.window_period and not self.window:
            raise PlanError("window_period is for models with a window", given=self.window_period)

    @property
    def inner(self) -> int:
        """Returns the width of a feed-forward network."""
        return self.feed_forward or 4 * self.hidden

    @property
    def key_head(self) -> int:
        """Returns the width of a head's queries and keys, with their part for positions."""
        return (self.head_width or self.hidden // self.heads) + self.rope_width

    @property
    def value_head(self) -> int:
        """Returns the width of a head's values."""
        return self.value_width or self.head_width or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """Returns the width of all queries of a token."""
        return self.heads * self.key_head

    @property
    def output_width(self) -> int:
        """Returns the width of what all heads return for a token."""
        return self.heads * self.value_head

    @property
    def keys_width(self) -> int:
        """Returns the width of a token's keys and values, as attention takes them."""
        heads = self.kv_heads or self.heads
        return heads * (self.key_head + self.value_head)

    @property
    def products_per_network(self) -> int:
        """Returns the matrices of a feed-forward network."""
        return 3 if self.gated else 2

    @property
    def latent_elements(self) -> int:
        """Counts the elements of the matrices that project to the latent widths, which tensor parallelism copies."""
        if not self.latent:
            return 0
        return self.hidden * (self.query_latent + self.latent + self.rope_width)

    @property
    def attention_elements(self) -> int:
        """Counts the elements of the matrices of one layer's attention: queries, keys, values, projection."""
        out = self.output_width * self.hidden
        if not self.latent:
            return self.hidden * (self.query_width + self.keys_width) + out
        queries = (self.query_latent or self.hidden) * self.query_width
        keys = self.latent * self.heads * (self.key_head - self.rope_width + self.value_head)
        return self.latent_elements + queries + keys + out

    @property
    def network_elements(self) -> int:
        """Counts the elements of the matrices of one feed-forward network, or of one expert."""
        return self.products_per_network * self.hidden * self.inner

    @property
    def predicted(self) -> int:
        """Returns the tokens of a sequence whose logits are computed."""
        return self.predicted_tokens or self.sequence

    @property
    def attended(self) -> float:
        """Returns the pairs of tokens of a sequence of which one attends to the other, in the mean layer.

        A causal mask leaves half of all pairs; a window w of them w (s - w / 2).
        """
        s, w = float(self.sequence), float(min(self.window or self.sequence, self.sequence))
        whole, windowed = s * s / 2, w * (s - w / 2)
        if not self.window_period:
            return windowed
        full = self.layers // self.window_period
        return (full * whole + (self.layers - full) * windowed) / self.layers

    def state_bytes_of(self, element_bytes: int) -> int:
        """Returns the optimizer's bytes per parameter; float32 parameters need no float32 copy, which is subtracted."""
        return self.state_bytes - (min(COPY_BYTES, self.state_bytes) if element_bytes >= COPY_BYTES else 0)

    @property
    def dense(self) -> Transformer:
        """Returns this model with the network of its first layers in all of them."""
        return msgspec.structs.replace(
            self,
            feed_forward=self.dense_feed_forward,
            experts=0,
            top=1,
            shared_experts=0,
            dense_layers=0,
            dense_feed_forward=0,
            expert_groups=0,
            top_groups=0,
        )

    @property
    def layer_parameters(self) -> int:
        """Counts the weights and biases of one layer: matrices and vectors; with experts, of all of them."""
        return self.dense_parameters + self.expert_parameters

    @property
    def dense_parameters(self) -> int:
        """Counts the parameters of one layer that every token goes through; the choice of experts included."""
        h = self.hidden
        attention = self.attention_elements + 5 * h + self.query_width + self.keys_width  # biases, two normalisations
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
    def position_parameters(self) -> int:
        """Counts the parameters of the table of positions; none where these are rotations."""
        return 0 if self.rotary else self.sequence * self.hidden

    @property
    def parameters(self) -> int:
        """Counts all parameters, positions and the last normalisation included."""
        first = self.dense_layers * self.dense.layer_parameters if self.dense_layers else 0
        return (
            first
            + (self.layers - self.dense_layers) * self.layer_parameters
            + self.embedding_parameters * (2 if self.untied else 1)
            + self.position_parameters
            + 2 * self.hidden
        )

    def step_flops(self, batch: int, recompute: str = "none") -> float:
        """Counts the FLOPs of a step as Narayanan et al. (SC 2021), with the feed-forward networks' own width.

        3 or, with full recompute, 4 B s l (8 h^2 + 4 h f + 4 s h) + 6 B s h V: their 72 or 96 B s l h^2 (1 + s/6h) for
        f = 4 h; for other layers, two for each element of their matrices. Experts count as tokens go through them.
        Both halves of a causal mask count, as they do there; what a window leaves out does not.
        """
        times = 4 if recompute == "full" else 3
        first = self.dense_layers * self.dense._layer_flops if self.dense_layers else 0.0
        layers = first + (self.layers - self.dense_layers) * self._layer_flops
        return times * float(batch) * layers + 6 * batch * self.predicted * self.hidden * self.vocabulary

    @property
    def _layer_flops(self) -> float:
        """Counts the FLOPs of a sequence's forward pass through one layer."""
        networks = self.top + self.shared_experts if self.experts else 1
        elements = self.attention_elements + networks * self.network_elements + self.hidden * self.experts
        widths = self.heads * (self.key_head + self.value_head)
        return 2.0 * self.sequence * elements + 4.0 * self.attended * widths


class LayerShare(msgspec.Struct, frozen=True):
    """The share of a layer that one rank has: a part of its tensors, rows, their tokens, and of its experts.

    Attributes:
        tensor: ranks that divide tensors; rows: of a micro-batch; experts: ranks that divide a layer's experts.
        context: ranks that divide the tokens of each row.
    """

    tensor: int = 1
    rows: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    experts: int = 1
    context: int = 1

    def tokens(self, t: Transformer) -> int:
        """Returns the tokens that a rank has, before sequence parallelism divides some tensors."""
        return -(-self.rows * t.sequence // self.context)

    def predicted(self, t: Transformer) -> int:
        """Returns those of them whose logits are computed."""
        return -(-self.rows * t.predicted // self.context)


def padded_vocabulary(words: int, tensor: int = 1) -> int:
    """Returns the padded vocabulary, of which each tensor-parallel rank has a multiple of `VOCABULARY_STEP`."""
    each = VOCABULARY_STEP * tensor
    return -(-words // each) * each
