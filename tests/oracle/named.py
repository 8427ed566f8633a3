"""Scopes by names for cases of the zoo, whose code knows nothing of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import whale as wh

ANNOTATIONS: Mapping[str, Mapping[str, Any]] = {
    "stages": {"dense": wh.stage(0), "dense_[12]": wh.stage(1)},
    "columns": {"sequential/dense*/kernel": wh.split(dim=-1)},
    "attention": {
        "multi_head_attention*": wh.split(),
        "dense_[0-3]": wh.split(),
        "embedding/embeddings": wh.split(dim=-1),
    },
    "both": {"dense": wh.stage(0), "dense_1": wh.stage(1), "dense_2": wh.stage(1), "dense*/kernel": wh.split()},
    "session": {"hidden": wh.stage(0), "logits": wh.stage(1)},
    "modules": {"w1": wh.split(dim=-1), "w2": wh.split()},
}
