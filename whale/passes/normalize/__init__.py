"""Programs rewritten before they are planned: calls inlined, shapes folded, composite ops apart, types and scopes."""
