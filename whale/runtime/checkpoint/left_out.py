"""Warns of weights that a checkpoint would silently lack: Keras 3 tells TensorFlow of layers, not of lists of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from whale.log import log
from whale.runtime.variables.checkpoint_regions import find_variable


def is_left_out(saved: Iterable[Any], where: str) -> bool:
    """Warns of weights of saved models and layers that are not saved themselves; tells whether there are any.

    Args:
      saved: all objects of a checkpoint.
      where: its directory.
    """
    saved = list(saved)
    known = {id(v) for v in map(find_variable, saved) if v is not None}
    missing: dict[str, None] = {}
    for holder in saved:
        if hasattr(type(holder), "add_weight"):
            with contextlib.suppress(ValueError):  # Keras 2: it has not been built
                missing.update(
                    (getattr(w, "path", w.name), None) for w in holder.weights if id(find_variable(w)) not in known
                )
    if missing:
        log.warning(
            f"{len(missing)} weights of a model are not in the checkpoint in {where}, {next(iter(missing))} for one: "
            "tf.train.Checkpoint does not see layers that a Keras 3 model has in a list. Make each an attribute of the "
            "model, or name them: tf.train.Checkpoint(model=model, layers=list(model.layers))"
        )
    return bool(missing)
