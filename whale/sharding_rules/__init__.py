"""Defines sharding rules: the placements that an op allows over one mesh axis, and its local form on a rank."""

from whale.sharding_rules.base import Local, OpView, Rule, Strategy
from whale.sharding_rules.empty import find_known_outputs
from whale.sharding_rules.registry import LineRule, find_rule, load_rules

__all__ = ["LineRule", "Local", "OpView", "Rule", "Strategy", "find_known_outputs", "find_rule", "load_rules"]
