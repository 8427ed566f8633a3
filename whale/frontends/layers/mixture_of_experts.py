"""Implements ``wh.layers.MoE``, a mixture of experts: experts are sharded over ranks, tokens reach them by all-
to-alls.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import tensorflow as tf

from whale.annotations import replica, split
from whale.capture.attrs import WIDE
from whale.errors import ProgramError
from whale.frontends.layers.embedding import NEVER_ROUNDED
from whale.runtime.context import find_running
from whale.runtime.scopes import enter_mark

_Dispatch = tuple[tf.Tensor, tf.Tensor | None, Callable[[tf.Tensor], tf.Tensor]]
_CHOICES = ("tokens", "experts")
_BALANCES = ("batch", "group")


class MoE(tf.keras.layers.Layer):  # type: ignore[misc]
    """A mixture-of-experts layer: a router sends each token through some of several feed-forward experts.

    Tokens are dispatched in groups, each with its own capacity. Of inputs [batch, time, width] each row is a group;
    inputs [tokens, width] are divided into ``groups`` groups. The number of groups should be a multiple of the number
    of ranks. In a run the experts are sharded over the ranks, and all-to-alls carry the slots of tokens to the experts
    and back.

    After a call, the variable ``load`` [experts] has the share of the choices that fell on each expert, and ``dropped``
    the share of the choices for which there was no slot. The router's losses are in the layer's ``losses``.

    The router computes in float32 if the layer, or ``precision.compute_dtype``, computes in 16 bits: rounded logits
    would choose other experts.

    Args:
      experts: number of experts.
      hidden: width of an expert's hidden layer.
      top_k: number of experts per token.
      capacity_factor: an expert has this times tokens * top_k / experts slots per group, rounded up; with a factor of
        ``experts / top_k`` no token is dropped. None: all tokens are one group, and each expert has as many slots as
        the fullest one needs, so that no token is dropped. The number of slots is then known only when the step runs,
        so None requires ``choose="tokens"`` and excludes micro-batches.
      choose: "tokens": each token chooses ``top_k`` experts. "experts": each expert chooses as many tokens as it has
        slots.
      groups: number of groups for inputs of rank 2; None: one group.
      shared: hidden width of an additional expert that all tokens go through; 0: there is none.
      balance_weight: weight of the loss that is least if tokens are spread evenly over the experts (Fedus et al.,
        2021).
      balance: whether this loss is computed over the whole "batch", or per "group" and averaged. "batch" needs the
        whole batch before the backward pass, so it excludes micro-batches.
      z_weight: weight of the loss that keeps the router's logits small (Zoph et al., "ST-MoE", 2022).
      noise: standard deviation of the normal noise that is added to the router's logits in training.
      activation: activation of the experts' hidden layer.

    Raises:
      ProgramError: the arguments contradict each other, or inputs do not fit them.
    """

    def __init__(
        self, experts: int, hidden: int, top_k: int = 2, capacity_factor: float | None = 1.25, choose: str = "tokens",
        groups: int | None = None, shared: int = 0, balance_weight: float = 0.01, balance: str = "batch",
        z_weight: float = 0.001, noise: float = 0.0, activation: str | Callable[..., Any] = "relu", **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(**more)
        _check(1 <= top_k <= experts, f"top_k={top_k} of {experts} experts", f"top_k from 1 to {experts}")
        _check(choose in _CHOICES, f"choose={choose!r}", "choose " + " or ".join(map(repr, _CHOICES)))
        _check(balance in _BALANCES, f"balance={balance!r}", "balance " + " or ".join(map(repr, _BALANCES)))
        open_ended = capacity_factor is None
        _check(
            not open_ended or choose == "tokens",
            f"{choose=}, {capacity_factor=}",
            "a number as capacity_factor, or choose='tokens'",
        )
        self.experts, self.hidden, self.top_k, self.capacity_factor = experts, hidden, top_k, capacity_factor
        self.choose, self.groups, self.shared, self.balance = choose, groups, shared, balance
        self.balance_weight, self.z_weight, self.noise = balance_weight, z_weight, noise
        self.activation = tf.keras.activations.get(activation)

    def build(self, shape: Any) -> None:
        """Creates the weights; only the last size of ``shape``, the width, matters."""
        width, experts = int(shape[-1]), self.experts

        def add(name: str, *sizes: int, start: str = "glorot_uniform", trainable: bool = True, **more: Any) -> Any:
            return self.add_weight(name=name, shape=sizes, initializer=start, trainable=trainable, **more)

        self.router = add("router", width, experts, **NEVER_ROUNDED)
        self.into, self.out = add("into", experts, width, self.hidden), add("out", experts, self.hidden, width)
        self.into_bias = add("into_bias", experts, 1, self.hidden, start="zeros")
        self.out_bias = add("out_bias", experts, 1, width, start="zeros")
        if self.shared:
            self.shared_into, self.shared_out = (
                add("shared_into", width, self.shared),
                add("shared_out", self.shared, width),
            )
        self.load = add("load", experts, start="zeros", trainable=False)
        self.dropped = add("dropped", start="zeros", trainable=False)
        super().build(shape)

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Returns the sum of the experts' outputs for each token, weighted by the router, in the shape of
        ``inputs``.
        """
        with _enter_scope(replica):
            x = self._group_tokens(inputs)
            # Rounded to 16 bits, logits would choose other experts, and a sum of ones would end at 256.
            wide = x.dtype if x.dtype.size > 2 else tf.float32
            with _enter_scope(partial(enter_mark, WIDE)):
                logits = tf.einsum("gtd,de->gte", tf.cast(x, wide), tf.cast(tf.convert_to_tensor(self.router), wide))
            if self.noise and training:
                logits += self.noise * tf.random.normal(tf.shape(logits), dtype=logits.dtype)
            chances = tf.nn.softmax(logits)
            if self.capacity_factor is None:
                slots, weights, combine = self._dispatch_dropless(x, chances)
            else:
                each = x.shape[1]
                capacity = min(each, int(-(-self.capacity_factor * each * self.top_k // self.experts)))
                dispatch = self._dispatch_by_experts if self.choose == "experts" else self._dispatch_by_tokens
                slots, weights, combine = dispatch(x, chances, capacity)
        with _enter_scope(split):
            g = "g" if slots.shape.rank == 4 else ""
            inner = tf.einsum(f"{g}ecd,edh->{g}ech", slots, tf.convert_to_tensor(self.into))
            inner = self.activation(inner + tf.convert_to_tensor(self.into_bias))
            applied = tf.einsum(f"{g}ech,ehd->{g}ecd", inner, tf.convert_to_tensor(self.out))
            applied = applied + tf.convert_to_tensor(self.out_bias)
            if weights is not None:  # multiplied on the experts' ranks: otherwise outputs and weights would be sent
                applied = weights[..., None] * applied
        with _enter_scope(replica):
            y = combine(applied)
            if self.shared:
                y += self.activation(x @ tf.convert_to_tensor(self.shared_into)) @ tf.convert_to_tensor(self.shared_out)
            if self.z_weight:
                self.add_loss(self.z_weight * tf.reduce_mean(tf.reduce_logsumexp(logits, -1) ** 2))
            return tf.reshape(y, tf.shape(inputs))

    def _group_tokens(self, inputs: tf.Tensor) -> tf.Tensor:
        if inputs.shape.rank == 3 and self.groups is None:
            return tf.convert_to_tensor(inputs)
        tokens, groups = inputs.shape[0], self.groups or 1
        _check(
            inputs.shape.rank == 2 and tokens is not None and tokens % groups == 0,
            f"inputs {inputs.shape}, groups={self.groups}",
            "inputs [batch, time, width] without groups, or inputs [tokens, width] with groups that divide the tokens",
        )
        return tf.reshape(inputs, [groups, tokens // groups, inputs.shape[-1]])

    def _dispatch_by_tokens(self, x: tf.Tensor, chances: tf.Tensor, capacity: int) -> _Dispatch:
        """Dispatches tokens to the experts that they choose.

        A slot is a place for one token in an expert's batch; an expert has ``capacity`` of them per group.

        Args:
          x: tokens [group, token, width].
          chances: the router's probabilities [group, token, expert].
          capacity: number of slots per group and expert.

        Returns:
          (the tokens in their slots [group, expert, slot, width]; weights of the experts' outputs per slot, or None if
          the function applies them; a function from the experts' outputs, in the shape of the slots, to outputs per
          token).
        """
        shape = tf.shape(x)
        gates, chosen = tf.math.top_k(chances, self.top_k)
        if self.top_k > 1:
            gates /= tf.reduce_sum(gates, -1, keepdims=True)
        taken = tf.zeros([], chances.dtype)  # slots that earlier choices took
        places, counts = [], []
        for i in range(self.top_k):
            one = tf.one_hot(chosen[..., i], self.experts, dtype=chances.dtype)
            places.append(tf.reduce_sum((tf.cumsum(one, 1) - 1 + taken) * one, -1))
            taken += tf.reduce_sum(one, 1, keepdims=True)
            counts.append(one)
        place = tf.stack(places, -1)
        kept = tf.cast(place < capacity, chances.dtype)
        group = tf.broadcast_to(tf.range(shape[0])[:, None, None], tf.shape(chosen))
        index = tf.stack([group, chosen, tf.cast(tf.minimum(place, capacity - 1.0), tf.int32)], -1)
        tokens = x[:, :, None] * tf.cast(kept, x.dtype)[..., None]
        slots = tf.scatter_nd(index, tokens, [shape[0], self.experts, capacity, shape[2]])
        self._tell(chances, counts, tf.reduce_mean(kept, -1))
        weights = tf.cast(gates * kept, x.dtype)[..., None]
        return slots, None, lambda y: tf.reduce_sum(weights * tf.gather_nd(y, index), 2)

    def _dispatch_dropless(self, x: tf.Tensor, chances: tf.Tensor) -> _Dispatch:
        """Dispatches tokens as ``_dispatch_by_tokens``, but as one group, with as many slots as the fullest expert
        needs.
        """
        tokens = tf.reshape(x, [-1, x.shape[-1]])
        gates, chosen = tf.math.top_k(tf.reshape(chances, [-1, self.experts]), self.top_k)
        if self.top_k > 1:
            gates /= tf.reduce_sum(gates, -1, keepdims=True)
        one = tf.one_hot(chosen, self.experts, dtype=tf.int32)
        all_of_them = tf.reduce_sum(one, 1)  # no token chooses an expert twice
        place = tf.reduce_sum((tf.cumsum(all_of_them, 0) - 1)[:, None] * one, -1)
        index = tf.stack([chosen, place], -1)
        capacity = tf.reduce_max(tf.reduce_sum(all_of_them, 0))
        copies = tokens[:, None] * tf.ones([self.top_k, 1], x.dtype)
        slots = tf.scatter_nd(index, copies, tf.stack([self.experts, capacity, x.shape[-1]]))
        share = tf.cast(all_of_them, chances.dtype) / self.top_k
        self._tell(chances, [tf.reshape(share, tf.shape(chances))], tf.ones([], chances.dtype))
        weights = tf.cast(gates, x.dtype)[..., None]
        return slots, None, lambda y: tf.reshape(tf.reduce_sum(weights * tf.gather_nd(y, index), 1), tf.shape(x))

    def _dispatch_by_experts(self, x: tf.Tensor, chances: tf.Tensor, capacity: int) -> _Dispatch:
        """Dispatches tokens to the experts that choose them; returns the same kinds of values as
        ``_dispatch_by_tokens``.

        Source: Zhou et al., "Mixture-of-experts with expert choice routing", 2022.
        """
        shape = tf.shape(x)
        gates, token = tf.math.top_k(tf.transpose(chances, [0, 2, 1]), capacity)
        group = tf.broadcast_to(tf.range(shape[0])[:, None, None], tf.shape(token))
        index = tf.stack([group, token], -1)
        slots = tf.gather_nd(x, index)
        found = tf.scatter_nd(index, tf.ones_like(gates), shape[:2])
        even = tf.ones_like(chances) / self.experts
        self._tell(None, [even], tf.minimum(found, 1.0))
        return slots, tf.cast(gates, x.dtype), lambda y: tf.scatter_nd(index, y, shape)

    def _tell(self, chances: tf.Tensor | None, chosen: list[tf.Tensor], kept: tf.Tensor) -> None:
        share = tf.add_n(chosen) / len(chosen)
        self.load.assign(tf.reduce_mean(share, [0, 1]))
        self.dropped.assign(1.0 - tf.reduce_mean(kept))
        if chances is None or not self.balance_weight:
            return
        over = [0, 1] if self.balance == "batch" else [1]
        uneven = tf.reduce_sum(tf.reduce_mean(share, over) * tf.reduce_mean(chances, over), -1)
        self.add_loss(self.balance_weight * self.experts * tf.reduce_mean(uneven))

    def compute_output_shape(self, shape: Any) -> Any:
        """Returns the shape of the inputs, which is that of the outputs."""
        return shape

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, for Keras' serialization."""
        names = (
            "experts hidden top_k capacity_factor choose groups shared balance_weight balance z_weight noise".split()
        )
        mine = {name: getattr(self, name) for name in names}
        return {**super().get_config(), **mine, "activation": tf.keras.activations.serialize(self.activation)}


def _enter_scope(kind: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    return kind() if find_running() is not None else nullcontext()


def _check(good: bool, given: str, expected: str) -> None:
    if not good:
        raise ProgramError(
            "wh.layers.MoE does not accept these arguments or inputs",
            given=given,
            expected=expected,
            action="change this argument of wh.layers.MoE, or the inputs of its call",
        )
