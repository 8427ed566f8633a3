"""Describes a decoder-only transformer by its hyper-parameters, and the share of a layer that one rank computes."""

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
MOST_LAYERS = 4096  # costs are computed and kept for every layer


VOCABULARY_STEP = 128  # Megatron-LM pads the vocabulary to a multiple of it, so that products divide into tiles


class Transformer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Represents a decoder-only transformer by its hyper-parameters.

    Widths are numbers of elements; 0 stands for the default that is given in parentheses.

    Attributes:
        layers, hidden, heads: number of layers, width of the residual stream, number of query heads.
        sequence: tokens of a sequence (a row of the batch).
        vocabulary: size of the vocabulary after padding (see `padded_vocabulary`).
        feed_forward: inner width of a feed-forward network (0: 4 x hidden).
        experts: number of routed experts of each layer, feed-forward networks of which a token goes through `top` (0:
            one dense network).
        top: number of routed experts for each token.
        state_bytes: optimizer state per parameter in bytes, float32 master copy included (Adam 12; 4 for an optimizer
            without moments, as Adafactor).
        predicted_tokens: tokens of a sequence whose logits are computed (0: all; in BERT's training, the masked words).
        kv_heads: number of key and value heads, each shared by a group of query heads (0: as many as heads; 1:
            multi-query).
        gated: 1 if feed-forward networks have a third matrix that gates the first (SwiGLU, GeGLU).
        untied: 1 if the output projection has weights of its own, 0 if it uses the embedding's.
        shared_experts: number of experts that every token goes through in addition to `top` of `experts`.
        head_width: width of a head's queries and keys (0: hidden / heads).
        value_width: width of a head's values (0: as its queries).
        latent: width to which keys and values are compressed (multi-head latent attention, DeepSeek-AI, "DeepSeek-V2",
            2024, section 2.1; 0: no latent attention).
        query_latent: width to which queries are compressed (0: not compressed); only with `latent`.
        rope_width: width of the rotary part of each head's queries, and of the one rotary key that all heads share, in
            addition to `head_width`; only with `latent`.
        window: number of tokens up to its own that a token attends to (0: all).
        window_period: every so many layers, one attends to all tokens in spite of `window` (0: none does).
        dense_layers: number of first layers that have a dense network of width `dense_feed_forward` instead of experts.
        relu: 1 if the activation function is max(0, x), whose gradient needs only its result.
        rotary: 1 if positions are rotations of queries and keys (RoPE), 0 if they are a trained table.
        dropout: 1 if the model is trained with dropout although the stack's models mostly are not (GPT-3 in
            Megatron-Core).
        expert_groups: number of groups of experts for routing limited to groups (0: none; DeepSeek-AI, "DeepSeek-V3",
            2024, section 2.1.2, node-limited routing).
        top_groups: number of these groups in which a token's experts may be.
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
                raise PlanError(
                    f"a transformer's {name} must be positive",
                    given=f"{name}={getattr(self, name)}",
                    expected="a whole number of at least 1",
                    action=f"give another {name} in the model's description",
                )
        if self.layers > MOST_LAYERS:
            raise PlanError(
                "a model of so many layers cannot be planned",
                given=f"layers={self.layers}",
                expected=f"layers of at most {MOST_LAYERS:,}",
                action="give fewer layers in the model's description",
            )
        if self.top > max(1, self.experts):
            raise PlanError(
                "a token goes through more experts than there are",
                given=f"top={self.top}, experts={self.experts}",
                expected=f"top of at most {max(1, self.experts)}",
                action="change top, the experts for each token, or experts, those of each layer",
            )
        if self.hidden % self.heads and not self.head_width:
            raise PlanError(
                "hidden is not a multiple of heads",
                given=f"hidden={self.hidden}, heads={self.heads}",
                action="change one of them, or give head_width, if heads have a width of their own",
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise PlanError(
                "heads are not a multiple of kv_heads",
                given=f"heads={self.heads}, kv_heads={self.kv_heads}",
                action="change kv_heads to a divisor of heads, or leave it out if every head has keys of its own",
            )
        if self.latent and self.kv_heads:
            raise PlanError(
                "latent attention cannot be combined with kv_heads: every head has its own keys and values",
                given=f"latent={self.latent}, kv_heads={self.kv_heads}",
                action="leave out kv_heads or latent",
            )
        if (self.query_latent or self.rope_width) and not self.latent:
            raise PlanError(
                "query_latent and rope_width are for multi-head latent attention, which latent turns on",
                given=f"query_latent={self.query_latent}, rope_width={self.rope_width}, latent=0",
                expected="latent above 0, or neither of the others",
                action="give latent (the width of the compressed keys and values), or leave out the others",
            )
        if bool(self.expert_groups) != bool(self.top_groups) or self.top_groups > self.expert_groups:
            raise PlanError(
                "top_groups and expert_groups have to be given together, and top_groups must not be larger",
                given=f"expert_groups={self.expert_groups}, top_groups={self.top_groups}",
                expected="top_groups of 1 to expert_groups, or neither of them",
                action="give both (the groups of experts, and the groups that a token may use), or leave both out",
            )
        for name in ("shared_experts", "dense_layers", "expert_groups"):
            if getattr(self, name) and not self.experts:
                raise PlanError(
                    f"{name} can be given only for a model with experts (mixture of experts)",
                    given=f"{name}={getattr(self, name)}, experts=0",
                    action=f"give experts, or leave out {name}",
                )
        if self.dense_layers and not (self.dense_feed_forward and self.dense_layers < self.layers):
            raise PlanError(
                "dense_layers must be fewer than layers and need dense_feed_forward, the width of their networks",
                given=f"dense_layers={self.dense_layers}, dense_feed_forward={self.dense_feed_forward}",
                expected=f"dense_layers below {self.layers}, and dense_feed_forward above 0",
                action="correct both in the model's description, or leave both out if every layer has experts",
            )
        if self.window_period and not self.window:
            raise PlanError(
                "window_period can be given only for a model with window (sliding-window attention)",
                given=f"window_period={self.window_period}, window=0",
                action="give window, the tokens that a token attends to, or leave out window_period",
            )

    @property
    def inner(self) -> int:
        """Returns the inner width of a feed-forward network (or expert)."""
        return self.feed_forward or 4 * self.hidden

    @property
    def key_head(self) -> int:
        """Returns the width of one head's queries and keys, rotary part included."""
        return (self.head_width or self.hidden // self.heads) + self.rope_width

    @property
    def value_head(self) -> int:
        """Returns the width of one head's values."""
        return self.value_width or self.head_width or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """Returns the width of a token's queries, all heads together."""
        return self.heads * self.key_head

    @property
    def output_width(self) -> int:
        """Returns the width of a token's attention output, all heads together, before the projection."""
        return self.heads * self.value_head

    @property
    def keys_width(self) -> int:
        """Returns the width of a token's keys and values together, all key-value heads."""
        heads = self.kv_heads or self.heads
        return heads * (self.key_head + self.value_head)

    @property
    def products_per_network(self) -> int:
        """Returns the number of weight matrices of a feed-forward network: 2, or 3 if it is gated."""
        return 3 if self.gated else 2

    @property
    def latent_elements(self) -> int:
        """Counts the weights that project to latent queries, keys and values; every tensor-parallel rank has all of
        them.
        """
        if not self.latent:
            return 0
        return self.hidden * (self.query_latent + self.latent + self.rope_width)

    @property
    def attention_elements(self) -> int:
        """Counts the matrix weights of one layer's attention: queries, keys, values and projection."""
        out = self.output_width * self.hidden
        if not self.latent:
            return self.hidden * (self.query_width + self.keys_width) + out
        queries = (self.query_latent or self.hidden) * self.query_width
        keys = self.latent * self.heads * (self.key_head - self.rope_width + self.value_head)
        return self.latent_elements + queries + keys + out

    @property
    def network_elements(self) -> int:
        """Counts the matrix weights of one feed-forward network, or of one expert."""
        return self.products_per_network * self.hidden * self.inner

    @property
    def predicted(self) -> int:
        """Returns the number of tokens of a sequence whose logits are computed."""
        return self.predicted_tokens or self.sequence

    @property
    def attended(self) -> float:
        """Returns the number of (query, key) token pairs of a sequence that attention computes, averaged over layers.

        Of a sequence of s tokens, a causal mask leaves s^2 / 2 pairs, and a window of w tokens w (s - w / 2).
        """
        s, w = float(self.sequence), float(min(self.window or self.sequence, self.sequence))
        whole, windowed = s * s / 2, w * (s - w / 2)
        if not self.window_period:
            return windowed
        full = self.layers // self.window_period
        return (full * whole + (self.layers - full) * windowed) / self.layers

    def state_bytes_of(self, element_bytes: int) -> int:
        """Returns the optimizer state per parameter, in bytes, for parameters of `element_bytes`.

        Parameters that are float32 themselves need no float32 master copy, which is then subtracted.
        """
        return self.state_bytes - (min(COPY_BYTES, self.state_bytes) if element_bytes >= COPY_BYTES else 0)

    @property
    def dense(self) -> Transformer:
        """Returns this model without experts: all layers have the dense feed-forward network of the first layers."""
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
        """Counts the parameters of one layer, all experts included."""
        return self.dense_parameters + self.expert_parameters

    @property
    def dense_parameters(self) -> int:
        """Counts the parameters of one layer that every token goes through, the router included, routed experts
        excluded.
        """
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
        """Counts the parameters of the token embedding; an untied output projection has as many again."""
        return self.vocabulary * self.hidden

    @property
    def position_parameters(self) -> int:
        """Counts the parameters of the position embedding; 0 with rotary positions."""
        return 0 if self.rotary else self.sequence * self.hidden

    @property
    def parameters(self) -> int:
        """Counts all parameters of the model."""
        first = self.dense_layers * self.dense.layer_parameters if self.dense_layers else 0
        return (
            first
            + (self.layers - self.dense_layers) * self.layer_parameters
            + self.embedding_parameters * (2 if self.untied else 1)
            + self.position_parameters
            + 2 * self.hidden
        )

    def step_flops(self, batch: int, recompute: str = "none") -> float:
        """Counts the FLOPs of one training step of `batch` sequences, as Narayanan et al. (SC 2021) do, for any
        feed-forward width.

        3 or, with full recompute, 4 B s l (8 h^2 + 4 h f + 4 s h) + 6 B s h V: their 72 or 96 B s l h^2 (1 + s/6h) for
        f = 4 h; for other layers, two FLOPs per token and matrix weight. Of experts, those count that a token goes
        through. Attention counts both halves of a causal mask, as they do, but not the tokens outside a window.
        """
        times = 4 if recompute == "full" else 3
        first = self.dense_layers * self.dense._layer_flops if self.dense_layers else 0.0
        layers = first + (self.layers - self.dense_layers) * self._layer_flops
        return times * float(batch) * layers + 6 * batch * self.predicted * self.hidden * self.vocabulary

    @property
    def _layer_flops(self) -> float:
        """Counts the FLOPs of one sequence's forward pass through one layer."""
        networks = self.top + self.shared_experts if self.experts else 1
        elements = self.attention_elements + networks * self.network_elements + self.hidden * self.experts
        widths = self.heads * (self.key_head + self.value_head)
        return 2.0 * self.sequence * elements + 4.0 * self.attended * widths


class LayerShare(msgspec.Struct, frozen=True):
    """Represents the share of a layer that one rank computes under tensor, context, expert and sequence parallelism.

    Attributes:
        tensor: tensor-parallel degree.
        rows: sequences of a micro-batch on one replica.
        recompute: which activations are recomputed.
        sequence_parallel: whether Megatron's sequence parallelism is used.
        experts: number of ranks that divide a layer's experts.
        context: number of ranks that divide the tokens of each row.
    """

    tensor: int = 1
    rows: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    experts: int = 1
    context: int = 1

    def tokens(self, t: Transformer) -> int:
        """Returns the number of tokens of a micro-batch on a rank, not divided by sequence parallelism."""
        return -(-self.rows * t.sequence // self.context)

    def predicted(self, t: Transformer) -> int:
        """Returns the number of tokens of a micro-batch on a rank whose logits are computed."""
        return -(-self.rows * t.predicted // self.context)


def padded_vocabulary(words: int, tensor: int = 1) -> int:
    """Returns the vocabulary padded so that each tensor-parallel rank has a multiple of `VOCABULARY_STEP` words."""
    each = VOCABULARY_STEP * tensor
    return -(-words // each) * each
