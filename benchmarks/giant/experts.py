"""Mixtures of experts: tokens go to experts, which lie on ranks of their own, and come back."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

import whale as wh
from benchmarks.giant.measure import RANKS, Line, Scopes, sgd, weight

TOKENS, WIDTH, HIDDEN, EXPERTS, GROUPS = 1024, 256, 512, 8, 4
CAPACITY_FACTOR = 1.25
FLOAT = 4


class Experts:
    """Top-1 experts, whose tokens are dispatched in groups that have a capacity of their own.

    Args:
      form: how tokens get to their experts: "einsum", "scatter" or "gather".
    """

    def __init__(
        self, scopes: Scopes, dtype: Any, form: str, experts: int = EXPERTS, groups: int = GROUPS,
        tokens: int = TOKENS, width: int = WIDTH, hidden: int = HIDDEN,
    ) -> None:  # fmt: skip
        self.scopes, self.dtype, self.form, self.experts, self.groups = scopes, dtype, form, experts, groups
        self.tokens, self.width = tokens, width
        self.router = weight(0, width, experts, dtype=dtype)
        self.into = weight(1, experts, width, hidden, dtype=dtype)
        self.out = weight(2, experts, hidden, width, dtype=dtype)
        self.before = weight(3, width, width, dtype=dtype)
        self.variables = [self.router, self.into, self.out, self.before]
        self.capacity = int(np.ceil(CAPACITY_FACTOR * tokens / groups / experts))

    def batch(self, number: int) -> tuple[Any, ...]:
        x = np.random.default_rng(number).standard_normal((self.tokens, self.width), np.float32)
        return (tf.cast(x, self.dtype),)

    def step(self, x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with self.scopes.replica():
                h = tf.tanh(x @ self.before)
            loss = tf.reduce_mean(tf.square(self.layer(h) - x))
        sgd(loss, self.scopes.tape(tape), self.variables)
        return loss

    def layer(self, x: tf.Tensor) -> tf.Tensor:
        groups, capacity, experts = self.groups, self.capacity, self.experts
        with self.scopes.replica():
            x = tf.reshape(x, [groups, self.tokens // groups, self.width])
            chances = tf.nn.softmax(tf.einsum("gtd,de->gte", x, self.router))
            chosen = tf.argmax(chances, -1, output_type=tf.int32)
            one = tf.one_hot(chosen, experts, dtype=self.dtype)
            gate = tf.reduce_sum(chances * one, -1)
            place = tf.reduce_sum((tf.cumsum(one, axis=1) - 1) * one, -1)
            kept = tf.cast(place < capacity, self.dtype)
            place = tf.cast(place, tf.int32)
            gate = gate * kept
        if self.form == "einsum":
            y = self.by_einsum(x, one, place, gate)
        elif self.form == "scatter":
            y = self.by_scatter(x, chosen, place, kept, gate)
        else:
            y = self.by_gather(x, chosen, place, kept, gate)
        with self.scopes.replica():
            return tf.reshape(y, [self.tokens, self.width])

    def apply(self, dispatched: tf.Tensor) -> tf.Tensor:
        hidden = tf.nn.relu(tf.einsum("gecd,edh->gech", dispatched, self.into))
        return tf.einsum("gech,ehd->gecd", hidden, self.out)

    def by_einsum(self, x: tf.Tensor, one: tf.Tensor, place: tf.Tensor, gate: tf.Tensor) -> tf.Tensor:
        with self.scopes.replica():
            slots = tf.one_hot(place, self.capacity, dtype=self.dtype)
            combine = gate[..., None, None] * one[..., :, None] * slots[..., None, :]
            dispatch = tf.cast(combine > 0, self.dtype)
            dispatched = tf.einsum("gtec,gtd->gecd", dispatch, x)
        with self.scopes.split():
            applied = self.apply(dispatched)
        with self.scopes.replica():
            return tf.einsum("gtec,gecd->gtd", combine, applied)

    def by_scatter(
        self, x: tf.Tensor, chosen: tf.Tensor, place: tf.Tensor, kept: tf.Tensor, gate: tf.Tensor
    ) -> tf.Tensor:
        groups, capacity = self.groups, self.capacity
        with self.scopes.replica():
            group = tf.broadcast_to(tf.range(groups)[:, None], [groups, self.tokens // groups])
            index = tf.stack([group, chosen, tf.minimum(place, capacity - 1)], -1)
            dispatched = tf.scatter_nd(index, x * kept[..., None], [groups, self.experts, capacity, self.width])
        with self.scopes.split():
            applied = self.apply(dispatched)
        with self.scopes.replica():
            return gate[..., None] * tf.gather_nd(applied, index)

    def by_gather(
        self, x: tf.Tensor, chosen: tf.Tensor, place: tf.Tensor, kept: tf.Tensor, gate: tf.Tensor
    ) -> tf.Tensor:
        groups, capacity = self.groups, self.capacity
        with self.scopes.replica():
            slot = chosen * capacity + tf.minimum(place, capacity - 1)
            mine = tf.one_hot(slot, self.experts * capacity, dtype=self.dtype) * kept[..., None]
            token = tf.argmax(mine, 1, output_type=tf.int32)  # of each slot
            used = tf.reduce_max(mine, 1)
            dispatched = tf.gather(x, token, batch_dims=1) * used[..., None]
            dispatched = tf.reshape(dispatched, [groups, self.experts, capacity, self.width])
        with self.scopes.split():
            applied = self.apply(dispatched)
        with self.scopes.replica():
            applied = tf.reshape(applied, [groups, self.experts * capacity, self.width])
            return gate[..., None] * tf.gather(applied, slot, batch_dims=1)


class OverAll(Experts):
    """Top-2 experts whose capacity is one of the whole batch, or that choose their tokens among all of it.

    Args:
      form: "tokens choose", first choices before second ones; "slots gather", the same with the number of each slot's
        token, by which it is gathered; "experts choose", or "none dropped": tokens choose, and there are as many slots
        as the fullest expert needs.
    """

    def layer(self, x: tf.Tensor) -> tf.Tensor:
        capacity = capacity_of_all(self.experts)
        with self.scopes.replica():
            chances = tf.nn.softmax(x @ self.router)
            if self.form == "experts choose":
                gate, token = tf.math.top_k(tf.transpose(chances), capacity)
                slots = tf.gather(x, token)
            else:
                gate, chosen = tf.math.top_k(chances, 2)
                gate, chosen = (tf.reshape(tf.transpose(t), [-1]) for t in (gate, chosen))
                one = tf.one_hot(chosen, self.experts, dtype=self.dtype)
                place = tf.reduce_sum((tf.cumsum(one, 0) - 1) * one, -1)
                if self.form == "none dropped":
                    capacity = tf.cast(tf.reduce_max(tf.reduce_sum(one, 0)), tf.int32)
                if self.form == "slots gather":
                    return self.by_slots(x, gate, chosen, tf.cast(place, tf.int32), capacity)
                kept = tf.cast(place < tf.cast(capacity, place.dtype), self.dtype)
                index = tf.stack([chosen, tf.minimum(tf.cast(place, tf.int32), capacity - 1)], -1)
                into = tf.tile(x, [2, 1]) * kept[:, None]
                slots = tf.scatter_nd(index, into, [self.experts, capacity, WIDTH])
        with self.scopes.split():
            applied = tf.matmul(tf.nn.relu(tf.matmul(slots, self.into)), self.out)
        with self.scopes.replica():
            if self.form == "experts choose":
                back = tf.reshape(applied * gate[..., None], [-1, WIDTH])
                return tf.scatter_nd(tf.reshape(token, [-1, 1]), back, [TOKENS, WIDTH])
            back = tf.gather_nd(applied, index) * (gate * kept)[:, None]
            return tf.reduce_sum(tf.reshape(back, [2, TOKENS, WIDTH]), 0)

    def by_slots(self, x: tf.Tensor, gate: tf.Tensor, chosen: tf.Tensor, place: tf.Tensor, capacity: int) -> tf.Tensor:
        slots = self.experts * capacity
        with self.scopes.replica():
            kept = place < capacity
            slot = chosen * capacity + tf.minimum(place, capacity - 1)
            at = tf.where(kept, slot, slots)[:, None]  # those that are dropped share one behind all
            token = tf.tensor_scatter_nd_update(tf.zeros([slots + 1], tf.int32), at, tf.range(2 * TOKENS) % TOKENS)
            used = tf.tensor_scatter_nd_update(tf.zeros([slots + 1], self.dtype), at, tf.ones_like(gate))
            into = tf.gather(x, token[:-1]) * used[:-1, None]
            into = tf.reshape(into, [self.experts, capacity, WIDTH])
        with self.scopes.split():
            applied = tf.matmul(tf.nn.relu(tf.matmul(into, self.into)), self.out)
        with self.scopes.replica():
            back = tf.gather(tf.reshape(applied, [slots, WIDTH]), slot)
            back *= (gate * tf.cast(kept, self.dtype))[:, None]
            return tf.reduce_sum(tf.reshape(back, [2, TOKENS, WIDTH]), 0)


class Layer:
    """``wh.layers.MoE`` behind a dense layer, with its losses.

    Args:
      groups_of_rows: 0: inputs have two dimensions, and capacity is one of all tokens.
    """

    def __init__(
        self, scopes: Scopes, dtype: Any, width: int = WIDTH, each: int = TOKENS // GROUPS,
        groups_of_rows: int = GROUPS, **options: Any,
    ) -> None:  # fmt: skip
        self.scopes, self.dtype = scopes, dtype
        self.shape = (groups_of_rows, each, width) if groups_of_rows else (each, width)
        self.layer = wh.layers.MoE(**options, dtype=tf.as_dtype(dtype).name)
        self.layer.build(self.shape)
        self.before = weight(3, width, width, dtype=dtype)
        for i, v in enumerate(self.layer.trainable_variables):
            v.assign(weight(i, *v.shape, dtype=dtype))

    @property
    def variables(self) -> list[Any]:
        return [self.before, *self.layer.variables]

    def batch(self, number: int) -> tuple[Any, ...]:
        return (tf.cast(np.random.default_rng(number).standard_normal(self.shape, np.float32), self.dtype),)

    def step(self, x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with self.scopes.replica():
                h = tf.tanh(x @ self.before)
            y = self.layer(h, training=True)
            with self.scopes.replica():
                loss = tf.reduce_mean(tf.square(y - x)) + tf.add_n(self.layer.losses)
        sgd(loss, tape, [self.before, *self.layer.trainable_variables])
        return loss


def wanted(experts: int = EXPERTS, groups: int = GROUPS) -> int:
    """Four all-to-alls of the slots, the sums of the gradients of the router and of what is before it, and the loss."""
    slots = groups * experts * int(np.ceil(CAPACITY_FACTOR * TOKENS / groups / experts))
    exchanged = slots * WIDTH * FLOAT * (RANKS - 1) // RANKS
    return 4 * exchanged + 2 * (RANKS - 1) * (WIDTH * (WIDTH + experts) + 1) * FLOAT


def wanted_of_layer(shared: int, groups: int) -> int:
    """The same where tokens go to two experts each, with the sum of a shared expert's gradient, losses and metrics."""
    slots = groups * EXPERTS * int(np.ceil(CAPACITY_FACTOR * (TOKENS // GROUPS) * 2 / EXPERTS))
    exchanged = slots * WIDTH * FLOAT * (RANKS - 1) // RANKS
    return 4 * exchanged + 2 * (RANKS - 1) * (WIDTH * (WIDTH + EXPERTS + 2 * shared) + 3 * EXPERTS + 4) * FLOAT


def capacity_of_all(experts: int) -> int:
    """An expert's slots where all tokens go to two experts each."""
    return int(np.ceil(CAPACITY_FACTOR * TOKENS * 2 / experts))


def wanted_of_all(rows: int, experts: int) -> int:
    """Four all-to-alls of so many rows, of which a rank has a part already, and the sums as in ``wanted``; tokens are
    ranked among all, so the choices go to all ranks."""
    sums = 2 * (RANKS - 1) * (WIDTH * (WIDTH + experts) + 1) * FLOAT
    return (4 * rows * WIDTH * FLOAT + 4 * 2 * TOKENS * experts * FLOAT) * (RANKS - 1) // RANKS + sums


def lines() -> list[Line]:
    """The rows about experts."""
    found = [
        Line(f"experts, {form}, routed under replica", partial(Experts, form=form), wanted())
        for form in ("einsum", "scatter", "gather")
    ]
    accumulated = {"pipeline.micro_batches": 2}
    found += [
        Line(
            f"experts, {form}, micro-batches",
            partial(Experts, form=form, groups=8),
            wanted(groups=8),
            config=accumulated,
        )
        for form in ("einsum", "scatter", "gather")
    ]
    layers: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("top-2 and a shared expert", {"shared": 64}, {}),
        ("experts choose", {"choose": "experts"}, {}),
        ("top-2 with micro-batches", {"balance": "group", "groups_of_rows": 8}, accumulated),
    ]
    for name, options, config in layers:
        made = partial(Layer, experts=EXPERTS, hidden=HIDDEN, **options)
        small = partial(Layer, experts=EXPERTS, hidden=8, width=16, each=16, **options)
        moved = wanted_of_layer(options.get("shared", 0), options.get("groups_of_rows", GROUPS))
        found.append(Line(f"wh.layers.MoE, {name}", made, moved, config=config, small=small))
    moved = wanted_of_all(2 * TOKENS, EXPERTS) + 2 * (RANKS - 1) * (3 * EXPERTS + 4) * FLOAT
    open_ended = partial(
        Layer, experts=EXPERTS, hidden=HIDDEN, each=TOKENS, groups_of_rows=0, capacity_factor=EXPERTS / 2
    )
    found.append(Line("wh.layers.MoE, top-2, none dropped", open_ended, moved))
    as_many = partial(Layer, experts=EXPERTS, hidden=HIDDEN, each=TOKENS, groups_of_rows=0, capacity_factor=None)
    small = partial(Layer, experts=EXPERTS, hidden=8, width=16, each=64, groups_of_rows=0, capacity_factor=None)
    found.append(Line("wh.layers.MoE, top-2, dropless", as_many, moved, small=small))
    few = partial(Layer, experts=3, hidden=HIDDEN, each=TOKENS, groups_of_rows=0, choose="experts")
    small = partial(Layer, experts=3, hidden=8, width=16, each=64, groups_of_rows=0, choose="experts")
    moved = wanted_of_all(3 * capacity_of_all(3), 3) + 2 * (RANKS - 1) * (3 * 3 + 4) * FLOAT
    found.append(Line("wh.layers.MoE, 3 experts choose among all tokens", few, moved, small=small))
    for experts in (EXPERTS, 3):
        of, slots = f"{experts} experts, over the whole batch", experts * capacity_of_all(experts)
        tokens = 2 * TOKENS
        forms = {"tokens choose": tokens, "slots gather": tokens, "none dropped": tokens, "experts choose": slots}
        for form, rows in forms.items():
            over_all = partial(OverAll, form=form, experts=experts)
            found.append(Line(f"{of}, {form}", over_all, wanted_of_all(rows, experts)))
    return [*found, Line("3 experts on 4 ranks", partial(Experts, form="einsum", experts=3), wanted(3))]
