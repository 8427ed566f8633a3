"""Optional values: a variant that may hold tensors; opaque, so whole."""

from __future__ import annotations

from whale.rules.notation import REPLICATED
from whale.rules.registry import rule

RULES = (rule("OptionalFromValue OptionalGetValue OptionalHasValue OptionalNone", REPLICATED),)
