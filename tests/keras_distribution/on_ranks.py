"""Trains a model under a LayoutMap, and saves what came of it: on_ranks.py MODEL MESH FOLDER, MESH as 1x2 or plain."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Layouts = dict[str, tuple[str | None, ...]]
_TRANSFORMER: Layouts = {
    ".*up/bias": ("model",),
    ".*tokens.*embeddings": (None, "model"),
    ".*(query|key|value)/kernel": (None, "model", None),
    ".*(query|key|value)/bias": ("model", None),
    ".*attention_output/kernel": ("model", None, None),
    ".*up/kernel": ("batch", "model"),
    ".*down/kernel": ("model", "batch"),
    "up/kernels": (None, "model"),  # fits nothing, which is told
}


def mlp(keras: Any) -> Any:
    layers = keras.layers
    inputs = keras.Input((8,))
    h = layers.Dense(16, activation="gelu", name="up")(inputs)
    h = layers.LayerNormalization()(layers.Dense(8, name="down")(h) + inputs)
    made = keras.Model(inputs, layers.Dense(3, activation="softmax", name="head")(h))
    return made, np.random.default_rng(0).normal(size=(64, 8))


def transformer(keras: Any) -> Any:
    """A block of attention and one of two dense layers, divided by heads and by features."""
    layers = keras.layers
    tokens = keras.Input((6,), dtype="int32")
    h = layers.Embedding(20, 8, name="tokens")(tokens)
    a = layers.MultiHeadAttention(4, 2, name="attention")(h, h)
    h = layers.LayerNormalization()(h + a)
    f = layers.Dense(8, name="down")(layers.Dense(16, activation="relu", name="up")(h))
    h = layers.LayerNormalization()(h + f)
    made = keras.Model(tokens, layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling1D()(h)))
    return made, np.random.default_rng(1).integers(0, 20, (64, 6))


def backbone(kind: str, keras: Any) -> Any:
    """A backbone of keras_hub, which has a map of its own."""
    keras_hub: Any = importlib.import_module("keras_hub")
    options = {"head_dim": 4} if kind.startswith("Gemma") else {}
    made = getattr(keras_hub.models, kind)(
        vocabulary_size=32, num_layers=2, num_query_heads=4, num_key_value_heads=4, hidden_dim=16,
        intermediate_dim=32, **options,
    )  # fmt: skip
    hidden = keras.layers.GlobalAveragePooling1D()(made.output)
    whole = keras.Model(made.input, keras.layers.Dense(3, activation="softmax")(hidden))
    tokens = np.random.default_rng(2).integers(1, 32, (64, 6))
    return whole, {"token_ids": tokens, "padding_mask": np.ones((64, 6), bool)}


# Name -> (what makes the model and its inputs, its layouts or the class that has them).
MODELS: dict[str, tuple[Callable[[Any], Any], Layouts | str]] = {
    "fully_sharded": (mlp, {".*kernel": ("batch", None)}),  # gathered where they are used
    "transformer": (transformer, _TRANSFORMER),
    "gemma": (functools.partial(backbone, "GemmaBackbone"), "GemmaBackbone"),
    "llama": (functools.partial(backbone, "LlamaBackbone"), "LlamaBackbone"),
}


def main() -> None:
    name, axes, folder = sys.argv[1:]
    rank = 0
    keras: Any = importlib.import_module("keras")
    if axes != "plain":
        import whale as wh

        wh.init()
        rank = wh.rank()
    keras.backend.set_floatx("float64")
    keras.utils.set_random_seed(3)
    asked: Any = {}
    if axes != "plain":
        api = keras.distribution
        api.initialize()
        mesh = api.DeviceMesh(tuple(int(n) for n in axes.split("x")), ("batch", "model"), api.list_devices())
        asked = _layouts(MODELS[name][1], api, mesh)
        api.set_distribution(api.ModelParallel(layout_map=asked, batch_dim_name="batch"))
    made, x = MODELS[name][0](keras)
    y = np.arange(64) % 3
    made.compile(keras.optimizers.Adam(0.01, epsilon=1e-5), "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = made.fit(x, y, batch_size=16, epochs=2, verbose=0)
    lie: dict[str, Any] = {}
    for v in made.variables if axes != "plain" else ():
        parts = getattr(v._value, "_whale_parts", None)
        wanted = asked[v.path]
        if wanted is not None:
            found = None if parts is None else list(parts.find_rank_part(rank).shape)
            lie[v.path] = {"wanted": list(wanted.axes), "found": found, "shape": list(v.shape)}
    values = {f"weight {i}": w for i, w in enumerate(made.get_weights())}
    values |= {f"history {k}": np.array(v) for k, v in history.history.items()}
    values["predict"] = made.predict(x, verbose=0)
    np.savez(Path(folder, f"{name}_{axes}_{rank}.npz"), **values)
    Path(folder, f"{name}_{axes}_{rank}.json").write_text(json.dumps(lie))


def _layouts(layouts: Layouts | str, api: Any, mesh: Any) -> Any:
    if isinstance(layouts, str):
        keras_hub: Any = importlib.import_module("keras_hub")
        return getattr(keras_hub.models, layouts).get_layout_map(mesh)
    found = api.LayoutMap(mesh)
    for pattern, axes in layouts.items():
        found[pattern] = axes
    return found


if __name__ == "__main__":
    main()
