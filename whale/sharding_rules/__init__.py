"""Sharding rules: which placements an op allows over one mesh axis, and what a rank then runs."""

from whale.sharding_rules.base import Local, OpView, Rule, Strategy
from whale.sharding_rules.empty import known_outputs
from whale.sharding_rules.registry import LineRule, all_rules, rule_of

__all__ = ["LineRule", "Local", "OpView", "Rule", "Strategy", "all_rules", "known_outputs", "rule_of"]
