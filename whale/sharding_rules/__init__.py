"""Defines sharding rules: for each op type, the placements that it allows over one mesh axis, and its form on one
rank.
"""

from whale.sharding_rules.base import Local, OpView, Rule, Strategy
from whale.sharding_rules.empty import find_known_outputs
from whale.sharding_rules.registry import LineRule, find_rule, load_rules

__all__ = ["LineRule", "Local", "OpView", "Rule", "Strategy", "find_known_outputs", "find_rule", "load_rules"]
